"""What commonly goes wrong in distillation is said once, when it happens, and not otherwise."""

import math
from types import SimpleNamespace

import pytest
from runs import rows_of

from lit_klrb.callbacks import DistillationMonitor, distillation

QUIET = {
    "length": 20.0,
    "unfinished": 0.3,
    "end_ref_prob": 0.1,
    "improbable": 0.0,
    "improbable_kl": 0.1,
    **{f"kl_part_{i}": 0.25 for i in (1, 2, 3, 4)},
    "repeated": 0.05,
}


def said(monitor, caplog, *rollouts):
    """The lines that a monitor logs in steps on rollouts with these metrics, beside the quiet ones."""
    caplog.clear()
    for step, metrics in enumerate(rollouts):
        module = SimpleNamespace(experience=SimpleNamespace(metrics=QUIET | metrics))
        trainer = SimpleNamespace(global_step=step + 1, is_global_zero=True)
        monitor.on_train_batch_end(trainer, module, None, None, step)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("wrong", "right", "line"),
    [
        ({"length": 6.0}, {"length": 7.0}, "6.0 tokens on average, 20.0 in the first rollout: the KL of"),
        ({"length": 41.0}, {"length": 39.0}, "41.0 tokens on average, 20.0 in the first rollout, and 30%"),
        ({"unfinished": 0.95}, {"unfinished": 0.85}, "and 95% are truncated"),
        ({"end_ref_prob": 1e-6}, {"end_ref_prob": 1e-4}, "the ends of completions a probability of 1.0e-06"),
        (
            {"improbable": 0.02, "improbable_kl": 0.6},
            {"improbable": 0.02, "improbable_kl": 0.4},
            "tokens with log q below -20 are 2.0% of all and 60% of the KL",
        ),
        ({"repeated": 0.6}, {"repeated": 0.4}, "60% of the tokens equal the one two places before"),
        ({"kl_part_4": 0.85}, {"kl_part_4": 0.75}, "quarter 4 of 4 of the completions has 85% of the KL"),
    ],
)
def test_each_is_said_once_when_it_happens(caplog, wrong, right, line):
    assert said(DistillationMonitor(), caplog, {}, right, right) == []
    (found,) = said(DistillationMonitor(), caplog, {}, right, wrong, wrong)
    assert line in found
    assert found.startswith("step 3: ")


def test_a_run_truncated_from_the_start_is_not_said_to_grow(caplog):
    assert said(DistillationMonitor(), caplog, {"unfinished": 0.95}, {"unfinished": 0.95}) == []


def test_metrics_that_are_missing_are_no_warning(caplog):
    monitor = DistillationMonitor()
    metrics = {name: QUIET[name] for name in ("length", "unfinished")}
    module = SimpleNamespace(experience=SimpleNamespace(metrics=metrics))
    monitor.on_train_batch_end(SimpleNamespace(global_step=1, is_global_zero=True), module, None, None, 0)
    assert not caplog.records
    nothing = {name: math.nan for name in QUIET if name not in metrics}
    assert said(monitor, caplog, nothing) == []


def test_a_resumed_run_remembers_the_first_rollout_and_what_was_said(caplog):
    monitor = DistillationMonitor()
    assert len(said(monitor, caplog, {}, {"length": 6.0})) == 1
    resumed = DistillationMonitor()
    resumed.load_state_dict(monitor.state_dict())
    assert said(resumed, caplog, {"length": 6.0}) == []
    (found,) = said(resumed, caplog, {"length": 50.0})
    assert "20.0 in the first rollout" in found


@pytest.mark.parametrize(
    ("theirs", "stop_at_eos", "is_said"),
    [((7, 1), True, True), ((1, 7), True, False), ((7,), False, False), ((), True, False)],
)
def test_an_end_of_the_teacher_that_does_not_end_the_students_completions(
    caplog, theirs, stop_at_eos, is_said
):
    pair = SimpleNamespace(ends=(1, 2), references=[SimpleNamespace(ends=theirs)])
    module = SimpleNamespace(pair=pair, stop_at_eos=stop_at_eos)
    module.tokenizer = SimpleNamespace(convert_ids_to_tokens=lambda index: f"<{index}>")
    trainer = SimpleNamespace(is_global_zero=True)
    DistillationMonitor().on_fit_start(trainer, module)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == is_said
    if is_said:
        assert lines[0].startswith("the teacher ends with <7> (7), which does not end the student's")


def test_a_run_has_the_monitor_and_its_metrics(chain, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(distillation, "PART_SHARE", 0.2)  # one quarter has at least 0.25
    assert chain.run("fit", "distill", run=tmp_path) == 0
    lines = [record.getMessage() for record in caplog.records]
    assert sum("of the completions has" in line for line in lines) == 1
    values = rows_of(tmp_path)[1]
    assert 0 <= float(values["train/improbable_kl"]) <= 1
    assert sum(float(values[f"train/kl_part_{i}"]) for i in (1, 2, 3, 4)) == pytest.approx(1, abs=1e-5)


def test_other_modules_are_refused(chain, tmp_path, capsys):
    assert chain.run("fit", "rloo", "--trainer.callbacks+=DistillationMonitor", run=tmp_path) == 2
    needs = "DistillationMonitor is for training without a reward, as DistillModule's, got RLOOModule"
    assert needs in capsys.readouterr().err

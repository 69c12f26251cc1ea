"""Which settings of a resumed run may differ from those it began with."""

import pytest
import torch

from lit_klrb.errors import ConfigurationError
from lit_klrb.run.checkpoints import PARTS
from lit_klrb.run.same_run import MAY_DIFFER, check_same_run, record, run_of

STUDY = {"class_path": "lit_klrb.studies.EstimationStudy", "init_args": {}}
MONITOR = {"class_path": "lit_klrb.callbacks.KLMonitor", "init_args": {}}
AVERAGING = {"class_path": "lightning.pytorch.callbacks.StochasticWeightAveraging", "init_args": {}}


def settings(**changes):
    """A configuration with some settings replaced, by their dotted keys with _ for the dots."""
    found = {
        "seed_everything": 0,
        "trainer": {
            "max_steps": 6,
            "gradient_clip_val": 1.0,
            "callbacks": None,
            "logger": None,
            "devices": 1,
        },
        "model": {
            "class_path": "lit_klrb.modules.RLOOModule",
            "init_args": {"schedule": "constant", "policy_config": {"n_layer": 1}, "reward_path": "grammar"},
        },
        "kl": {
            "estimator": {"class_path": "lit_klrb.estimators.RaoBlackwell", "init_args": {"baseline": None}},
            "beta": 0.1,
            "final_beta": None,
            "final_discount": None,
            "final_forward_share": None,
        },
        "checkpoint": {"every_n_train_steps": 100},
    }
    for key, value in changes.items():
        *path, name = key.split("__")
        place = found
        for part in path:
            place = place[part]
        place[name] = value
    return found


def refusal(old, new):
    """What is wrong with resuming; None if nothing is."""
    try:
        check_same_run("run/last.ckpt", record(old), record(new))
    except ConfigurationError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("kl__beta", 0.5, "kl.beta: run/last.ckpt was trained with 0.1, not 0.5; --ckpt_path resumes"),
        ("kl__estimator__class_path", "Other", "kl.estimator.class_path: "),
        ("kl__estimator__init_args__baseline", "leave_one_out", "kl.estimator.init_args.baseline: "),
        ("model__class_path", "Other", "model.class_path: "),
        ("model__init_args__policy_config", {"n_layer": 1, "n_head": 2}, "model.init_args.policy_config: "),
        ("trainer__gradient_clip_val", None, "trainer.gradient_clip_val: "),
        ("seed_everything", 1, "seed_everything: run/last.ckpt was trained with 0, not 1; "),
        ("trainer__callbacks", [AVERAGING], "trainer.callbacks: "),
        ("trainer__callbacks", [STUDY], "trainer.callbacks: "),
        ("trainer__max_steps", 5, "with 6, not 5 (it can only increase); "),
    ],
)
def test_what_decides_the_training_must_agree(key, value, message):
    line = refusal(settings(), settings(**{key: value}))
    assert message in line
    assert "to start another from its policy use --model.init_args.policy_path run/last.ckpt" in line
    assert refusal(settings(**{key: value}), settings(**{key: value})) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer__max_steps", 7),
        ("trainer__callbacks", [MONITOR]),
        ("trainer__devices", 2),
        ("checkpoint__every_n_train_steps", 1),
        ("model__init_args__served_timeout", 7.0),
    ],
)
def test_what_does_not_may_differ(key, value):
    assert refusal(settings(), settings(**{key: value})) is None
    assert any(key.replace("__", ".").startswith(allowed) for allowed in MAY_DIFFER)


def test_a_served_teacher_may_have_moved():
    key = "model__init_args__reference_path"
    saved = settings(**{key: "http://127.0.0.1:8000/v1"})
    assert refusal(saved, settings(**{key: "https://teacher.example/v1"})) is None
    assert "reference_path: run/last.ckpt was trained with" in refusal(saved, settings(**{key: "folder"}))


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("model__init_args__schedule", "cosine", "the learning rate's schedule depends on it"),
        ("kl__final_beta", 1.0, "kl.final_beta depends on it"),
        ("kl__final_discount", 1.0, "kl.final_discount depends on it"),
        ("kl__final_forward_share", 0.0, "kl.final_forward_share depends on it"),
        ("trainer__callbacks", [MONITOR, STUDY], "the snapshots of a study depend on it"),
    ],
)
def test_more_steps_are_refused_where_something_depends_on_their_number(key, value, reason):
    old, new = settings(**{key: value}), settings(**{key: value}, trainer__max_steps=7)
    assert f"trainer.max_steps: run/last.ckpt was trained with 6, not 7 ({reason}); " in refusal(old, new)


def test_files_that_are_read_again_count_by_their_content(tmp_path):
    first, copy, other = (tmp_path / name for name in ("first", "copy", "other"))
    for path, content in ((first, "a"), (copy, "a"), (other, "b")):
        (path / "deep").mkdir(parents=True)
        (path / "deep" / "file").write_text(content)

    def config(path):
        return settings(model__init_args__reference_path=str(path))

    assert refusal(config(first), config(copy)) is None
    for place in (other, other / "deep" / "file"):
        assert f"{place} has changed since the run of run/last.ckpt was started" in refusal(
            config(first), config(place)
        )
    before = record(config(first))
    (first / "deep" / "file").rename(first / "file")
    with pytest.raises(ConfigurationError, match=r"model\.init_args\.reference_path: .* has changed since"):
        check_same_run("run/last.ckpt", before, record(config(first)))
    # The policy a run started from is in its checkpoints.
    assert not record(settings(model__init_args__policy_path=str(first)))["contents"]


@pytest.mark.parametrize("key", ["reference_path", "reward_path", "source", "preferences"])
@pytest.mark.parametrize("weighted", [False, True])
def test_files_that_change_are_noticed(tmp_path, key, weighted):
    def config(name, weight=0.5):
        value = {"grammar": 1.0, str(tmp_path / name): weight} if weighted else str(tmp_path / name)
        return settings(**{f"model__init_args__{key}": value})

    for name in ("file", "copy"):
        (tmp_path / name).write_text("a")
    before = record(config("file"))
    check_same_run("run/last.ckpt", before, record(config("copy")))
    if weighted:
        with pytest.raises(ConfigurationError, match="has changed"):
            check_same_run("run/last.ckpt", before, record(config("file", 0.6)))
    (tmp_path / "file").write_text("b")
    with pytest.raises(ConfigurationError, match=rf"^model\.init_args\.{key}: .*file.* has changed since"):
        check_same_run("run/last.ckpt", before, record(config("file")))


def test_a_key_that_one_version_does_not_know_is_passed_over():
    assert refusal(settings(), settings(model__init_args__new=1)) is None
    assert refusal(settings(model__init_args__old=1), settings()) is None


def test_a_checkpoint_of_a_trainer_of_ones_own_is_compared_by_its_modules_arguments(tmp_path):
    path = tmp_path / "own.ckpt"
    arguments = {"_class_path": "lit_klrb.modules.RLOOModule", "schedule": "cosine"}
    parts = dict.fromkeys(PARTS, 0)
    torch.save({**parts, "hyper_parameters": arguments}, path)
    run = run_of(str(path))
    assert run["id"] == ""
    with pytest.raises(ConfigurationError, match=r"model\.init_args\.schedule: .*cosine, not constant"):
        check_same_run(str(path), run, record(settings()))
    check_same_run(str(path), run, record(settings(model__init_args__schedule="cosine")))
    # As `save_weights_only` of Lightning's ModelCheckpoint writes it
    torch.save({name: 0 for name in PARTS if name not in ("callbacks", "optimizer_states")}, path)
    lacks = "it lacks callbacks, optimizer_states; policy_path starts another run"
    with pytest.raises(ConfigurationError, match=f"^ckpt_path: {path} cannot be resumed: {lacks}"):
        run_of(str(path))

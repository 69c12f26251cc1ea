"""What is timed computes what it says: every variant against float64, on a small case."""

import importlib.util

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import floor, op, op_peers, rounds, step_case, topk, variance
from benchmarks.engines.__main__ import held
from benchmarks.op_case import Size
from benchmarks.table import replace_part

CASE = Size("tiny", 67, 16, 24, torch.float32, 24).case()


@pytest.mark.parametrize("variant", op.VARIANTS, ids=lambda variant: variant.label)
@pytest.mark.filterwarnings("ignore")
def test_a_variant_agrees_with_float64(variant):
    needed = "liger_kernel" if "Liger" in variant.label else "trl"
    if variant.function.__module__ == op_peers.__name__ and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    if variant.options.get("compile_body"):
        pytest.skip("the compiled bodies are tested where they live")
    with torch.compiler.set_stance("force_eager"):  # Liger's are compiled when they are timed
        (errors,) = op.accuracy([variant], CASE).values()
    for error in errors:
        assert error is None or error < 1e-4
    assert errors[2] is not None


@pytest.mark.parametrize(
    ("found", "said", "good"),
    [(True, "holds", True), (None, "was not run", True), (False, "does not hold", False)],
)
def test_an_engine_that_is_not_there_does_not_hold(capsys, found, said, good):
    assert held("slurm", lambda: found) == good
    assert capsys.readouterr().out == f"slurm {said}, 0.0 min\n"


def test_floors_and_ratios():
    times = {"a": [1.0, 2.0, 9.0], "b": [2.0, 2.0, 3.0]}
    assert op.ratio(times, "a", "b") == 1.0


@pytest.mark.parametrize("lora", [None, {"r": 1}])
def test_the_floor_of_a_training_step_has_its_operations(tmp_path, monkeypatch, lora):
    def operations(run):
        with FlopCounterMode(display=False) as counter:
            run()
        return counter.get_total_flops()

    monkeypatch.setattr(
        floor, "interleaved_times", lambda runs, rounds: {name: [operations(runs[name])] for name in runs}
    )
    task = step_case.tiny(tmp_path)
    task = task._replace(lora=lora, prompts=task.prompts[:4])
    for epochs in (1, 4):
        assert floor.seconds(task, epochs) == pytest.approx(task.operations(epochs), rel=0.03)


def test_a_part_of_the_document_is_replaced_and_the_others_are_kept(tmp_path):
    document = tmp_path / "benchmarks.md"
    document.write_text("# Benchmarks\n")
    replace_part(document, "op", "one")
    replace_part(document, "step", "two")
    replace_part(document, "op", "three")
    text = document.read_text()
    assert "one" not in text
    assert text.index("three") < text.index("two")
    assert text.count("written by") == 2


def test_traces_and_their_jackknife():
    samples = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = variance.traces(samples)
    expected = [samples.T.cov().trace()]
    for left_out in range(6):
        kept = torch.cat([samples[:left_out], samples[left_out + 1 :]])
        expected.append(kept.T.cov().trace())
    assert torch.allclose(found, torch.stack(expected))


def test_the_median_of_rounds_has_an_interval_and_slow_rounds_do_not_count_for_the_fastest():
    ours, base = [1.1 * (1 + i % 7) for i in range(40)], [1.0 * (1 + i % 7) for i in range(40)]
    assert rounds.median_text(ours, base) == "1.100 (1.100 to 1.100)"
    disturbed = [*ours[:-10], *(100 * time for time in ours[-10:])]
    assert rounds.fastest(disturbed, base) == pytest.approx(rounds.fastest(ours, base), rel=0.2)


def test_positions_of_the_top_k_table_are_exact():
    kl, whole = topk.positions(*topk.zipf(0.5), topk.VOCABULARY)
    p, q = (values.log_softmax(0) for values in topk.zipf(0.5))
    assert kl == pytest.approx((p.exp() * (p - q)).sum().item())
    _, some = topk.positions(*topk.zipf(0.5), 32)
    for name, position in whole.items():
        assert position.bias < 1e-9
        assert (position.variance < 1e-9) == (name != "TopKBaseline")
        assert (some[name].bias < 1e-9) == (name in ("RaoBlackwellTopK", "TopKWeightedTail", "TopKBaseline"))
    assert some["RaoBlackwellTopK"].smallest > 0 > some["TopKWeightedTail"].smallest
    assert some["RaoBlackwellTopK"].variance < 0.5

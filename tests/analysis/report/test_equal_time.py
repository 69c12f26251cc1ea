"""Outcomes at equal time, against loops over the files of the results."""

import json
import shutil

import numpy as np
import pytest
from reading import grid_results
from scipy import stats
from synthetic import diverge, write_sweep

from analysis.cli import main
from analysis.report.assessment import Assessment
from analysis.report.sections.equal_time import equal_time
from analysis.results import layout
from analysis.results.load import load_sweep
from analysis.results.records import Curve
from analysis.stats.equal_time import value_at

ARMS = ("MonteCarlo", "RaoBlackwell", "K3Loss")
BETAS = {0: 0.1, 1: 0.2}
SMALL = {"replicates": 2, "betas": {0: 0.1}}


def write_times(runs, time_of):
    """Write the time of each run of the grid, unless `time_of(place)` is None; return those written."""
    written = {}
    for place, content in grid_results(runs).items():
        seconds = time_of(place)
        if seconds is not None:
            path = layout.workdir(runs, content["id"]) / layout.SECONDS
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{seconds}")
            written[place] = float(seconds)
    return written


def constant(place):
    return {"MonteCarlo": 20.0, "RaoBlackwell": 10.0}.get(place[0], 25.0)


def section_of(runs):
    return equal_time(Assessment(load_sweep(runs), ()))


def interpolated(steps, values, step):
    for left, right in zip(range(len(steps)), range(1, len(steps)), strict=False):
        if steps[left] <= step <= steps[right]:
            part = (step - steps[left]) / (steps[right] - steps[left])
            return values[left] + part * (values[right] - values[left])
    raise AssertionError(step)


@pytest.mark.parametrize("outcome", ["objective", "kl"])
def test_numbers_are_those_of_a_loop_over_the_results(tmp_path, outcome):
    gone = ("K3Loss", 1, 2)
    runs = write_sweep(
        tmp_path,
        estimators=ARMS,
        betas=BETAS,
        replicates=5,
        edit=diverge(gone),
        primary={"outcome": outcome},
    )
    rng = np.random.default_rng(0)
    unknown = {("RaoBlackwell", 0, 1), ("MonteCarlo", 0, 3)}
    times = write_times(
        runs, lambda place: None if place in unknown else round(constant(place) * float(rng.lognormal()), 3)
    )
    results = {place: one for place, one in grid_results(runs).items() if place != gone}
    found = section_of(runs).numbers["arms"]

    def at_step(place, share):
        steps, kl = (results[place]["curves"]["val/kl"][key] for key in ("step", "value"))
        reward = results[place]["curves"]["val/reward"]["value"]
        values = kl if outcome == "kl" else [r - BETAS[place[1]] * k for r, k in zip(reward, kl, strict=True)]
        return interpolated(steps, values, share * steps[-1])

    for index in BETAS:
        ratios = {arm: [] for arm in ARMS}
        for arm, values in ratios.items():
            for s in range(5):
                ours, theirs = (arm, index, s), ("MonteCarlo", index, s)
                if {ours, theirs} <= times.keys() and gone not in (ours, theirs):
                    values.append(times[ours] / times[theirs])
        medians = {arm: float(np.median(values)) for arm, values in ratios.items()}
        assert sorted(len(values) for values in ratios.values()) == ([3, 4, 4] if index == 0 else [4, 5, 5])
        for arm, values in ratios.items():
            one = found[arm][str(index)]
            share = min(medians.values()) / medians[arm]
            assert one["time"] == pytest.approx(medians[arm])
            assert one["range"] == pytest.approx((min(values), max(values)))
            assert one["pairs"] == len(values)
            assert one["step"] == pytest.approx(4 * share)
            known = [s for s in range(5) if (arm, index, s) in results]
            assert one["outcome"] == pytest.approx(np.mean([at_step((arm, index, s), share) for s in known]))
            if arm == "MonteCarlo":
                assert one["difference"] is None
                continue
            own = min(medians.values())  # the share of the control, whose ratio is 1
            differences = [
                at_step((arm, index, s), share) - at_step(("MonteCarlo", index, s), own) for s in known
            ]
            assert one["difference"] == pytest.approx(np.mean(differences))
            low, high = one["interval"]
            assert (low + high) / 2 == pytest.approx(one["difference"])
            # The error of the outcomes alone, to which that of the times is added
            assert high - low > 1.7 * stats.t.ppf(0.975, len(known) - 1) * stats.sem(differences)


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_the_interval_includes_the_noise_of_times(tmp_path, noise):
    """With the curves J = step of all runs, the difference is that of the steps reached."""

    def edit(point, made):
        steps = list(range(0, 50, 2))
        for key, values in (("reward", [float(step) for step in steps]), ("kl", [0.0] * len(steps))):
            made["curves"][f"val/{key}"] = {"step": steps, "value": values}
        return made

    runs = write_sweep(tmp_path, betas={0: 0.1}, replicates=30, edit=edit)
    rng = np.random.default_rng(3)
    write_times(
        runs, lambda place: (2.0 if place[0] == "RaoBlackwell" else 1.0) * float(np.exp(noise * rng.normal()))
    )
    one = section_of(runs).numbers["arms"]["RaoBlackwell"]["0"]
    low, high = one["interval"]
    # the median of 30 ratios with SD sqrt(2) * noise of their logs, by the delta method
    error = one["step"] * np.sqrt(np.pi / 2) * np.sqrt(2) * noise / np.sqrt(30)
    assert (high - low) / 2 == pytest.approx(stats.t.ppf(0.975, 29) * error, rel=0.4)


def test_budget_is_the_control_if_no_arm_is_quicker(tmp_path):
    runs = write_sweep(tmp_path, **SMALL)
    write_times(runs, lambda place: 10.0 if place[0] == "MonteCarlo" else 40.0)
    arms = section_of(runs).numbers["arms"]
    assert [arms[arm]["0"]["step"] for arm in ("MonteCarlo", "RaoBlackwell")] == [4.0, 1.0]


def at(steps, runs):
    """An edit for `write_sweep`: evaluations at some steps only, in some of the replicates."""

    def edit(point, made):
        if point[2] in runs:
            for curve in made["curves"].values():
                curve.update({key: [values[step] for step in steps] for key, values in curve.items()})
        return made

    return edit


def test_nothing_is_interpolated_from_start_to_end(tmp_path):
    runs = write_sweep(tmp_path, edit=at([0, 1, 4], [1]), **SMALL)
    write_times(runs, constant)
    control, quickest = section_of(runs).tables[0].rows
    assert control == ("MonteCarlo", "0.1", "1", "–", "2.00", "50%", "not evaluated in between", "–")
    assert quickest[4:6] == ("4.00", "100%")
    final = [one["curves"] for place, one in grid_results(runs).items() if place[0] == "RaoBlackwell"]
    ends = np.mean([one["val/reward"]["value"][-1] - 0.1 * one["val/kl"]["value"][-1] for one in final])
    assert section_of(runs).numbers["arms"]["RaoBlackwell"]["0"]["outcome"] == pytest.approx(ends)
    assert quickest[-1] == "–"


def test_a_value_is_exact_at_evaluations_and_needs_two_of_them_inside():
    steps = np.array([0.0, 1.0, 2.0, 4.0])
    assert value_at(Curve(steps, steps**2), 3.0) == 10.0
    assert value_at(Curve(steps[[0, 1, 3]], steps[[0, 1, 3]] ** 2), 3.0) is None
    assert value_at(Curve(steps[[0, 1, 3]], steps[[0, 1, 3]] ** 2), 1.0) == 1.0
    late = Curve(steps + 10, steps)
    assert value_at(late, 9.0) is None, "not before the first evaluation"


@pytest.mark.parametrize("timed", [(), ("MonteCarlo",), ("RaoBlackwell", "K3Loss")])
def test_there_is_no_section_unless_the_control_and_another_arm_have_times(tmp_path, timed):
    runs = write_sweep(tmp_path, estimators=ARMS, **SMALL)
    write_times(runs, lambda place: 5.0 if place[0] in timed else None)
    assert section_of(runs) is None


def test_a_published_sweep_has_the_times_and_verify_finds_each_that_changes(tmp_path, undrawn, capsys):
    runs, output, again = (tmp_path / name for name in ("runs", "published", "again"))
    write_times(write_sweep(runs, **SMALL), constant)
    assert main(["publish", str(runs), "--output", str(output)]) == 0
    times = json.loads((output / "seconds.json").read_text())
    assert list(times) == ["checksum", *sorted(one["id"] for one in grid_results(runs).values())]
    assert "At equal time" in (output / "report.html").read_text("utf-8")
    assert main(["publish", str(output), "--output", str(again)]) == 0
    assert (again / "seconds.json").read_bytes() == (output / "seconds.json").read_bytes()
    # Also from the sweep after its working directories were deleted
    shutil.rmtree(runs / "cells")
    assert main(["publish", str(runs), "--output", str(again)]) == 0
    assert (again / "seconds.json").read_bytes() == (output / "seconds.json").read_bytes()
    capsys.readouterr()
    assert main(["verify", str(output)]) == 0
    name = next(key for key in times if key != "checksum")
    (output / "seconds.json").write_text(json.dumps(times | {name: 17.5}))
    assert main(["verify", str(output)]) == 1
    assert "problem: seconds.json: does not match its checksum" in capsys.readouterr().out
    # As written by earlier versions
    del times["checksum"]
    (output / "seconds.json").write_text(json.dumps(times | {name: 17.5}))
    expected = f"sections.equal_time.seconds.{name}: {times[name]} is written, the results give 17.5"
    assert main(["verify", str(output)]) == 1
    assert expected in capsys.readouterr().out
    # Also where the page was written by other code
    numbers = json.loads((output / "results.json").read_text())
    numbers["code"]["sources"] = "0" * 64
    (output / "results.json").write_text(json.dumps(numbers))
    assert main(["verify", str(output)]) == 1
    assert expected in capsys.readouterr().out


def test_a_sweep_without_times_is_published_without_them(tmp_path, undrawn):
    runs = write_sweep(tmp_path / "runs", **SMALL)
    assert main(["publish", str(runs), "--output", str(tmp_path / "published")]) == 0
    assert not (tmp_path / "published" / "seconds.json").exists()
    assert "At equal time" not in (tmp_path / "published" / "report.html").read_text("utf-8")

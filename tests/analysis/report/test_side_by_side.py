"""`lit-klrb compare`: two unpaired sweeps, against scipy's Welch test."""

import shutil

import numpy as np
import pytest
from scipy import stats
from synthetic import diverge, edit_plan, write_sweep

from analysis.checks import load_sweep
from analysis.cli import main
from analysis.report.side_by_side import arm_differences, common_betas, replicate_means


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory):
    root = tmp_path_factory.mktemp("sweeps")
    write_sweep(root / "one", replicates=4)
    write_sweep(
        root / "other",
        estimators=("MonteCarlo", "K3Loss"),
        betas={0: 0.1, 1: 0.2, 2: 0.4},
        replicates=6,
        lift={"K3Loss": 0.5},
    )
    return root / "one", root / "other"


def objective(directory, arm, betas):
    """J of each replicate, computed from the runs."""
    runs = load_sweep(directory).grid
    return [
        np.mean(
            [r.final["reward"] - b * r.final["kl"] for b in betas for r in runs.values() if at(r, arm, b, n)]
        )
        for n in sorted({place[2] for place in runs})
    ]


def at(run, arm, beta, replicate):
    return (run.point.arm, run.point.beta, run.point.replicate) == (arm, beta, replicate)


def test_differences_are_welchs_over_the_common_betas(sweeps):
    read = [load_sweep(sweep) for sweep in sweeps]
    assert common_betas(*read) == [0.1, 0.2]
    for arm, (counterpart, estimate) in arm_differences(*read).items():
        assert counterpart == "MonteCarlo", "the control, as the first sweep has no other such arm"
        ours, theirs = objective(sweeps[1], arm, [0.1, 0.2]), objective(sweeps[0], counterpart, [0.1, 0.2])
        expected = stats.ttest_ind(ours, theirs, equal_var=False)
        assert estimate.p_value == pytest.approx(expected.pvalue)
        interval = estimate.interval()
        assert (interval.low, interval.high) == pytest.approx(tuple(expected.confidence_interval()))


def test_a_replicate_with_a_diverged_run_is_left_out(tmp_path):
    directory = write_sweep(tmp_path, replicates=4, edit=diverge(("MonteCarlo", 1, 2)))
    assert len(replicate_means(load_sweep(directory), "MonteCarlo", [0.1])) == 3
    assert len(replicate_means(load_sweep(directory), "MonteCarlo", [0.05])) == 4


def test_the_command_prints_both_sweeps_and_that_they_are_unpaired(sweeps, capsys):
    assert main(["compare", *map(str, sweeps)]) == 0
    text = capsys.readouterr().out
    assert "The runs of two sweeps are not matched" in text
    row = next(line for line in text.splitlines() if line.startswith("K3Loss"))
    assert "0.1, 0.2" in row


def test_a_sweep_is_not_compared_with_itself(sweeps, capsys):
    assert main(["compare", str(sweeps[0]), str(sweeps[0])]) == 2
    assert "are the same directory; two sweeps are expected" in capsys.readouterr().err


def test_without_a_common_beta_there_is_no_difference(sweeps, tmp_path, capsys):
    other = write_sweep(tmp_path, betas={0: 7.0}, replicates=3)
    assert main(["compare", str(sweeps[0]), str(other)]) == 0
    assert capsys.readouterr().out.count("\tnone\t–\tno interval: no common β\t–\n") == 2


def test_invalid_sweeps_have_no_p_value(sweeps, tmp_path, capsys):
    directory = write_sweep(tmp_path, replicates=3)
    edit_plan(
        directory, lambda document: document["content"]["plan"]["primary"].update(alpha=0.2), rehash=False
    )
    assert main(["compare", str(sweeps[0]), str(directory)]) == 0
    text = capsys.readouterr().out
    assert text.count("withheld") == 2


def test_other_hyperparameters_are_named_and_runs_that_both_have_are_not_compared(tmp_path, capsys):
    def with_settings(source):
        return lambda point, made: (
            made
            | {
                "settings": {
                    "data.source": source,
                    "kl.beta": made["cell"]["beta"],
                    "kl.estimator.class_path": point[0],
                }
            }
        )

    one, other = (
        write_sweep(tmp_path / source, edit=with_settings(source)) for source in ("grammar", "imdb")
    )
    assert main(["compare", str(one), str(other)]) == 0
    text = capsys.readouterr().out
    assert "Different hyperparameters: data.source (grammar; imdb)." in text
    assert "withheld" not in text
    assert f"{one}\t" in text, "both plans have one name"
    shutil.copytree(one, tmp_path / "copy")
    assert main(["compare", str(one), str(tmp_path / "copy")]) == 0
    text = capsys.readouterr().out
    assert "24 results of the grids are in both: the sweeps are not independent." in text
    assert text.count("withheld") == 2

"""The audit of published points, compared with an enumeration of all swaps, and its errors."""

import itertools
import re

import numpy as np
import pytest

from analysis.stats.frontier import nondominated
from replication.__main__ import main
from replication.audit_share import p_range, points_needed, sign_p


def write(path, rows, header="method,kl,reward,beta,seed"):
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]))
    return str(path)


def matched(seed, shift, pairs=8, shared=False):
    """Rows of matched runs at two betas; each pair has its seed, or both betas of a seed share it."""
    generator = np.random.default_rng(seed)
    rows = []
    for index in range(pairs):
        for method in ("MC", "RB"):
            kl, noise = generator.uniform(0.1, 2), generator.normal(scale=0.3)
            reward = np.sqrt(kl) + noise + shift * (method == "RB")
            rows.append((method, kl, reward, 0.1 * (1 + index % 2), index // 2 if shared else index))
    return rows


def swaps(rows, shared):
    """Signs of every swap of pairs, or of both pairs of a seed; the rows are MC and RB in turn."""
    units = len(rows) // (4 if shared else 2)
    signs = np.array(list(itertools.product([-1, 1], repeat=units)))
    return np.repeat(signs, 2, axis=1) if shared else signs


def enumerated_p(rows, statistic, shared=False):
    """Of a sum over pairs, over all label swaps."""
    difference = statistic(np.array([row[1:4] for row in rows]).reshape(-1, 2, 3))
    return np.mean(np.abs(swaps(rows, shared) @ difference) >= abs(difference.sum()) - 1e-12)


def frontier_difference(runs):
    on = nondominated(runs[..., 0], runs[..., 1])
    return on[:, 1].astype(int) - on[:, 0]


def objective_difference(runs):
    values = runs[..., 1] - runs[..., 2] * runs[..., 0]
    return values[:, 1] - values[:, 0]


def p_after(text, out):
    return float(re.search(text + "p\u00a0=\u00a0([0-9.]*[0-9])", out)[1])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_matched_points_have_the_p_of_all_swaps_of_pairs_or_of_shared_seeds(tmp_path, capsys, seed, shared):
    rows = matched(seed, shift=0.2 * seed, shared=shared)
    assert main(["audit", write(tmp_path / "points.csv", rows), "--control", "MC"]) == 0
    out = capsys.readouterr().out
    assert "8 matched pairs" in out
    # two digits are printed
    found = p_after("exact swap ", out)
    assert found == pytest.approx(enumerated_p(rows, frontier_difference, shared), rel=0.06)
    found = p_after(r"objective: .*?exact swap ", out)
    assert found == pytest.approx(enumerated_p(rows, objective_difference, shared), rel=0.06)
    assert ("The smallest attainable p with 4 seeds is 0.12" in out) is shared
    for claim in ("objective", "kl", "reward", "spread", "matched_kl, described"):
        assert f"\n  {claim}: " in out
    assert "corrected over 4 tests" in out
    assert out.rstrip().endswith("it does not make a method better.")


def test_points_without_beta_have_no_test_of_j_and_none_at_matched_kl(tmp_path, capsys):
    rows = [(*row[:3], row[4]) for row in matched(1, shift=1.0, pairs=16)]
    path = write(tmp_path / "points.csv", rows, "method,kl,reward,seed")
    assert main(["audit", path, "--control", "MC"]) == 0
    out = capsys.readouterr().out
    assert "objective: " not in out
    assert "matched_kl, described: with one beta" in out


def test_unmatched_points_have_the_p_of_all_labellings(tmp_path, capsys):
    rows = [row[:3] for row in matched(1, shift=0.4, pairs=4)]
    assert main(["audit", write(tmp_path / "p.csv", rows, "method,kl,reward"), "--control", "MC"]) == 0
    out = capsys.readouterr().out
    assert "not matched one to one" in out
    on = nondominated(np.array([row[1] for row in rows]), np.array([row[2] for row in rows]))
    treated = np.array([row[0] == "RB" for row in rows])
    counts = [on[list(chosen)].sum() for chosen in itertools.combinations(range(8), 4)]
    observed = (on & treated).sum()
    share = np.mean(np.array(counts) == observed)
    expected = np.mean([np.mean(np.array(counts) == c) <= share * (1 + 1e-9) for c in counts])
    assert float(out.split("exact p\u00a0=\u00a0")[1].split(". This")[0]) == pytest.approx(expected, rel=0.06)


def test_a_diverged_run_is_named_and_not_on_the_frontier(tmp_path, capsys):
    rows = [("RB", "nan", 9, 0, 0), ("MC", 1, 1, 0, 0), ("RB", 0.5, 2, 0, 1), ("MC", 1, 1, 0, 1)]
    assert main(["audit", write(tmp_path / "points.csv", rows), "--control", "MC"]) == 0
    out = capsys.readouterr().out
    assert "1 run diverged" in out
    assert "1 of 1 frontier point." in out


@pytest.mark.parametrize("share", [0.6, 7 / 9, 0.95])
def test_the_number_of_pairs_needed_is_the_smallest_with_the_power(share):
    needed = points_needed(share)

    def power(total):
        reject = [sign_p(k, total) <= 0.05 for k in range(total + 1)]
        chances = np.array([1.0])
        for _ in range(total):  # the binomial distribution by convolution
            chances = np.convolve(chances, [1 - share, share])
        return chances[reject].sum()

    assert power(needed) >= 0.8
    assert power(needed - 1) < 0.8


def test_a_share_alone(capsys):
    assert main(["audit", "--share", "7/9"]) == 0
    out = capsys.readouterr().out
    assert "7 of 9 frontier points (78%)" in out
    assert "p\u00a0=\u00a00.062 with 2, the most possible, to p\u00a0=\u00a00.18 with none" in out
    assert "28 discordant pairs" in out


@pytest.mark.parametrize(("wins", "total"), [(7, 9), (2, 9), (9, 9), (4, 8), (28, 36), (0, 3), (1, 2)])
def test_the_p_values_of_a_share_are_those_of_all_numbers_of_pairs_with_both_runs_on(wins, total):
    found = [sign_p(wins - both, total - 2 * both) for both in range(min(wins, total - wins) + 1)]
    assert p_range(wins, total) == (min(found), max(found))


def test_a_frontier_with_both_runs_of_two_pairs_has_the_smallest_p_of_its_share(tmp_path, capsys):
    rows = []
    for at in range(1, 8):  # of the first two pairs the control's run is on the frontier, too
        control = (at + 0.5, at + 0.2) if at < 3 else (at + 0.3, at - 5.0)
        rows += [("RB", at, at, 1.0, at), ("MC", *control, 1.0, at)]
    assert main(["audit", write(tmp_path / "points.csv", rows), "--control", "MC"]) == 0
    out = capsys.readouterr().out
    assert "7 of 9 frontier points" in out
    assert p_after("exact swap ", out) == pytest.approx(p_range(7, 9)[0], rel=0.06)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give either a CSV file of points or --share K/N"),
        (["--share", "9/7"], "--share 9/7 is not allowed; K/N is expected"),
        (
            ["--share", f"1/{10**20}"],
            "K/N is expected, each of at most 6 digits: 7/9",
        ),
        (["--share", "78%"], "--share 78% is not allowed; K/N is expected"),
        (["{file}"], "--control is missing"),
        (["{file}", "--control", "PPO"], "--control PPO: the file has the methods MC, RB"),
        (["nowhere.csv", "--control", "MC"], "nowhere.csv: cannot be read"),
    ],
)
def test_an_error_in_the_input_is_one_line(tmp_path, capsys, argv, message):
    path = write(tmp_path / "points.csv", matched(0, 0.0))
    assert main(["audit", *(word.format(file=path) for word in argv)]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert message in error
    assert "\n" not in error

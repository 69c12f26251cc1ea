"""The audit of published points against enumeration of all swaps, and its refusals."""

import itertools

import numpy as np
import pytest

from analysis.cli import main
from analysis.report.audit import points_needed, read_points, sign_p
from analysis.stats.frontier import nondominated


def write(path, rows, header="method,kl,reward,beta,seed"):
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]))
    return str(path)


def matched(seed, shift, pairs=8):
    generator = np.random.default_rng(seed)
    rows = []
    for index in range(pairs):
        for method in ("MC", "RB"):
            kl, noise = generator.uniform(0, 2), generator.normal(scale=0.3)
            rows.append((method, kl, np.sqrt(kl) + noise + shift * (method == "RB"), index % 4, index // 4))
    return rows


def enumerated_p(rows):
    """Of |share - its mean| over all label swaps within pairs; the frontier is the same in all of them."""
    on = nondominated(np.array([row[1] for row in rows]), np.array([row[2] for row in rows])).reshape(-1, 2)
    difference = on[:, 1].astype(int) - on[:, 0]
    signs = np.array(list(itertools.product([-1, 1], repeat=len(difference))))
    return np.mean(np.abs(signs @ difference) >= abs(difference.sum()))


@pytest.mark.parametrize("seed", range(4))
def test_matched_points_get_the_p_of_all_swaps(tmp_path, capsys, seed):
    rows = matched(seed, shift=0.2 * seed)
    assert main(["audit", write(tmp_path / "points.csv", rows), "--control", "MC"]) == 0
    out = capsys.readouterr().out
    assert "8 matched pairs" in out
    found = float(out.split("exact swap p\u00a0=\u00a0")[1].split(".\n")[0])
    assert found == pytest.approx(enumerated_p(rows), rel=0.06)  # two digits are printed


def test_unmatched_points_get_the_p_of_all_labellings(tmp_path, capsys):
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
    assert float(out.split("exact p\u00a0=\u00a0")[1].split(". That")[0]) == pytest.approx(expected, rel=0.06)


def test_a_diverged_run_is_named_and_off_the_frontier(tmp_path, capsys):
    rows = [("RB", "nan", 9, 0, 0), ("MC", 1, 1, 0, 0), ("RB", 0.5, 2, 0, 1), ("MC", 1, 1, 0, 1)]
    assert main(["audit", write(tmp_path / "points.csv", rows), "--control", "MC"]) == 0
    out = capsys.readouterr().out
    assert "1 run diverged" in out
    assert "1 of 1 frontier point." in out


@pytest.mark.parametrize("share", [0.6, 7 / 9, 0.95])
def test_the_number_of_pairs_that_settles_it_has_the_power_and_one_less_has_not(share):
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
    assert "p\u00a0=\u00a00.18" in out
    assert "28 discordant pairs" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give either a CSV file of points or --share K/N"),
        (["--share", "9/7"], "--share 9/7 is not allowed; K/N is expected"),
        (["--share", "78%"], "--share 78% is not allowed; K/N is expected"),
        (["{file}"], "--control is missing"),
        (["{file}", "--control", "PPO"], "--control PPO: the file has the methods MC, RB"),
        (["nowhere.csv", "--control", "MC"], "nowhere.csv: cannot be read"),
    ],
)
def test_wrong_input_is_one_line(tmp_path, capsys, argv, message):
    path = write(tmp_path / "points.csv", matched(0, 0.0))
    assert main(["audit", *(word.format(file=path) for word in argv)]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert message in error
    assert "\n" not in error


def test_columns_are_checked(tmp_path):
    from lit_klrb.errors import ConfigurationError

    with pytest.raises(ConfigurationError, match="has no column reward"):
        read_points(tmp_path / write(tmp_path / "a.csv", [("MC", 1)], "method,kl"))
    with pytest.raises(ConfigurationError, match="kl is 'low'; a number expected"):
        read_points(tmp_path / write(tmp_path / "b.csv", [("MC", "low", 1)], "method,kl,reward"))

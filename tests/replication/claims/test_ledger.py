"""The ledger of claims: committed pages agree with the artifacts, and verdicts follow them."""

import itertools
import json
import lzma
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from evidence_changes import CHANGES

from analysis.report.matching import match
from analysis.results.store import present, read_json
from analysis.stats.frontier import nondominated
from replication.__main__ import main
from replication.claims import evidence, ledger
from replication.claims.claim import Status
from replication.claims.evidence import ARTIFACTS, REVIEWS, SMOLLM2, STUDIES, evidence_of
from replication.claims.ledger import all_claims

ROOT = Path(__file__).parents[3]
LEDGER, RESULTS = ROOT / "replication" / "ledger", ROOT / "replication" / "results"
CLAIMS = {claim.key: claim for claim in all_claims()}


@pytest.fixture(scope="module")
def committed(verified):
    contents = {name: read_json(present(LEDGER / file.path)) for name, file in STUDIES.items()}
    return contents, verified.evidence.sweeps


@pytest.fixture(scope="module")
def pickled(committed):
    """The contents, of which copies are made ten times as fast as by `copy.deepcopy`."""
    return pickle.dumps(committed[0])


@pytest.fixture
def only(monkeypatch, committed):
    """Reduces the ledger to some claims, and the sweeps to those read before."""

    def reduced(*keys, sweeps=True):
        monkeypatch.setattr(ledger, "all_claims", lambda: tuple(CLAIMS[key] for key in keys))
        if sweeps:
            monkeypatch.setattr(evidence, "load_sweeps", lambda directory: committed[1])

    return reduced


def test_the_committed_pages_are_what_the_artifacts_give(verified):
    assert verified.code == 0, verified.printed
    assert verified.printed == "every page agrees with the artifacts\n"


def test_what_cannot_be_tested_is_said(verified):
    untested = {key for key, ruling in verified.rulings.items() if ruling.verdict is Status.NOT_TESTABLE}
    assert untested == {"full-kl-cost", "sdft-token-level"}


@pytest.mark.parametrize("key", CHANGES)
def test_a_verdict_changes_with_its_artifact(committed, pickled, verified, key):
    changing, expected = CHANGES[key]
    before = verified.rulings[key]
    contents, sweeps = pickle.loads(pickled), dict(committed[1])
    changing(contents, sweeps)
    after = CLAIMS[key].decide(evidence_of(contents, sweeps))
    assert after.verdict is expected is not before.verdict
    assert after.numbers != before.numbers


def test_rows_on_reviews_are_those_of_a_mean_over_all_prompts(committed, verified):
    (row,) = [
        one.ours
        for one in verified.rulings["rb-value-variance"].numbers
        if one.what.startswith("MC: ") and one.what.endswith("reviews, dpo")
    ]
    values = np.array(committed[0]["reviews"]["snapshots"][0]["values"]["k1"])
    of_one = values.var(axis=1, ddof=1).mean() / len(values)
    deviations = " / ".join(f"{(of_one / size) ** 0.5:#.2g}" for size in (1, 5, 10))
    assert row == f"{values.mean():.2f} ± {deviations}"


def test_a_sweep_in_which_an_arm_has_no_run_below_the_cut_has_no_share(verified):
    found = verified.rulings["frontier-95"]
    shares = {one.what: one.ours for one in found.numbers if one.what.startswith("share of")}
    (row,) = [text for what, text in shares.items() if "ReleasedRaoBlackwell" in what]
    assert row == "none: an arm has no run there"
    (row,) = [text for what, text in shares.items() if "released-rb" in what and "embedded" in what]
    assert row == "16 of 27 (59%; 0.388 to 0.776)"
    assert sum(text[0].isdigit() for text in shares.values()) == 7
    assert "1 of 5 sweeps (embedded world, β 0.5 to 2, " in found.condition
    assert found.verdict is Status.INCONCLUSIVE


def test_the_reward_that_a_share_needs_gives_it_on_average_over_all_swaps(verified):
    pairs = match(verified.evidence.sweeps["imdb_noise"].sweep, "rb", "mc")
    (row,) = [
        one.ours
        for one in verified.rulings["frontier-78"].numbers
        if one.what == "reward at equal KL that such a share needs: rb against mc: reviews, β 0.03"
    ]
    shares = []
    for turned in itertools.product([False, True], repeat=len(pairs)):
        order = np.where(np.array(turned)[:, None], [1, 0], [0, 1])
        kl, reward = (np.take_along_axis(values, order, axis=1) for values in (pairs.kl, pairs.reward))
        on = nondominated(kl, reward + np.array([float(row), 0.0]))
        shares.append(on[:, 0].sum() / on.sum())
    assert np.mean(shares) == pytest.approx(7 / 9, abs=0.04)


def test_the_noise_on_reviews_is_the_ratio_of_traces(committed, verified):
    study = committed[0]["reviews_noise"]
    gram = study["snapshots"][0]["gram"]
    batches = study["batches"]

    def trace(estimator):
        first = (1 + study["estimators"].index(estimator)) * batches
        rows = [gram[first + i][first : first + i + 1] for i in range(batches)]
        squares, total = sum(row[-1] for row in rows), sum(2 * sum(row[:-1]) + row[-1] for row in rows)
        return squares - total / batches

    (row,) = [
        one.ours
        for one in verified.rulings["rb-gradient-noise"].numbers
        if one.what == "whole objective, reviews, β = 0.1, 512 prompts"
    ]
    assert row.startswith(f"dpo: {trace('RaoBlackwell') / trace('MonteCarlo'):.3g} (")


def test_a_changed_artifact_is_found_and_claims_writes_the_pages_again(tmp_path, capsys, only):
    only("worked-coins", "worked-token")
    folder = tmp_path / "replication" / "ledger"
    shutil.copytree(LEDGER, folder)
    (tmp_path / "replication" / "results").symlink_to(RESULTS)
    assert main(["claims", str(folder)]) == 0
    assert main(["verify", str(folder)]) == 0
    path = folder / ARTIFACTS / "identities.json"
    content = json.loads(path.read_text())
    content["worked_examples"]["coins"] = 0.09
    path.write_text(json.dumps(content))
    (folder / "old-claim.md").write_text("no longer a claim")
    capsys.readouterr()
    assert main(["verify", str(folder)]) == 1
    printed = capsys.readouterr().out
    assert "worked-coins.md: is not what the artifacts give" in printed
    assert "worked-token.md" not in printed
    assert "old-claim.md: no page of the ledger" in printed
    assert main(["claims", str(folder)]) == 0
    assert not (folder / "old-claim.md").exists()
    assert "**Verdict: Fails." in (folder / "worked-coins.md").read_text()


def test_a_missing_or_damaged_artifact_is_named(tmp_path, capsys):
    shutil.copytree(LEDGER / ARTIFACTS, tmp_path / ARTIFACTS)
    (tmp_path / ARTIFACTS / "off_policy.json").unlink()
    assert main(["claims", str(tmp_path)]) == 2
    assert "study --config replication/configs/studies/off_policy.yaml" in capsys.readouterr().err


def test_an_incomplete_sweep_is_named_and_a_missing_one_is_noticed(tmp_path, capsys, only):
    only("frontier-78", sweeps=False)
    folder, results = tmp_path / "replication" / "ledger", tmp_path / "replication" / "results"
    shutil.copytree(LEDGER, folder)
    results.mkdir(parents=True)
    assert main(["verify", str(folder)]) == 2
    assert "study --config replication/configs/studies/imdb_estimation.yaml" in capsys.readouterr().err
    for name in (REVIEWS.name, SMOLLM2, "noise"):
        (results / name).symlink_to(RESULTS / name)
    assert main(["verify", str(folder)]) == 1
    assert "frontier-78.md: is not what the artifacts give" in capsys.readouterr().out
    (results / "noise").unlink()
    shutil.copytree(RESULTS / "noise", results / "noise")
    archive = results / "noise" / "results.jsonl.xz"
    lines = lzma.decompress(archive.read_bytes()).splitlines(keepends=True)
    archive.write_bytes(lzma.compress(b"".join(lines[:-2])))
    assert main(["verify", str(folder)]) == 2
    assert "noise: 2 runs of the plan are missing" in capsys.readouterr().err

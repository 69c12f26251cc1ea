"""The ledger of claims: committed pages agree with the artifacts, and verdicts follow them."""

import copy
import json
import shutil
from pathlib import Path

import pytest

from analysis.claims.claim import Verdict
from analysis.claims.evidence import ARTIFACTS, REVIEWS, STUDIES, evidence_of
from analysis.claims.ledger import all_claims, compose_ledger, verify_ledger
from analysis.cli import main

LEDGER = Path(__file__).parents[3] / "docs" / "claims"
CLAIMS = {claim.key: claim for claim in all_claims()}


def same(value, number):
    """The same nested lists with all numbers replaced."""
    return [same(one, number) for one in value] if isinstance(value, list) else number


def change(content, *path):
    """The parent of a place in nested dictionaries, and the last key."""
    *above, last = path
    for key in above:
        content = content[key]
    return content, last


def put(number, *path):
    """A change of an artifact: all numbers at a place."""

    def changed(contents, reviews):
        parent, last = change(contents, *path)
        parent[last] = same(parent[last], number)

    return changed


def copied(source, *path):
    """A change of an artifact: what is at one place is put at another."""

    def changed(contents, reviews):
        parent, last = change(contents, *path)
        before, name = change(contents, *source)
        parent[last] = copy.deepcopy(before[name])

    return changed


def several(*changes):
    def changed(contents, reviews):
        for one in changes:
            one(contents, reviews)

    return changed


def spread(name, factor):
    """The estimates of a kind have `factor` times their spread, on enumerated models and on reviews."""

    def changed(contents, reviews):
        for one in contents["estimation"]["snapshots"]:
            values = one["values"]["k1"]
            means = [sum(row) / len(row) for row in values]
            one["values"][name] = [
                [mean + factor * (x - mean) for x in row] for mean, row in zip(means, values, strict=True)
            ]
        for by_name in reviews["sections"]["estimation"].values():
            if name in by_name:
                by_name[name]["log_variance_ratio"] = 2 * (factor - 1)

    return changed


def topk(name, key, number):
    def changed(contents, reviews):
        for case in contents["identities"]["topk"].values():
            for row in case["estimates"][name].values():
                row[key] = number

    return changed


def arm(name, factor):
    """An arm ends at `factor` times the KL of sampled own-token credit."""

    def changed(contents, reviews):
        finals = contents["distillation"]["finals"]
        scaled = [
            [[factor * kl * (1 + 0.01 * (i % 3)) for i, kl in enumerate(runs)] for runs in rates]
            for rates in finals["own token, sampled"]
        ]
        finals[name] = scaled

    return changed


def prefix_noise(factor):
    def changed(contents, reviews):
        for by_correction in contents["off_policy"]["moments"].values():
            noise = by_correction["sequence"]["kl"]["noise"]
            by_correction["prefix"]["kl"]["noise"] = [[factor * x for x in row] for row in noise]

    return changed


def biased_everywhere(contents, reviews):
    for by_correction in contents["off_policy"]["moments"].values():
        by_correction["prefix"]["kl"]["bias"] = same(by_correction["prefix"]["kl"]["bias"], 0.1)


def shrunk(number):
    def changed(contents, reviews):
        for one in contents["identities"]["shrinkage"].values():
            one["ratio"] = number

    return changed


def quiet_path(contents, reviews):
    path = contents["identities"]["path"]
    path["RaoBlackwell"] = [[0.5 * x for x in row] for row in path["MonteCarlo"]]


PITFALLS = "pitfalls", "gradients"
ORTHOGONAL = put(0.1, *PITFALLS, "K3LossSequence", "reverse_cosine")
CHANGES = {
    "rb-value-variance": (spread("rb", 2.0), Verdict.FAILS),
    "cv-alpha-1": (spread("cv", 2.0), Verdict.HOLDS),
    "cv-fitted": (spread("cv_fitted", 1.0), Verdict.HOLDS),
    "provably-no-more-variance": (put(0.0, "identities", "counterexample", "rb"), Verdict.HOLDS),
    "rb-gradient-noise": (quiet_path, Verdict.HOLDS),
    "k1-loss-zero-mean": (put(0.5, *PITFALLS, "K1Loss", "bias"), Verdict.FAILS),
    "k3-loss-direction": (ORTHOGONAL, Verdict.FAILS),
    "token-level-partial": (put(0.0, *PITFALLS, "K2Loss", "bias"), Verdict.FAILS),
    "tabular-mean-squared-error": (put(0.2, *PITFALLS, "MonteCarlo", "bias"), Verdict.FAILS),
    "distillation-sequence-level": (arm("whole future, sampled", 0.5), Verdict.HOLDS),
    "worked-coins": (put(0.09, "identities", "worked_examples", "coins"), Verdict.FAILS),
    "worked-token": (put(1.7, "identities", "worked_examples", "log_ratio"), Verdict.FAILS),
    "k2-loss-is-k1-reward": (put(0.0, "identities", "token_level", "to_sequence"), Verdict.HOLDS),
    "deepseek-unbiased-kl": (
        put(0.1, "identities", "names", "ratio times k3 (unbiased KL)"),
        Verdict.FAILS,
    ),
    "k1-in-reward-best": (
        copied(("pitfalls", "objective", "K1Loss"), "pitfalls", "objective", "MonteCarlo"),
        Verdict.FAILS,
    ),
    "off-policy-open-problem": (biased_everywhere, Verdict.HOLDS),
    "ema-pg-unbiased-topk": (topk("detached tail", "gradient_bias", 0.0), Verdict.HOLDS),
    "mopd-head": (
        several(topk("head only", "gradient_bias", 0.0), topk("head only", "value_bias", 0.0)),
        Verdict.HOLDS,
    ),
    "vopd-variance": (topk("baseline", "gradient_bias", 0.1), Verdict.FAILS),
    "shrinkage-baselines": (shrunk(0.5), Verdict.HOLDS),
    "optimal-token-baseline": (
        several(
            put(0.5, "identities", "token_baseline", "row_per_prefix", "cumulative"),
            put(0.5, "identities", "token_baseline", "one_row", "cumulative"),
            put(0.6, "identities", "token_baseline", "row_per_prefix", "own"),
        ),
        Verdict.HOLDS,
    ),
    "opd-sequence-credit-too-noisy": (
        several(arm("whole future, sampled", 2.0), arm("whole future, exact", 2.0)),
        Verdict.HOLDS,
    ),
    "ctpo-prefix-ratios": (prefix_noise(0.9), Verdict.HOLDS),
}


@pytest.fixture(scope="module")
def committed():
    contents = {name: json.loads((LEDGER / ARTIFACTS / f"{name}.json").read_text()) for name in STUDIES}
    return contents, json.loads((LEDGER / REVIEWS).read_text())


def test_the_committed_pages_are_what_the_artifacts_give(capsys):
    assert main(["verify", str(LEDGER)]) == 0
    assert "every page agrees with the artifacts" in capsys.readouterr().out


def test_all_claims_have_a_change_but_those_that_cannot_be_tested(committed):
    untestable = {key for key, claim in CLAIMS.items() if key.startswith("frontier-")}
    assert CHANGES.keys() == CLAIMS.keys() - untestable
    _, rulings = compose_ledger(evidence_of(*committed))
    found = {claim.key for claim, ruling in rulings.items() if ruling.verdict is Verdict.NOT_TESTABLE}
    assert found == untestable


@pytest.mark.parametrize("key", CHANGES)
def test_a_verdict_changes_with_its_artifact(committed, key):
    changing, expected = CHANGES[key]
    before = CLAIMS[key].decide(evidence_of(*committed))
    contents, reviews = copy.deepcopy(committed)
    changing(contents, reviews)
    after = CLAIMS[key].decide(evidence_of(contents, reviews))
    assert after.verdict is expected is not before.verdict
    assert after.numbers != before.numbers


def test_a_changed_artifact_is_found_and_claims_writes_the_pages_again(tmp_path, capsys):
    ledger = tmp_path / "claims"
    shutil.copytree(LEDGER, ledger)
    (tmp_path / "results" / "imdb_small").mkdir(parents=True)
    shutil.copy(LEDGER / REVIEWS, tmp_path / "results" / "imdb_small")
    path = ledger / ARTIFACTS / "identities.json"
    content = json.loads(path.read_text())
    content["worked_examples"]["coins"] = 0.09
    path.write_text(json.dumps(content))
    (ledger / "old-claim.md").write_text("no longer a claim")
    assert main(["verify", str(ledger)]) == 1
    printed = capsys.readouterr().out
    assert "worked-coins.md: is not what the artifacts give" in printed
    assert "old-claim.md: no page of the ledger" in printed
    assert main(["claims", str(ledger)]) == 0
    assert verify_ledger(ledger) == []
    assert "**Verdict: Fails." in (ledger / "worked-coins.md").read_text()


def test_a_missing_or_damaged_artifact_is_named(tmp_path, capsys):
    shutil.copytree(LEDGER / ARTIFACTS, tmp_path / ARTIFACTS)
    (tmp_path / ARTIFACTS / "off_policy.json").unlink()
    assert main(["claims", str(tmp_path)]) == 2
    assert "study --config configs/studies/off_policy.yaml" in capsys.readouterr().err

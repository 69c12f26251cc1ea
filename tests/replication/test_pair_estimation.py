"""The study of estimates: against exact values on enumerated models, and on checkpoints."""

import io
import json
import math

import pytest
import torch

from lit_klrb.functional.enumeration import TabularLM, exact_kl
from replication import study
from replication.__main__ import main
from replication.studies import CheckpointPair, EnumerablePair, PairEstimationStudy

# The fitted control variate warns where one of few completions dominates.
pytestmark = pytest.mark.filterwarnings("ignore:one of .* completions has")
PAIR = EnumerablePair(vocabulary=3, max_length=3, distance=1.2)
DESIGN = {"prompts": 6, "completions": 3000, "group_sizes": [1, 5]}
UNBIASED = ("k1", "k3", "cv", "cv_fitted", "rb", "topk")
BIASED = ("k2", "topk_head")


@pytest.fixture(scope="module")
def snapshot():
    (found,) = PairEstimationStudy(pairs=[PAIR], topk=1, **DESIGN).measure(seed=1)["snapshots"]
    return found


def test_exact_values_are_sums_over_completions(snapshot):
    pairs = PAIR.models(6)
    for index, found in enumerate(snapshot["exact"]):
        policy, reference = (TabularLM(table[index], 3) for table in (pairs.policies, pairs.references))
        tokens, mask = policy.sequences()
        logp, logq = policy.logprobs(tokens, mask), reference.logprobs(tokens, mask)
        total = sum(p.exp() * (p - q) for p, q in zip(logp, logq, strict=True))
        assert found == pytest.approx(total.item(), abs=1e-8)
        assert found == pytest.approx(exact_kl(policy, reference).item(), abs=1e-8)


def z_score(values, exact):
    """Distance of the means from the exact values, in standard errors."""
    error = (values.var(1) / values.shape[1]).sum().sqrt() / len(values)
    return abs(values.mean() - exact.mean()).item() / error.item()


def test_unbiased_estimates_agree_with_the_exact_value_and_others_do_not(snapshot):
    exact = torch.tensor(snapshot["exact"])
    assert {*snapshot["values"]} == {*UNBIASED, *BIASED}
    for name in UNBIASED:
        assert z_score(torch.tensor(snapshot["values"][name]), exact) < 4, name
    for size, values in snapshot["horvitz_thompson"].items():
        assert z_score(torch.tensor(values), exact) < 4, f"HT, M = {size}"
    for name in BIASED:
        assert z_score(torch.tensor(snapshot["values"][name]), exact) > 6, name


def test_the_mass_of_the_reference_is_the_mean_ratio_and_explains_the_control_variate(snapshot):
    k1, cv = (torch.tensor(snapshot["values"][name]) for name in ("k1", "cv"))
    mass = torch.tensor(snapshot["reference_mass"])
    assert mass.tolist() == pytest.approx((-k1).exp().mean(1).tolist(), rel=1e-4)
    assert (cv - k1).mean(1).tolist() == pytest.approx((mass - 1).tolist(), abs=1e-4)


@pytest.mark.parametrize("stratum", [1, 8])
def test_completions_are_samples_from_the_policy(stratum):
    pairs = PAIR.models(2)
    found = PAIR.sample(2, 16_000, 0, stratum=stratum)
    places = {tuple(row): index for index, row in enumerate(pairs.tokens.tolist())}
    chosen = torch.tensor([places[tuple(row)] for row in found.tokens.tolist()]).view(2, -1)
    for row, probabilities in zip(chosen, pairs.logprobs(pairs.policies).exp(), strict=True):
        shares = row.bincount(minlength=len(probabilities)) / row.numel()
        error = (probabilities * (1 - probabilities) / row.numel()).sqrt()
        assert ((shares - probabilities).abs() < 4.5 * error).all()


def test_checkpoints_are_measured_and_a_stopped_study_goes_on(chain, tmp_path, monkeypatch):
    pairs = [
        {
            "class_path": "CheckpointPair",
            "init_args": {
                "policy_path": chain.checkpoint(stage),
                "reference_path": chain.checkpoint("sft"),
                "max_new_tokens": 8,
            },
        }
        for stage in ("dpo", "rloo")
    ]
    settings = {
        "pairs": pairs,
        "prompts": 3,
        "completions": 4,
        "group_sizes": [2],
        "independent": 20,
        "topk": 4,
    }
    config = {"study": {"class_path": "PairEstimationStudy", "init_args": settings}}
    config["trainer"] = {"default_root_dir": str(tmp_path / "run")}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    argv = ["study", "--config", str(tmp_path / "config.yaml")]
    measured = []
    result = study._result

    def stops_in_the_second(folder, name, run):
        measured.append(name)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return result(folder, name, run)

    with monkeypatch.context() as patched:
        patched.setattr(study, "_result", stops_in_the_second)
        with pytest.raises(KeyboardInterrupt):
            main(argv)
    taken = []
    sample = CheckpointPair.sample
    monkeypatch.setattr(
        CheckpointPair, "sample", lambda self, *a, **k: taken.append(self.label) or sample(self, *a, **k)
    )
    assert main(argv) == 0
    assert set(taken) == {chain.checkpoint("rloo")}
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["run"]
    assert [path.name for path in (tmp_path / "run" / "studies").iterdir()] == ["estimation.json"]
    artifact = json.loads((tmp_path / "run" / "studies" / "estimation.json").read_text())
    assert [one["label"] for one in artifact["snapshots"]] == [chain.checkpoint(s) for s in ("dpo", "rloo")]
    for one in artifact["snapshots"]:
        assert {len(one["independent"][key]) for key in ("mean", "standard_error")} == {3}
        assert all(math.isfinite(value) for value in one["independent"]["mean"])
        exact, estimate, head = (torch.tensor(one["values"][name]) for name in ("rb", "topk", "topk_head"))
        assert exact.shape == (3, 4)
        assert (head <= torch.minimum(exact, estimate) + 1e-5).all()
    assert main(["study", "--config", str(tmp_path / "config.yaml"), "--study.pairs", "[]"]) == 2


def test_a_study_is_checked_without_being_run(monkeypatch, capsys, tmp_path):
    argv = [
        "study",
        "--config",
        "replication/configs/studies/pitfalls.yaml",
        "--trainer.default_root_dir",
        str(tmp_path),
    ]
    requests = [argv, [*argv, "--study.completions", "3"], [*argv, "--study.policy", "3"]]
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(requests)))
    assert main(["check"]) == 0
    right, odd, misspelt = json.loads(capsys.readouterr().out)
    assert right == {"module": None, "estimator": None, "evaluation": {}}
    assert "completions: must be even, got 3" in odd["error"]
    assert misspelt["error"] == "unknown key study.init_args.policy (did you mean policies?)"
    assert not list(tmp_path.iterdir())

"""Public names and signatures."""

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

from lit_klrb import callbacks, data, estimators, functional, modules
from lit_klrb.functional import enumeration

ESTIMATORS = [
    "MonteCarlo",
    "MonteCarloRewardToGo",
    "RaoBlackwell",
    "RaoBlackwellSequence",
    "RaoBlackwellLite",
    "RaoBlackwellControlVariate",
    "TiltedRaoBlackwell",
    "ReleasedMonteCarlo",
    "ReleasedRaoBlackwell",
    "K1Loss",
    "K2Loss",
    "K3Loss",
    "K3LossSequence",
    "K3Reward",
    "RaoBlackwellLoss",
    "RaoBlackwellReward",
    "CoarsenedTopK",
    "NoKL",
]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_has_the_methods(name):
    estimator = getattr(estimators, name)
    assert set(inspect.signature(estimator.value).parameters) == {"self", "stats", "mask"}
    assert list(inspect.signature(estimator.surrogate).parameters) == [
        *("self", "stats", "mask", "group_size", "behaviour_logprobs")
    ]
    assert list(inspect.signature(estimator.objective).parameters) == [
        *("self", "stats", "mask", "rewards", "beta", "group_size", "behaviour_logprobs")
    ]
    assert list(inspect.signature(estimator.weights).parameters) == [
        *("self", "stats", "mask", "rewards", "beta", "group_size")
    ]
    assert list(inspect.signature(estimator.loss).parameters) == [
        *("self", "stats", "mask", "weights", "beta", "behaviour_logprobs")
    ]
    assert estimator().baseline == "leave_one_out"


def test_the_functional_names():
    assert functional.TokenStats._fields == (
        "logprobs",
        "ref_logprobs",
        "kl",
        "entropy",
        "value",
        "expected_value",
        "head_kl",
        "head_mass",
        "ref_head_mass",
        "in_head",
        "reward_to_come",
        "forward_kl",
        "jsd",
        "head_forward_kl",
    )
    for name in ("token_stats", "tiled_token_stats", "tiled_policy_loss"):
        assert callable(getattr(functional, name))
    for name in ("TabularLM", "exact_kl", "exact_kl_gradient", "optimal_policy"):
        assert callable(getattr(enumeration, name))


def test_the_lightning_names():
    assert {"SFTModule", "DPOModule", "RLOOModule", "DistillModule"} <= set(vars(modules))
    assert hasattr(callbacks, "KLEstimatorCallback")
    assert data.__doc__


def test_the_page_of_the_statistics_names_what_there_is():
    text = (Path(__file__).parents[1] / "docs" / "api" / "statistics.md").read_text("utf-8")
    listed = re.findall(r"^   ((?:stats\.)?[\w.]+)$", text, re.MULTILINE)
    assert {name.rpartition(".")[2] for name in listed} >= {*stats_names()} | {"frames"}
    for name in listed:
        module, _, member = f"analysis.{name}".rpartition(".")
        assert inspect.getdoc(getattr(import_module(module), member)), name


def stats_names():
    """The classes and functions that `analysis.stats` exports, but for what verdicts consist of."""
    exported = {name for name, value in vars(import_module("analysis.stats")).items() if callable(value)}
    return exported - {"Claim", "Outcome"}

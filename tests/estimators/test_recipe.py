"""Recipes: derived formulas, and invalid recipes."""

import pytest

from lit_klrb import estimators
from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import ComposedEstimator, Recipe, Term

VOCABULARY = "both models' logits over the vocabulary"
TOKENS = "the reference's log-probability of the sampled tokens"
# Written by hand, independently of the recipes.
WRITTEN = {
    "MonteCarlo": ("c_t = sum_s r_s, l_t = 0", TOKENS),
    "MonteCarloRewardToGo": ("c_t = sum_{s>=t} r_s, l_t = 0", TOKENS),
    "RaoBlackwell": ("c_t = sum_{s>t} KL_s, l_t = KL_t", VOCABULARY),
    "RaoBlackwellSequence": ("c_t = sum_s KL_s, l_t = KL_t", VOCABULARY),
    "RaoBlackwellLite": (
        "c_t = r_t - KL_t + sum_{s>t} KL_s, l_t = 0",
        f"{VOCABULARY}, no gradient through them",
    ),
    "ReleasedMonteCarlo": ("c_t = sum_s r_s, l_t = r_t", TOKENS),
    "ReleasedRaoBlackwell": ("c_t = sum_s KL_s, l_t = KL_t", VOCABULARY),
    "K1Loss": ("c_t = 0, l_t = r_t", TOKENS),
    "K2Loss": ("c_t = 0, l_t = r_t^2 / 2", TOKENS),
    "K3Loss": ("c_t = 0, l_t = k3(r_t)", TOKENS),
    "K3LossSequence": ("c_t = 0, l_t = k3(sum_{s<=t} r_s) - k3(sum_{s<t} r_s)", TOKENS),
    "K3Reward": ("c_t = sum_s k3(r_s), l_t = 0", TOKENS),
    "RaoBlackwellLoss": ("c_t = 0, l_t = KL_t", VOCABULARY),
    "RaoBlackwellReward": ("c_t = sum_s KL_s, l_t = 0", f"{VOCABULARY}, no gradient through them"),
    "NoKL": ("c_t = 0, l_t = 0", "none"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_formula_and_cost_are_derived_from_the_recipe(name):
    estimator = getattr(estimators, name)()
    assert (estimator.formula, estimator.cost) == WRITTEN[name]


def test_a_factor_is_written_before_its_sum():
    recipe = Recipe(value="k1", score=(Term("k1", "whole", factor=0.5), Term("kl", "after", factor=-2)))
    assert recipe.formula == "c_t = 0.5 sum_s r_s - 2 sum_{s>t} KL_s, l_t = 0"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Term("k4", "own"), r"Term.value: must be one of k1, .*, got 'k4'"),
        (lambda: Term("k1", "later"), r"Term.credit: must be one of whole, .*, got 'later'"),
        (lambda: Recipe(value="k4"), r"Recipe.value: must be one of k1, .*, got 'k4'"),
        (lambda: Recipe(value="k1", pathwise="k4"), r"Recipe.pathwise: must be one of k1, .*, got 'k4'"),
        (lambda: Recipe(value="k1", score=Term("k1", "own")), r"Recipe.score: must be a tuple of Terms"),
    ],
)
def test_an_error_in_a_recipe_names_the_argument(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_without_a_recipe_an_estimator_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        ComposedEstimator()


def test_an_estimator_without_an_explanation_trains_and_one_with_a_refusal_does_not():
    class Own(ComposedEstimator):
        recipe = Recipe(value="k1", score=(Term("k1", "own"),))

    class Refused(Own):
        refusal = "it is one's own"

    Own().check_trainable()
    with pytest.raises(ConfigurationError, match=r"Refused is refused for training .* it is one's own"):
        Refused().check_trainable()
    Refused(allow_biased=True).check_trainable()


@pytest.mark.parametrize("name", WRITTEN)
def test_several_optimizer_steps_need_a_correction_or_allow_biased(name):
    kind = getattr(estimators, name)
    allowed = kind.refusal is not None  # those need allow_biased even for one step
    kind(allow_biased=allowed).check_trainable(optimizer_steps=1)
    for off_policy in ("token", "prefix", "sequence", "clip"):
        kind(off_policy=off_policy, allow_biased=allowed).check_trainable(optimizer_steps=2)
    kind(allow_biased=True).check_trainable(optimizer_steps=2)
    if not allowed:
        with pytest.raises(ConfigurationError, match=r"off_policy: must not be none with 2 optimizer steps"):
            kind().check_trainable(optimizer_steps=2)

"""The certificate: the expected gradient of each estimator, by enumeration of all groups of completions.

Targets are computed from the definitions by enumeration and autograd, without the code of the estimators.
Each test is of one estimator on one model, with or without rewards, and loops over all of `CELLS`.

Later inner steps without a correction or with clipping, which are biased, are in test_inner_steps.py;
`RaoBlackwellControlVariate`, which couples the groups of a batch, in test_control_variate.py; all heads,
`CoarsenedTopK` and the rivals of top-k in test_topk_estimators.py.
"""

import itertools

import pytest
import torch
from enumerated import Case, Variation, expected_gradient

from lit_klrb import estimators
from lit_klrb.cli.explain import estimator_classes
from lit_klrb.functional.enumeration import exact_kl_gradient, num_prefixes

TOLERANCE = 1e-10
BETA = 0.4
UNBIASED = [
    "MonteCarlo",
    "MonteCarloRewardToGo",
    "RaoBlackwell",
    "RaoBlackwellSequence",
    "RaoBlackwellLite",
    "ReleasedMonteCarlo",
    "ReleasedRaoBlackwell",
    "TiltedRaoBlackwell",
    "RaoBlackwellTopK",
]
BIASED = [
    "K1Loss",
    "K2Loss",
    "K3Loss",
    "K3LossSequence",
    "K3Reward",
    "RaoBlackwellLoss",
    "RaoBlackwellReward",
]
NAMES = [*UNBIASED, *BIASED, "NoKL"]
CASES = {
    "markov": Case.random(contexts=2, vocab_size=3, max_length=3, seed=1),
    "unshared": Case.random(contexts=num_prefixes(3, 2), vocab_size=3, max_length=2, seed=2),
    "one row": Case.random(contexts=1, vocab_size=2, max_length=4, seed=6),
    "one token": Case.random(contexts=1, vocab_size=4, max_length=1, seed=3),
}
# Whether the completions are from a behaviour policy, and the correction.
MODES = [
    (False, "none"),
    (False, "clip"),
    (False, "prefix"),
    (False, "sequence"),
    (True, "prefix"),
    (True, "sequence"),
]
GROUPS = [(1, None), (2, "leave_one_out"), (3, "leave_one_out")]
VARIATIONS = [
    Variation("one step", torch.nan),
    Variation("whole", torch.inf),
    Variation("uneven", -torch.inf),
]
CELLS = list(itertools.product(MODES, GROUPS, VARIATIONS))


class Truth:
    """The documented targets for one case, [contexts, V] each."""

    def __init__(self, case):
        self.case = case
        self.leaf = case.policy.logits.clone().requires_grad_()
        self.mask = case.sequences[1]
        stats = case.stats(self.leaf)
        self.logp = torch.where(self.mask, stats.logprobs, 0)
        self.logq = torch.where(self.mask, stats.ref_logprobs, 0)
        self.kl = torch.where(self.mask, stats.kl, 0)
        self.p = self.logp.sum(-1).exp().detach()
        self.q = self.logq.sum(-1).exp().detach()

    def gradient(self, scalar):
        if not scalar.requires_grad:
            return torch.zeros_like(self.leaf)
        (gradient,) = torch.autograd.grad(scalar, self.leaf, retain_graph=True)
        return gradient

    @property
    def forward_token_level(self):
        """E_p of the sum of grad KL_t(p || q), prefixes held fixed."""
        return self.gradient((self.p[:, None] * self.kl).sum())

    @property
    def reverse_token_level(self):
        """E_p of the sum of grad KL_t(q || p), prefixes held fixed: -sum_v q(v) grad log p(v)."""
        log_ratio = self.logq - self.logp.detach()
        return self.gradient(-(self.p[:, None] * log_ratio.exp() * self.logp * self.mask).sum())

    @property
    def reverse(self):
        """Grad KL(q || p) = -sum_y q(y) grad log p(y)."""
        return self.gradient(-(self.q * self.logp.sum(-1)).sum())

    @property
    def reward(self):
        """Grad E[r]."""
        return self.gradient((self.p * self.case.rewards * self.logp.sum(-1)).sum())

    def of(self, name):
        forward = exact_kl_gradient(self.case.policy, self.case.reference)
        if name in UNBIASED:
            return forward
        return {
            "NoKL": torch.zeros_like(forward),
            "K1Loss": torch.zeros_like(forward),
            "K2Loss": self.forward_token_level,
            "RaoBlackwellLoss": self.forward_token_level,
            "K3Loss": self.reverse_token_level,
            "K3LossSequence": self.reverse,
            "K3Reward": forward - self.reverse_token_level,
            "RaoBlackwellReward": forward - self.forward_token_level,
        }[name]


TRUTHS = {name: Truth(case) for name, case in CASES.items()}


def make(name, **options):
    kind = getattr(estimators, name)
    if kind is estimators.RaoBlackwellTopK:
        options["k"] = 2  # all cases have so many tokens; for every k see test_topk_estimators.py
    return kind(**options)


@pytest.mark.parametrize("objective", [False, True], ids=["surrogate", "objective"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_the_expected_gradient_is_the_documented_one(name, case, objective):
    target = TRUTHS[case].of(name)
    if objective:
        target = BETA * target - TRUTHS[case].reward
    for (behind, off_policy), (group_size, baseline), variation in CELLS:
        gradient = expected_gradient(
            CASES[case],
            make(name, baseline=baseline, off_policy=off_policy),
            group_size,
            off_policy=behind,
            beta=BETA if objective else None,
            variation=variation,
        )
        cell = f"off-policy {behind}, {off_policy}, {group_size} a group, baseline {baseline}, {variation}"
        assert (gradient - target).abs().max() < TOLERANCE, cell


def test_no_estimator_is_left_out():
    assert {*NAMES, "RaoBlackwellControlVariate", "CoarsenedTopK"} == set(estimator_classes())


def test_the_targets_differ():
    """If targets were equal, the test could not distinguish estimators."""
    truth = TRUTHS["markov"]
    distinct = [
        "RaoBlackwell",
        "K1Loss",
        "K2Loss",
        "K3Loss",
        "K3LossSequence",
        "K3Reward",
        "RaoBlackwellReward",
    ]
    for one, other in itertools.combinations(distinct, 2):
        assert (truth.of(one) - truth.of(other)).norm() > 1e-2 * truth.of("RaoBlackwell").norm(), (one, other)


@pytest.mark.parametrize("name", NAMES)
def test_all_values_except_k2_are_unbiased(name):
    for case, truth in zip(CASES.values(), TRUTHS.values(), strict=True):
        estimator = make(name)
        value = estimator.value(case.stats(case.policy.logits, estimator.topk), truth.mask)
        expected = truth.p @ value
        exact = (truth.p * (truth.logp - truth.logq).sum(-1)).sum().detach()
        if name == "NoKL":
            assert expected == 0
        elif name == "K2Loss":
            half_square = (truth.logp - truth.logq).square().sum(-1) / 2
            assert abs(expected - (truth.p * half_square).sum()) < TOLERANCE
        else:
            assert abs(expected - exact) < TOLERANCE


def test_biased_estimators_and_no_others_train_only_with_allow_biased():
    for name in BIASED:
        with pytest.raises(ValueError, match=rf"{name}.* use RaoBlackwell"):
            make(name).check_trainable()
        make(name, allow_biased=True).check_trainable()
    for name in (*UNBIASED, "NoKL"):
        make(name).check_trainable()

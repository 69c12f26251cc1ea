"""RaoBlackwell of other divergences than the reverse KL, and capped ratios, by enumeration."""

import itertools
import math
import re
from pathlib import Path

import pytest
import torch
from enumerated import Case, Variation, expected_gradient, rows_of

from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import MonteCarlo, RaoBlackwell, RaoBlackwellTopK
from lit_klrb.estimators.enumerated_loss import worlds
from lit_klrb.functional import TokenStats, TopK, token_stats
from lit_klrb.functional.enumeration import exact_kl_gradient, num_prefixes
from lit_klrb.functional.topk import sampled_forward_tail

TOLERANCE = 1e-10
CASES = {
    "markov": Case.random(contexts=2, vocab_size=3, max_length=3, seed=1),
    "unshared": Case.random(contexts=num_prefixes(3, 2), vocab_size=3, max_length=2, seed=2),
    "one row": Case.random(contexts=1, vocab_size=2, max_length=4, seed=6),
}
SETTINGS = {
    "reverse": {},
    "forward": {"divergence": "forward"},
    **{f"jsd {w}": {"divergence": "jsd", "jsd_weight": w} for w in (0.0, 0.1, 0.5, 0.9, 1.0)},
}
# Whether the completions are from a behaviour policy, and the correction
MODES = [*itertools.product([False], ["none", "clip", "token", "prefix", "sequence"])]
MODES += [(True, "prefix"), (True, "sequence")]
VARIATIONS = [Variation("one step", torch.nan), Variation("uneven", -torch.inf)]


def divergence(p, q, divergence="reverse", jsd_weight=0.5):
    """By definition, from log-probabilities [..., V]; only 0 and 1 need the limits."""
    kl = lambda a, b: (a.exp() * (a - b)).sum(-1)  # noqa: E731
    w = {"reverse": 0.0, "forward": 1.0, "jsd": jsd_weight}[divergence]
    if w in (0, 1):
        return kl(q, p) if w else kl(p, q)
    mixture = (w * p.exp() + (1 - w) * q.exp()).log()
    return (w * kl(p, mixture) + (1 - w) * kl(q, mixture)) / (w * (1 - w))


def target(case, settings, discount):
    """Grad of E[sum_t D_t], its credit for later tokens discounted by distance, by autograd."""
    tokens, mask = case.sequences
    leaf = case.policy.logits.clone().requires_grad_()
    logits = (type(case.policy)(table, case.policy.max_length) for table in (leaf, case.reference.logits))
    p, q = (model.token_logits(tokens).log_softmax(-1) for model in logits)
    own = torch.where(mask, divergence(p, q, **settings), 0)
    score = torch.where(mask, p.gather(-1, tokens[..., None])[..., 0], 0)
    probability = case.policy.logprobs(tokens, mask).exp()
    length = tokens.shape[1]
    later = sum(
        discount ** (s - t) * own[:, s].detach() * score[:, t] for s in range(length) for t in range(s)
    )
    return torch.autograd.grad(probability @ (own.sum(1) + later), leaf)[0]


@pytest.mark.parametrize("discount", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", SETTINGS)
def test_the_expected_gradient_is_that_of_the_sampled_sum(name, case, discount):
    settings, expected = SETTINGS[name], target(CASES[case], SETTINGS[name], discount)
    for (behind, off_policy), group_size, variation in itertools.product(MODES, (1, 2), VARIATIONS):
        baseline = None if group_size == 1 else "leave_one_out"
        estimator = RaoBlackwell(discount=discount, baseline=baseline, off_policy=off_policy, **settings)
        how = {"off_policy": behind, "beta": None, "variation": variation}
        gradient = expected_gradient(CASES[case], estimator, group_size, **how)
        assert (gradient - expected).abs().max() < TOLERANCE, (behind, off_policy, group_size, variation)


@pytest.mark.parametrize("support", ["policy", "reference"])
@pytest.mark.parametrize("discount", [0.5, 1.0])
def test_the_forward_kl_of_a_head_and_a_sampled_tail_has_the_same_gradient(discount, support):
    case, expected = CASES["markov"], target(CASES["markov"], SETTINGS["forward"], discount)
    settings = {"divergence": "forward", "discount": discount, "support": support}
    for (behind, off_policy), k, variation in itertools.product(MODES, (1, 2, 3), VARIATIONS):
        estimator = RaoBlackwellTopK(k=k, off_policy=off_policy, baseline=None, **settings)
        how = {"off_policy": behind, "beta": None, "variation": variation}
        gradient = expected_gradient(case, estimator, 1, **how)
        assert (gradient - expected).abs().max() < TOLERANCE, (behind, off_policy, k, variation)
    # The fused loss has no forward KL of a head
    assert [RaoBlackwellTopK(divergence=d).is_fusable for d in ("reverse", "forward")] == [True, False]
    with pytest.raises(ConfigurationError, match=r"^divergence: must be reverse or forward with a head"):
        RaoBlackwellTopK(divergence="jsd")


@pytest.mark.parametrize("topk", [None, TopK(1), TopK(2, "reference"), TopK(3)])
def test_the_value_of_a_head_and_a_sampled_tail_has_the_forward_kl_as_its_mean(topk):
    case, estimator = CASES["markov"], RaoBlackwellTopK(divergence="forward")
    tokens, mask = case.sequences
    p, q = (model.token_logits(tokens).log_softmax(-1) for model in (case.policy, case.reference))
    exact = torch.where(mask, divergence(p, q, "forward"), 0).sum(1)
    value = estimator.value(case.stats(case.policy.logits, topk), mask)
    probability = case.policy.logprobs(tokens, mask).exp()
    torch.testing.assert_close(probability @ value, probability @ exact, rtol=0, atol=1e-12)


def test_the_forward_tail_of_a_token_that_the_reference_never_writes_is_one():
    """w log w - w + 1 is 1 at w = q / p = 0."""
    _, stats = CASES["markov"].current(TopK(1))
    outside = stats._replace(
        ref_logprobs=torch.full_like(stats.logprobs, -torch.inf), in_head=torch.zeros_like(stats.logprobs)
    )
    torch.testing.assert_close(sampled_forward_tail(outside), torch.ones_like(stats.logprobs))


def test_the_forward_tail_of_a_token_that_the_policy_hardly_writes_is_finite():
    """Its weight q / p of e^100 is none of float32, and counts as e^40."""
    logprobs = torch.full((1, 1), -101.0, requires_grad=True)
    outside = TokenStats(logprobs, torch.full((1, 1), -1.0), in_head=torch.zeros(1, 1))
    value = sampled_forward_tail(outside)
    (gradient,) = torch.autograd.grad(value.sum(), logprobs)
    assert value.item() == pytest.approx(39 * math.exp(40), rel=1e-5)
    assert gradient.item() == pytest.approx(-math.exp(40), rel=1e-5)


def test_the_targets_differ_and_the_ends_are_the_kls():
    case = CASES["markov"]
    targets = {name: target(case, settings, 1.0) for name, settings in SETTINGS.items()}
    assert (targets["reverse"] - exact_kl_gradient(case.policy, case.reference)).abs().max() < 1e-12
    equal = {("jsd 0.0", "reverse"), ("jsd 1.0", "forward")}
    for one, other in itertools.combinations(sorted(targets), 2):
        distance = (targets[one] - targets[other]).norm()
        assert distance < 1e-12 if (one, other) in equal or (other, one) in equal else distance > 1e-2


def test_the_size_of_the_gradient_is_continuous_in_the_weight():
    case, norms = CASES["markov"], []
    for weight in (0.0, 1e-3, 1e-2, 0.1, 0.5, 0.9, 0.99, 0.999, 1.0):
        norms.append(target(case, {"divergence": "jsd", "jsd_weight": weight}, 1.0).norm().item())
    ratios = [max(a / b, b / a) for a, b in itertools.pairwise(norms)]
    assert max(ratios) < 1.4
    assert max(ratios[0], ratios[-1]) < 1.01


@pytest.mark.parametrize("name", SETTINGS)
def test_the_value_is_the_mean_of_the_sum(name):
    case, estimator = CASES["markov"], RaoBlackwell(**SETTINGS[name])
    tokens, mask = case.sequences
    p, q = (model.token_logits(tokens).log_softmax(-1) for model in (case.policy, case.reference))
    expected = torch.where(mask, divergence(p, q, **SETTINGS[name]), 0).sum(1)
    value = estimator.value(case.stats(case.policy.logits, jsd=estimator.reads_jsd), mask)
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)


def test_settings_without_an_effect_and_other_values_are_refused():
    for settings, message in [
        ({"divergence": "js"}, "divergence: must be one of reverse, forward, jsd, got 'js'"),
        ({"divergence": "jsd", "jsd_weight": 1.5}, "jsd_weight: must be between 0 and 1, got 1.5"),
        ({"jsd_weight": 0.1}, "jsd_weight: 0.1 needs divergence jsd, got reverse"),
        ({"divergence": "forward", "forward_share": 0.5}, "forward_share: 0.5 needs divergence reverse"),
        ({"ratio_cap": 2.0}, "ratio_cap: 2 needs off_policy token, prefix or sequence, got none"),
        ({"ratio_cap": 0.0, "off_policy": "prefix"}, "ratio_cap: must be positive"),
        ({"beyond_cap": "drop", "off_policy": "prefix"}, "beyond_cap: must be one of truncate, mask"),
    ]:
        with pytest.raises(ConfigurationError, match=f"^{message}"):
            RaoBlackwell(**settings)
    _, stats = CASES["markov"].current()
    with pytest.raises(ConfigurationError, match=r"stats.jsd is None.*jsd_weight"):
        RaoBlackwell(divergence="jsd", baseline=None).surrogate(stats, CASES["markov"].sequences[1])


def test_another_divergence_is_a_choice_of_objective():
    for settings in SETTINGS.values():
        RaoBlackwell(**settings).check_trainable()
        assert RaoBlackwell(**settings).is_fusable
    jsd = RaoBlackwell(divergence="jsd", jsd_weight=0.1)
    assert jsd.formula == "c_t = sum_{s>t} JSD_s, l_t = JSD_t"
    assert "Jensen-Shannon divergence (0.1) summed over the tokens" in jsd.optimises
    assert "KL(reference || policy) summed over" in RaoBlackwell(divergence="forward").optimises


@pytest.mark.parametrize("beyond_cap", ["truncate", "mask"])
@pytest.mark.parametrize("off_policy", ["token", "prefix", "sequence"])
def test_capped_ratios_by_definition(off_policy, beyond_cap):
    """The gradient with each ratio above the cap replaced by it, or by 0, in plain loops."""
    case, cap = CASES["markov"], 1.2
    mask = case.sequences[1]
    rows = torch.arange(len(mask))
    stats, old = rows_of(case.stats(case.policy.logits), rows), case.stats(case.behaviour.logits).logprobs
    leaf = stats.map(lambda field: field.detach().requires_grad_())
    estimator = RaoBlackwell(off_policy=off_policy, baseline=None, ratio_cap=cap, beyond_cap=beyond_cap)
    loss = estimator.surrogate(leaf, mask, behaviour_logprobs=old)
    score, pathwise = torch.autograd.grad(loss * len(mask), (leaf.logprobs, leaf.kl))

    def capped(log_ratio):
        ratio = math.exp(log_ratio)
        return ratio if ratio <= cap else cap if beyond_cap == "truncate" else 0.0

    over = 0
    for row, length in enumerate(mask.sum(1).tolist()):
        ratios = (stats.logprobs - old)[row, :length].tolist()
        weight = {"token": lambda t: 1.0, "prefix": lambda t: capped(sum(ratios[:t]))}  # noqa: B023
        weight["sequence"] = lambda t: capped(sum(ratios))  # noqa: B023
        kl = stats.kl[row].tolist()
        for t in range(length):
            later = sum(weight[off_policy](s) * kl[s] for s in range(t + 1, length))
            later *= capped(ratios[t]) if off_policy == "token" else 1.0
            assert score[row, t].item() == pytest.approx(later, abs=1e-12)
            assert pathwise[row, t].item() == pytest.approx(weight[off_policy](t), abs=1e-12)
            over += sum(ratios[: t + 1]) > math.log(cap)
    assert over > 3, "ratios must exceed the cap"


def test_a_cap_is_called_biased():
    exact, capped = (RaoBlackwell(off_policy="prefix", ratio_cap=cap) for cap in (None, 2.0))
    assert exact.later_bias is None
    assert capped.later_bias == "off_policy prefix, ratio_cap 2"
    assert MonteCarlo(off_policy="token").later_bias == "off_policy token"


def test_the_effective_share_of_the_completions():
    logprobs = torch.tensor([[1.0, 0.0], [1.0, 2.0], [3.0, 1.0]]).log()
    old = torch.zeros(3, 2)
    mask = torch.tensor([[True, False], [True, True], [True, True]])
    # Products through each token: 1; 1, 2; 3, 3
    sizes = {"token": (25 / 11, 9 / 5), "prefix": (25 / 11, 25 / 13)}
    for off_policy, expected in sizes.items():
        share = MonteCarlo(off_policy=off_policy).effective_share(logprobs, mask, old)
        assert share.item() == pytest.approx(sum(expected) / 5)
    of_sequences = MonteCarlo(off_policy="sequence").effective_share(logprobs, mask, old)
    assert of_sequences.item() == pytest.approx(36 / 14 / 3)
    capped = MonteCarlo(off_policy="sequence", ratio_cap=2.0).effective_share(logprobs, mask, old)
    assert capped.item() == pytest.approx(25 / 9 / 3)
    assert MonteCarlo(off_policy="clip").effective_share(logprobs, mask, old) is None


@pytest.mark.parametrize(
    ("off_policy", "cosine"), [("none", 0.848), ("token", 0.976), ("prefix", 1.0), ("sequence", 1.0)]
)
def test_top_k_stays_exact_on_samples_of_an_earlier_policy_under_prefix_weights(off_policy, cosine):
    """The policy is half a logit from the one that sampled, at a KL of 3 nats: the numbers of choosing.md."""
    world = worlds(off_policy=True)[2]
    nothing = torch.zeros(len(world.policy.sequences()[0]), dtype=torch.float64)
    case = Case(world.policy, world.reference, world.behaviour, nothing, nothing[:3])
    exact = exact_kl_gradient(case.policy, case.reference)
    estimator = RaoBlackwellTopK(k=1, off_policy=off_policy, baseline=None)
    how = {"off_policy": True, "beta": None, "variation": VARIATIONS[1]}
    gradient = expected_gradient(case, estimator, 1, **how)
    found = (gradient * exact).sum() / (gradient.norm() * exact.norm())
    assert found.item() == pytest.approx(cosine, abs=1e-3)
    assert ((gradient - exact).abs().max() < TOLERANCE) == (cosine == 1)


def test_the_table_of_the_page_and_the_normalisation_of_trl():
    """64 tokens of a vocabulary of 500, KL .45: norms of the gradient in the logits, summed over tokens."""
    generator = torch.Generator().manual_seed(0)
    teacher, step = torch.randn(2, 1, 64, 500, generator=generator, dtype=torch.float64)
    student = (2 * teacher + step).requires_grad_()
    tokens = torch.zeros(1, 64, dtype=torch.long)
    evidence = Path(__file__).parents[2] / "replication" / "evidence" / "distillation_rivals.md"
    page = evidence.read_text("utf-8")
    rows = re.findall(r"^\| (0|1|0?\.\d+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert [float(weight) for weight, *_ in rows] == [0, 0.01, 0.1, 0.5, 0.9, 0.99, 1]
    for weight, ours, of_trl in (map(float, row) for row in rows):
        jsd = token_stats(student, 2 * teacher, tokens, jsd_weight=weight).jsd.sum()
        norm = torch.autograd.grad(jsd, student)[0].norm().item()
        factor = weight * (1 - weight) or 1
        assert norm == pytest.approx(ours, abs=0.006)
        assert norm * factor == pytest.approx(of_trl, rel=0.06)

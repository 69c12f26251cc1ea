"""Public functions of tensors, on whatever people pass, against a plain version in float64.

One property: a function gives the numbers of the plain version, or its own error that names the argument.
"""

import itertools
import math
import warnings
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings, strategies as st
from torch import Tensor

from lit_klrb.cli.explain import estimator_classes
from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import EstimatorMemory
from lit_klrb.functional import (
    TokenStats,
    TopK,
    kl_values,
    tiled_logprobs,
    tiled_policy_loss,
    tiled_token_stats,
    token_stats,
)
from lit_klrb.functional.credit import _sums_by_product
from lit_klrb.functional.tiled import head, inputs, logprobs as logprobs_module

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
ESTIMATORS = estimator_classes()
EXCLUDED, LOWEST = -math.inf, -3e38
# Biases of a token's logit: its probability is ordinary, small, below float32's smallest normal number, 0.
SMALL, NEGLIGIBLE = -80.0, (-95.0, -200.0, -2000.0)
# Those of policy and reference. LOWEST is finite, but overflows when it is summed
PAIRS = {
    "ordinary": [(0.0, 0.0)],
    "finite": [
        *[(0.0, 0.0), (SMALL, 0.0), (0.0, SMALL), (EXCLUDED, EXCLUDED), *[(-2000.0, LOWEST)] * 2],
        *[(bias, EXCLUDED) for bias in NEGLIGIBLE],
        *[(EXCLUDED, bias) for bias in NEGLIGIBLE],
    ],
    "any": [
        *itertools.product((0.0, 0.0, SMALL, *NEGLIGIBLE, EXCLUDED), repeat=2),
        *[(bias, LOWEST) for bias in (*NEGLIGIBLE, EXCLUDED)],
    ],
}
POLICY = ("hidden", "weight", "bias")
RELATIVE = {torch.float64: 1e-8, torch.float32: 2e-4, torch.bfloat16: 2e-2}


class Case(NamedTuple):
    """What is drawn; `wrong_token` is of the input."""

    seed: int
    sequences: int
    length: int
    dtype: torch.dtype
    biases: list[float]
    ref_biases: list[float]
    mask_dtype: torch.dtype | None
    junk_token: int
    wrong_token: int | None
    temperature: float
    softcap: float | None
    topk: TopK | None
    jsd_weight: float | None
    valued: bool
    tile_size: int | None
    block: int
    keeps_logits: bool
    autocast: bool
    changed: str | None
    every_field: bool
    estimators: list[str]
    off_policy: str
    allow_biased: bool
    beta: float


def rarely(*values: Any) -> st.SearchStrategy[Any]:
    """None in six of seven cases."""
    return st.sampled_from([None] * 6 * len(values) + list(values))


@st.composite
def cases(draw: Any) -> Case:
    choose = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    pairs = PAIRS[choose("ordinary", "finite", "finite", "any")]
    runs = draw(st.lists(st.tuples(st.sampled_from(pairs), st.integers(1, 3)), max_size=4))
    drawn = [(0.0, 0.0)] * 2 + [pair for pair, count in runs for _ in range(count)]
    biases, ref_biases = map(list, zip(*drawn, strict=True))
    mask_dtype = choose(*[torch.bool] * 10, *[None] * 7, torch.uint8, torch.int64, torch.float32)
    ranked = choose("policy", "reference")
    jsd_weight = choose(*[None] * 4, 0.0, 1e-3, 0.5, 0.9, 1.0)
    possible = sum(bias > LOWEST for bias in (biases if ranked == "policy" else ref_biases))
    return Case(
        seed=draw(st.integers(0, 999)),
        sequences=choose(0, 2, 4, 4, 6),
        length=choose(0, 1, 2, 3),
        dtype=choose(torch.float32, torch.float32, torch.float64, torch.bfloat16),
        biases=biases,
        ref_biases=ref_biases,
        mask_dtype=mask_dtype,
        junk_token=-100 if mask_dtype is None else choose(-100, -1, len(biases), 10**9),
        wrong_token=draw(rarely(-1, len(biases), *([] if mask_dtype is None else [-100]))),
        temperature=choose(1.0, 2.0),
        softcap=draw(rarely(3.0)),
        topk=choose(None, TopK(draw(st.integers(1, possible)), ranked)) if jsd_weight is None else None,
        jsd_weight=jsd_weight,
        valued=choose(True, False),
        tile_size=choose(None, 1, 2, 5),
        block=choose(1, 2, 4, 100),
        keeps_logits=choose(True, False),
        autocast=choose(True, False),
        changed=choose(*[None] * 6, "weight", "ref_weight", "ref_bias", "tokens"),
        every_field=choose(True, False),
        estimators=draw(st.lists(st.sampled_from(sorted(ESTIMATORS)), min_size=3, max_size=3)),
        off_policy=choose("none", "none", "clip", "token", "prefix", "sequence"),
        allow_biased=choose(True, False),
        beta=choose(0.0, 0.0, 0.3),
    )


def whole_block(bias: float, *ref_biases: float) -> Case:
    """A block of tokens of which the policy's share is 0 in float32, in a gradient from retained blocks."""
    biases, ref_biases = ([0.0] * 4 + added for added in ([bias] * 4, [*ref_biases]))
    return Case(
        **{"seed": 0, "sequences": 4, "length": 3, "dtype": torch.float32, "mask_dtype": torch.bool},
        **{"biases": biases, "ref_biases": ref_biases, "block": 4, "estimators": [], "beta": 0.0},
        **{"junk_token": -100, "wrong_token": None, "temperature": 1.0, "softcap": None, "topk": None},
        **{"jsd_weight": None, "valued": False, "tile_size": None, "keeps_logits": True, "autocast": False},
        **{"changed": None, "every_field": False, "off_policy": "none", "allow_biased": True},
    )


class Input:
    """The tensors of a case: outside the mask, hidden states are NaN and tokens are none."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device, self.generator = case, device, torch.Generator().manual_seed(case.seed)
        shape, size = (case.sequences, case.length), 1 + case.seed % 3
        mask = torch.rand(shape, generator=self.generator) < 0.8
        both = zip(case.biases, case.ref_biases, strict=True)
        possible = torch.tensor([i for i, (p, q) in enumerate(both) if p > EXCLUDED and q != LOWEST])
        tokens = possible[torch.randint(len(possible), shape, generator=self.generator)]
        tokens[~mask] = case.junk_token
        self.wrong_at = mask.nonzero()[-1].tolist() if case.wrong_token is not None and mask.any() else None
        if self.wrong_at:
            tokens[tuple(self.wrong_at)] = case.wrong_token
        heads = {"bias": case.biases, "ref_bias": case.ref_biases}
        self.exact = {name: torch.tensor(biases, dtype=torch.float64) for name, biases in heads.items()}
        for name in ("hidden", "ref_hidden"):
            self.exact[name] = self.normal(*shape, size).masked_fill(~mask[..., None], math.nan)
        for name in ("weight", "ref_weight"):
            self.exact[name] = self.normal(len(case.biases), size)
        self.exact = {name: value.to(case.dtype).double() for name, value in self.exact.items()}
        self.tokens, self.mask = tokens, mask
        self.values = torch.linspace(-1, 2, len(case.biases))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def arguments(self) -> dict[str, Any]:
        """Those of the tiled operations, new ones in each call."""
        case = self.case
        tensors = {name: value.to(case.dtype).to(self.device).clone() for name, value in self.exact.items()}
        for name in POLICY:
            tensors[name].requires_grad_()
        mask = None if case.mask_dtype is None else self.mask.to(case.mask_dtype).to(self.device)
        numbers = {"temperature": case.temperature, "tile_size": case.tile_size}
        return {**tensors, **numbers, "tokens": self.tokens.clone().to(self.device), "mask": mask}

    def refused(self, call: Any) -> bool:
        """Whether the input is wrong, in which case the call says so."""
        mask_is_wrong = self.case.mask_dtype not in (None, torch.bool)
        last = len(self.case.biases) - 1
        message = rf"tokens: must be in 0\.\.{last} inside the mask, got {self.case.wrong_token} at \["
        if mask_is_wrong or self.wrong_at:
            with pytest.raises(
                ConfigurationError, match="mask: must be torch.bool" if mask_is_wrong else message
            ):
                call()
        return mask_is_wrong or bool(self.wrong_at)


class Plain:
    """The definitions, from all logits in float64; `stats` has fields [B, T], 0 outside the mask."""

    def __init__(self, given: Input) -> None:
        self.given, case = given, given.case
        double = {name: value.clone() for name, value in given.exact.items()}
        self.leaves = [double[name].requires_grad_() for name in POLICY]
        self.logits, self.ref_logits = (
            self.capped(double[f"{p}hidden"][given.mask] @ double[f"{p}weight"].T + double[f"{p}bias"])
            for p in ("", "ref_")
        )
        self.p, self.q = ((x / case.temperature).log_softmax(-1) for x in (self.logits, self.ref_logits))
        if given.wrong_at:
            return
        tokens = given.tokens[given.mask][:, None]
        rows = list(zip(self.p, self.q, strict=True))
        fields = {
            "logprobs": self.p.gather(1, tokens)[:, 0],
            "ref_logprobs": self.q.gather(1, tokens)[:, 0],
            "kl": [self.divergence(p, q) for p, q in rows],
            "forward_kl": [self.divergence(q, p) for p, q in rows],
            "entropy": [-(p.exp() * p).sum() for p in (p[self.present(p)] for p in self.p)],
        }
        if case.valued:
            values = given.values.double()
            fields |= {"value": values[tokens[:, 0]], "expected_value": self.p.exp() @ values}
        if case.jsd_weight is not None:
            fields["jsd"] = [self.jensen_shannon(p, q, case.jsd_weight) for p, q in rows]
        if case.topk is not None:
            ranked = self.p if case.topk.support == "policy" else self.q
            heads = ranked.topk(case.topk.k).indices
            parts = [(p[at], q[at]) for (p, q), at in zip(rows, heads, strict=True)]
            fields |= {
                "head_kl": [self.divergence(p, q) + q.exp().sum() - p.exp().sum() for p, q in parts],
                "head_forward_kl": [self.divergence(q, p) + p.exp().sum() - q.exp().sum() for p, q in parts],
                "head_mass": [p.exp().sum() for p, _ in parts],
                "ref_head_mass": [q.exp().sum() for _, q in parts],
                "in_head": (heads == tokens).any(1),
            }
        self.stats = TokenStats(**{name: self.positions(field) for name, field in fields.items()})

    def capped(self, logits: Tensor) -> Tensor:
        cap = self.given.case.softcap
        return logits if cap is None else cap * (logits / cap).tanh()

    def present(self, logprobs: Tensor) -> Tensor:
        """Where a probability is not 0 in the dtype of the computation."""
        dtype = torch.float64 if self.given.case.dtype == torch.float64 else torch.float32
        return logprobs.exp() >= torch.finfo(dtype).tiny

    def divergence(self, p: Tensor, q: Tensor) -> Tensor:
        """sum_v p (log p - log q) over the tokens with a p; +inf if q excludes one of them."""
        p, q = p[self.present(p)], q[self.present(p)]
        return p.new_tensor(math.inf) if (q == EXCLUDED).any() else (p.exp() * (p - q)).sum()

    def jensen_shannon(self, p: Tensor, q: Tensor, weight: float) -> Tensor:
        """[w KL(p || m) + (1 - w) KL(q || m)] / (w (1 - w)), or its limits at 0 and 1."""
        if weight in (0, 1):
            return self.divergence(p, q) if weight == 0 else self.divergence(q, p)
        mixture = weight * p.exp() + (1 - weight) * q.exp()
        return sum(
            (x.exp()[at] * (x[at] - mixture[at].log())).sum() / (1 - share)
            for x, at, share in ((p, self.present(p), weight), (q, self.present(q), 1 - weight))
        )

    def positions(self, rows: Tensor | list[Tensor]) -> Tensor:
        mask, rows = self.given.mask, torch.stack([*rows]).double() if len(rows) else self.p.sum(1)
        return self.p.new_zeros(mask.shape).masked_scatter(mask, rows)


def gradients(total: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """Outside autocast, as torch recommends."""
    with torch.autocast(total.device.type, enabled=False):
        return torch.autograd.grad(total, leaves, retain_graph=True, materialize_grads=True)


def close(got: Tensor, expected: Tensor, dtype: torch.dtype, what: str) -> None:
    """Equal up to rounding, relative to the largest; infinite in the same places."""
    got, expected, relative = got.detach().cpu().double(), expected.detach(), RELATIVE[dtype]
    largest = expected[expected.isfinite()].abs().max().item() if expected.isfinite().any() else 0.0
    tolerance = {"rtol": relative, "atol": relative * (1 + largest)}
    torch.testing.assert_close(got, expected, **tolerance, msg=lambda message: f"{what}: {message}")


def same_fields(got: TokenStats, expected: TokenStats, dtype: torch.dtype, what: str) -> None:
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    for name, one, other in zip(TokenStats._fields, got, expected, strict=True):
        assert (one is None) == (other is None), (what, name)
        if one is not None:
            assert one.dtype == wide, (what, name)
            close(one, other, wide, f"{name} of {what}")


def weighted_sum(given: Input, stats: TokenStats, expected: TokenStats) -> Tensor:
    """A loss of the fields, in which what is infinite has the weight 0."""
    divergence = "kl" if given.case.jsd_weight is None else "jsd"
    retained = ["logprobs", divergence, "expected_value", "head_kl"]
    names = TokenStats._fields if given.case.every_field else retained
    total = stats.logprobs.new_zeros(())
    for name in names:
        field, true = getattr(stats, name), getattr(expected, name)
        if field is not None and field.requires_grad:
            weights = torch.linspace(0.5, 1.5, true.numel(), dtype=torch.float64).view_as(true)
            weights = torch.where(true.isfinite(), weights, 0).to(field)
            total = total + (weights * field).sum()
    return total


def same_gradients(
    given: Input,
    total: Tensor,
    leaves: list[Tensor],
    expected: list[Tensor],
    what: str,
    changed: Tensor | None,
) -> None:
    """Those expected, or after a change in place torch's own error."""
    if changed is not None:
        with torch.no_grad():
            changed.copy_(changed.flip(0) + changed.is_floating_point())
    try:
        found = gradients(total, leaves)
    except RuntimeError as error:
        if changed is None or "modified by an inplace operation" not in str(error):
            raise
        return
    for gradient, true in zip(found, expected, strict=True):
        close(gradient, true, given.case.dtype, f"gradient of {what}")


def check_statistics(given: Input) -> TokenStats | None:
    """`token_stats` and `tiled_token_stats`; the statistics of the first."""
    case, plain = given.case, Plain(given)
    options: dict[str, Any] = {"topk": case.topk, "jsd_weight": case.jsd_weight}
    options["token_values"] = given.values.to(given.device) if case.valued else None
    caps = {"logit_softcap": case.softcap, "ref_logit_softcap": case.softcap}
    arguments = given.arguments()
    call = partial(tiled_token_stats, **arguments, **options, **caps)
    if given.refused(call):
        return None
    stats, expected = call(), plain.stats
    same_fields(stats, expected, case.dtype, "tiled_token_stats")
    total, true = (weighted_sum(given, each, expected) for each in (stats, expected))
    wanted = gradients(true, [plain.logits, *plain.leaves])
    leaves, changed = [arguments[name] for name in POLICY], case.changed and arguments[case.changed]
    for infinite in stats.kl[stats.kl == math.inf][:1]:
        assert not gradients(infinite, leaves)[2].isfinite().all()
    same_gradients(given, total, leaves, wanted[1:], "tiled_token_stats", changed)

    dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    logits, ref_logits = (
        torch.full((*given.mask.shape, len(case.biases)), math.nan, dtype=dtype).masked_scatter(
            given.mask[..., None], rows.detach().to(dtype)
        )
        for rows in (plain.logits, plain.ref_logits)
    )
    logits = logits.to(given.device).requires_grad_()
    tokens = torch.where(given.mask, given.tokens, -100).to(given.device)
    stats = token_stats(logits, ref_logits.to(given.device), tokens, case.temperature, **options)
    same_fields(stats, expected, dtype, "token_stats")
    for infinite in stats.kl[stats.kl == math.inf][:1]:
        assert gradients(infinite, [logits])[0].isnan().any()
    (gradient,) = gradients(weighted_sum(given, stats, expected), [logits])
    close(gradient[given.mask.to(given.device)], wanted[0], dtype, "gradient of token_stats")
    assert not gradient[~given.mask.to(given.device)].any()
    return stats


def check_loss(given: Input) -> None:
    """`tiled_policy_loss`."""
    case, plain, arguments = given.case, Plain(given), given.arguments()
    shape, device = given.mask.shape, given.device
    score, kl, value = (given.normal(*shape).abs() for _ in range(3))
    options: dict[str, Any] = {"logit_softcap": case.softcap, "ref_logit_softcap": case.softcap}
    if case.valued:
        options |= {"token_values": given.values.to(device), "value_weights": value.to(device)}
    options |= {"score_weights": score.to(device), "jsd_weight": case.jsd_weight}
    call = partial(tiled_policy_loss, **arguments, **options)
    if given.refused(partial(call, kl_weights=kl.to(device))):
        return
    divergence = plain.stats.kl if plain.stats.jsd is None else plain.stats.jsd
    finite = torch.where(divergence.isfinite(), kl, 0)
    loss, stats = call(kl_weights=finite.to(device))
    expected = plain.stats._replace(
        **dict.fromkeys(("head_kl", "head_mass", "ref_head_mass", "in_head", "head_forward_kl"))
    )
    same_fields(stats, expected, case.dtype, "tiled_policy_loss")
    terms = [(score, expected.logprobs), (finite, divergence)]
    terms += [(value, expected.expected_value)] if case.valued else []
    true = sum(torch.where(weights == 0, 0, weights * field).sum() for weights, field in terms)
    true = true / max(case.sequences, 1)
    close(loss, true, case.dtype, "tiled_policy_loss")
    wanted = gradients(true, plain.leaves)
    leaves, changed = [arguments[name] for name in POLICY], case.changed and arguments[case.changed]
    same_gradients(given, loss, leaves, list(wanted), "tiled_policy_loss", changed)
    if case.changed is None and not divergence.isfinite().all():
        assert call(kl_weights=kl.to(device))[0] == math.inf


def check_logprobs(given: Input) -> None:
    """`tiled_logprobs` of one and of two tokens at each position."""
    case, plain = given.case, Plain(given)
    for several in (False, True):
        arguments = {n: v for n, v in given.arguments().items() if not n.startswith("ref_")}
        if several:  # the first column is of tokens that exist
            arguments["tokens"] = torch.stack(
                [torch.zeros_like(arguments["tokens"]), arguments["tokens"]], -1
            )
            if case.mask_dtype is None:
                arguments["tokens"][~given.mask.to(given.device)] = -100
        call = partial(tiled_logprobs, **arguments, logit_softcap=case.softcap)
        if given.refused(call):
            continue
        logprobs, expected = call(), plain.stats.logprobs
        if several:
            expected = torch.stack([plain.positions(plain.p[:, 0]), expected], -1)
        dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
        close(logprobs, expected, dtype, "tiled_logprobs")
        weights = torch.linspace(0.5, 1.5, expected.numel(), dtype=torch.float64).view_as(expected)
        wanted = gradients((weights * expected).sum(), plain.leaves)
        leaves = [arguments[name] for name in POLICY]
        changed = arguments.get(case.changed)
        total = (weights.to(logprobs) * logprobs).sum()
        same_gradients(given, total, leaves, list(wanted), "tiled_logprobs", changed)


def check_estimator(name: str, given: Input, stats: TokenStats) -> None:
    """An estimator on statistics with junk outside the mask, against finite ones in float64."""
    case, mask, exact = given.case, given.mask.to(given.device), Plain(given).stats.detach()
    kind = ESTIMATORS[name]
    estimator = kind(off_policy=case.off_policy, allow_biased=case.allow_biased)
    behaviour, rewards = given.normal(*given.mask.shape), given.normal(case.sequences)
    junk = stats.map(lambda field: torch.where(mask, field.detach(), math.nan).requires_grad_())
    values = estimator.value(junk, mask)
    infinite = torch.stack([exact.kl, exact.ref_logprobs]).isinf().any(0)
    assert not values.isnan().any(), name
    if name.startswith("RaoBlackwell") and case.topk is None:
        close(values, exact.kl.sum(1), stats.kl.dtype, f"value of {name}")
    settings: dict[str, Any] = {"beta": case.beta, "group_size": 2}
    rollout = {"stats": junk, "mask": mask, "rewards": rewards.to(stats.kl), **settings}
    wrong = {"group_size": 2.0, "beta": None, "rewards": rewards.tolist(), "mask": mask.to(torch.uint8)}
    wrong["stats"] = junk.detach()
    for argument, value in wrong.items() if case.sequences else ():
        with pytest.raises(ConfigurationError, match=f"^{argument}: "):
            estimator.objective(**{**rollout, argument: value})
    if infinite.any() and case.beta:
        return  # the loss is not finite either
    losses, slopes = [], []
    clean = exact.map(lambda field: torch.where(field.isinf(), 0, field).requires_grad_())
    plain = {"stats": clean, "mask": given.mask, "rewards": rewards, **settings}
    for arguments, old in ((rollout, behaviour.to(stats.kl)), (plain, behaviour)):
        leaf = arguments["stats"].logprobs
        # As in a loop: the line that is warned of is always the same
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("default")
            for _ in range(2):
                loss = estimator.objective(**arguments, behaviour_logprobs=leaf.detach() + 0.1 * old)
        assert len(shown) == (estimator.bias is not None and not case.allow_biased), estimator.label
        losses.append(loss)
        fields = [field for field in arguments["stats"] if field is not None]
        slopes.append(gradients(loss, fields))
    close(losses[0], losses[1], stats.kl.dtype, f"objective of {estimator.label}")
    for one, other in zip(*slopes, strict=True):
        close(one, other, stats.kl.dtype, f"gradient of the objective of {estimator.label}")
    memory = EstimatorMemory(kind(allow_biased=True))
    rollout |= {"tokens": torch.where(mask, given.tokens.to(mask.device), case.junk_token)}
    weights = memory.weights(**rollout)
    assert all(field.isfinite().all() for field in weights if field is not None)
    memory.observe(rollout["tokens"], mask, rollout["rewards"], junk, group_size=2)


def check_values(given: Input, stats: TokenStats) -> None:
    """`kl_values`, `served_stats`, and sums as a GPU forms them."""
    case, exact, mask = given.case, Plain(given).stats.detach(), given.mask.to(given.device)
    close(_sums_by_product(stats.kl), exact.kl.cumsum(-1), stats.kl.dtype, "sums by product")
    if case.sequences < 4:
        return
    junk = stats.map(lambda field: torch.where(mask, field.detach(), math.nan))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "one of .* completions has")
        values = kl_values(junk, mask, given.tokens.to(mask.device), group_size=2)
    log_ratio = (exact.logprobs - exact.ref_logprobs).sum(-1)
    for name, true in {"k1": log_ratio, "rb": exact.kl.sum(-1)}.items():
        close(values[name].flatten(), true, stats.kl.dtype, name)
    for name, value in values.items():
        assert not value.isnan().any(), name


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=200, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@example(case=whole_block(-95.0, *[EXCLUDED] * 4))
@example(case=whole_block(-95.0, *[EXCLUDED] * 4)._replace(topk=TopK(6)))
@example(case=whole_block(-2000.0, 0.0, *[LOWEST] * 3))
@example(case=whole_block(-2000.0, *[EXCLUDED] * 4)._replace(dtype=torch.float64, block=1))
@given(case=cases())
def test_functions_give_the_numbers_of_the_plain_version_or_name_what_is_wrong(case, device):
    given = Input(case, device)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"KL\(policy \|\| reference\) is \+inf")
        patch.setattr(head, "_CPU_BLOCK", case.block)
        patch.setattr(logprobs_module, "_AT_ONCE", -1 if case.keeps_logits else 2**20)
        patch.setattr(inputs, "_RETAINED_LOGITS", 2**26 if case.keeps_logits else 0)
        with torch.autocast(device, torch.bfloat16, enabled=case.autocast):
            stats = check_statistics(given)
            check_loss(given)
            check_logprobs(given)
            if stats is not None:
                for name in case.estimators:
                    check_estimator(name, given, stats)
                check_values(given, stats)

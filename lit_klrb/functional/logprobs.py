"""Per-token statistics of a policy and its reference, from their logits."""

import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError, check_positive, check_share
from lit_klrb.functional.checks import check_mask, inside_mask, positions_of
from lit_klrb.functional.sums import full_precision, jsd_sum, kl_sum, probabilities_of

Support = Literal["policy", "reference"]


class TopK(NamedTuple):
    """The head H of the vocabulary: the k most likely tokens of one model, at each position.

    Args:
        k: Number of tokens, 1 to V.
        support: The model whose most likely tokens are taken.
    """

    k: int
    support: Support = "policy"

    def check(self, vocabulary: int | None = None) -> None:
        """Check the values, and k against the size of the vocabulary if it is given.

        Raises:
            ConfigurationError: If k is out of range or the support unknown.
        """
        if self.k < 1 or (vocabulary is not None and self.k > vocabulary):
            allowed = "at least 1" if vocabulary is None else f"between 1 and V = {vocabulary}"
            raise ConfigurationError(f"must be {allowed}, got {self.k}", key="k")
        if self.support not in get_args(Support):
            raise ConfigurationError(f"must be policy or reference, got {self.support!r}", key="support")


class HeadSums(NamedTuple):
    """Sums over the head, and whether it has the sampled token, shape [B, T]; see `TokenStats`."""

    head_kl: Tensor
    head_mass: Tensor
    ref_head_mass: Tensor
    in_head: Tensor
    head_forward_kl: Tensor

    @staticmethod
    def of(
        logprobs: Tensor, ref_logprobs: Tensor, tokens: Tensor, sampled: Tensor, masses: Tensor | None = None
    ) -> "HeadSums":
        """The sums from the head's log-probabilities and tokens [..., k], and the sampled tokens [...].

        The probabilities `masses` are those of `logprobs` unless they are given.
        """
        masses = probabilities_of(logprobs) if masses is None else masses
        inside = (tokens == sampled.unsqueeze(-1)).any(-1)
        return HeadSums(
            kl_sum(logprobs, ref_logprobs, masses),
            masses.sum(-1),
            ref_logprobs.exp().sum(-1),
            inside.to(masses.dtype),
            kl_sum(ref_logprobs, logprobs, probabilities_of(ref_logprobs)),
        )


class TokenStats(NamedTuple):
    """Per-token statistics that estimators read; positions outside the completion may hold anything.

    Args:
        logprobs: log p(y_t | x, y_<t), shape [B, T].
        ref_logprobs: log q(y_t | x, y_<t), shape [B, T].
        kl: KL(p(. | x, y_<t) || q(. | x, y_<t)) in nats, shape [B, T]; None if not computed.
        entropy: Entropy of p(. | x, y_<t) in nats, shape [B, T]; None if not computed.
        value: a(y_t), the token value of the sampled token, shape [B, T]; None without token values.
        expected_value: sum_v p(v | x, y_<t) a(v), shape [B, T]; None without token values.
        head_kl: Sum of p log(p / q) - p + q over the head H, shape [B, T]; never negative. This and what
            follows are None without a `TopK`.
        head_mass: Sum of p over H, shape [B, T].
        ref_head_mass: Sum of q over H, shape [B, T].
        in_head: 1 where the sampled token is in H, 0 elsewhere, shape [B, T].
        reward_to_come: r(x, y) - r(x, y_<t), the completion's reward less that of the part before token t,
            shape [B, T]; None if rewards of parts are not computed. The caller sets it.
        forward_kl: KL(q(. | x, y_<t) || p(. | x, y_<t)) in nats, the other direction, shape [B, T]; None if
            not computed.
        jsd: The Jensen-Shannon divergence JSD_w / (w (1 - w)) of p and q in nats, shape [B, T]; None without
            its weight w, see `jsd_sum`.
        head_forward_kl: Sum of q log(q / p) - q + p over H, shape [B, T]; never negative.
    """

    logprobs: Tensor
    ref_logprobs: Tensor
    kl: Tensor | None = None
    entropy: Tensor | None = None
    value: Tensor | None = None
    expected_value: Tensor | None = None
    head_kl: Tensor | None = None
    head_mass: Tensor | None = None
    ref_head_mass: Tensor | None = None
    in_head: Tensor | None = None
    reward_to_come: Tensor | None = None
    forward_kl: Tensor | None = None
    jsd: Tensor | None = None
    head_forward_kl: Tensor | None = None

    def detach(self) -> "TokenStats":
        """The same statistics, detached from the graph."""
        return self.map(Tensor.detach)

    def masked(self, mask: Tensor) -> "TokenStats":
        """Set positions outside the mask to 0, NaN and infinities included; at least float32."""
        check_mask(mask, tuple(self.logprobs.shape))
        # Not a product with the mask: 0 * inf would be NaN, in the values and in the gradients
        return self.map(lambda field: torch.where(mask, full_precision(field), 0))

    def map(self, change: Callable[[Tensor], Tensor]) -> "TokenStats":
        """Apply a function to every field that is not None, such as indexing or a change of device."""
        changed: list[Any] = [None if field is None else change(field) for field in self]
        return TokenStats(*changed)


def token_stats(
    logits: Tensor,
    ref_logits: Tensor,
    tokens: Tensor,
    temperature: float = 1.0,
    token_values: Tensor | None = None,
    topk: TopK | None = None,
    jsd_weight: float | None = None,
) -> TokenStats:
    """Log-probabilities, KL and entropy of every token, over the full vocabulary.

    Computed in float32 whatever autocast says, or in float64 for float64 logits. The KL is the sum over the
    vocabulary of p (r + exp(-r) - 1) with r the log ratio. It equals the sum of p r, but no term is negative,
    and rounding errors of the normalisers cancel.

    A probability below the smallest normal number, 1.2e-38 in float32, counts as 0, and such a token
    contributes 0 whatever the other model gives it. One that has more and that the other model excludes
    (logit -inf) makes the KL +inf. An infinite KL with a weight of 0 in the loss has no gradient, otherwise
    its gradient is NaN.

    Args:
        logits: Policy logits, shape [B, T, V]; those at position t predict `tokens[:, t]`. Differentiable.
        ref_logits: Reference logits, shape [B, T, V]; differentiable.
        tokens: Sampled token ids, shape [B, T]. Positions with -100 are not computed, and 0 in the result.
        temperature: The sampling temperature; the logits of both models are divided by it.
        token_values: Values a(v) of the tokens, in units of reward, shape [V]; treated as constant. Tokens
            beyond a shorter table have the value 0.
        topk: The head for which sums are computed. Which tokens it has is not differentiated.
        jsd_weight: Weight w of the policy in the mixture of the Jensen-Shannon divergence, 0 to 1; see
            `jsd_sum`.

    Returns:
        All fields, shape [B, T]; `value` and `expected_value` only if token values are given, the sums over
        the head only with `topk`, and `jsd` only with its weight. If only the reference excludes a token, the
        KL is +inf and a warning names the token.

    Raises:
        ConfigurationError: If the shapes do not match, a token is not in the vocabulary, the temperature is
            not positive, k or the weight is out of range, or both are given.

    Example:
        >>> coin = torch.tensor([[[0.7, 0.3]]]).log()
        >>> fair = torch.tensor([[[0.5, 0.5]]]).log()
        >>> stats = token_stats(coin, fair, torch.tensor([[0]]))
        >>> [round(field.item(), 4) for field in stats[:4]]
        [-0.3567, -0.6931, 0.0823, 0.6109]
    """
    if logits.shape != ref_logits.shape or logits.shape[:-1] != tokens.shape:
        shapes = [list(tensor.shape) for tensor in (logits, ref_logits, tokens)]
        raise ConfigurationError(
            f"logits, ref_logits, tokens must have shapes [B, T, V], [B, T, V], [B, T], got {shapes}"
        )
    check_positive(temperature=temperature)
    check_heads(topk, jsd_weight, logits.shape[-1])
    mask = inside_mask(tokens, None, logits.shape[-1])
    if mask is not None:
        rows = logits[mask], ref_logits[mask], tokens[mask]
        stats = token_stats(*rows, temperature, token_values, topk, jsd_weight)
        return stats.map(lambda field: positions_of(field, tokens, mask))
    with torch.autocast(logits.device.type, enabled=False):
        scaled = (full_precision(values) / temperature for values in (logits, ref_logits))
        policy, reference = (values.log_softmax(-1) for values in scaled)
        return _stats_of(policy, reference, tokens.long(), token_values, topk, jsd_weight)


def check_heads(topk: TopK | None, jsd_weight: float | None, vocabulary: int) -> None:
    """Check the sums over the vocabulary, or over a head of it, that are asked for.

    Raises:
        ConfigurationError: If k or the weight is out of range, or both are given.
    """
    if topk is not None:
        topk.check(vocabulary)
    if jsd_weight is not None:
        check_share(jsd_weight=jsd_weight)
        if topk is not None:
            problem = f"must be None with topk, got {jsd_weight}: it is over the whole vocabulary"
            raise ConfigurationError(problem, key="jsd_weight")


def _stats_of(
    policy: Tensor,
    reference: Tensor,
    tokens: Tensor,
    token_values: Tensor | None,
    topk: TopK | None,
    jsd_weight: float | None,
) -> TokenStats:
    """`token_stats` from the log-probabilities of both models, shape [..., V]."""
    probabilities = probabilities_of(policy)
    kl = kl_sum(policy, reference, probabilities)
    if not torch.compiler.is_compiling() and bool((kl == torch.inf).any()):
        outside = (probabilities > 0) & (reference == -torch.inf)
        warn_infinite_kl(int(outside.flatten(0, -2).any(0).nonzero()[0]))
    log_probabilities = torch.where(probabilities > 0, policy, 0)  # 0 log 0 is 0, not NaN
    index = tokens.unsqueeze(-1)
    values = full_token_values(token_values, policy.shape[-1], like=policy)
    return TokenStats(
        logprobs=policy.gather(-1, index).squeeze(-1),
        ref_logprobs=reference.gather(-1, index).squeeze(-1),
        kl=kl,
        entropy=-(probabilities * log_probabilities).sum(-1),
        value=None if values is None else values[tokens],
        expected_value=None if values is None else probabilities @ values,
        forward_kl=kl_sum(reference, policy, probabilities_of(reference)),
        jsd=None if jsd_weight is None else jsd_sum(policy, reference, jsd_weight),
        **({} if topk is None else _head_sums(policy, reference, tokens, topk)._asdict()),
    )


def served_stats(logprobs: Tensor, ref_logprobs: Tensor, tokens: Tensor) -> TokenStats:
    """Statistics from the sampled token and a head that is given, such as a remote teacher's.

    The head may depend on the prefix and not on the sampled token, or estimates from it are biased.

    Args:
        logprobs: log p of the sampled token, then of the k tokens of the head, shape [B, T, 1 + k].
            Differentiable.
        ref_logprobs: log q of the same tokens, shape [B, T, 1 + k].
        tokens: Their ids, shape [B, T, 1 + k].

    Returns:
        Log-probabilities and the sums over the head, shape [B, T]; no exact KL and no entropy.

    Example:
        >>> ids = torch.tensor([[[1, 0]]])
        >>> stats = served_stats(torch.tensor([[[0.3, 0.7]]]).log(), torch.tensor([[[0.5, 0.5]]]).log(), ids)
        >>> round(stats.head_kl.item(), 4), stats.in_head.item(), stats.kl
        (0.0355, 0.0, None)
    """
    logprobs = full_precision(logprobs)
    ref_logprobs = ref_logprobs.to(logprobs.dtype)
    sums = HeadSums.of(logprobs[..., 1:], ref_logprobs[..., 1:], tokens[..., 1:], tokens[..., 0])
    return TokenStats(logprobs[..., 0], ref_logprobs[..., 0], **sums._asdict())


def full_token_values(token_values: Tensor | None, vocabulary: int, like: Tensor) -> Tensor | None:
    """Token values of the whole vocabulary: a shorter table continues with zeros. Detached.

    Args:
        token_values: Shape [V] or shorter; None without token values.
        vocabulary: Size of the vocabulary, V.
        like: Has the type and device of the result.

    Raises:
        ConfigurationError: If the table is longer than the vocabulary, or has other dimensions.

    Example:
        >>> full_token_values(torch.tensor([0.5]), 3, like=torch.zeros(1))
        tensor([0.5000, 0.0000, 0.0000])
    """
    if token_values is None:
        return None
    if token_values.ndim != 1 or len(token_values) > vocabulary:
        problem = f"must have shape [{vocabulary}] or be shorter, got {list(token_values.shape)}"
        raise ConfigurationError(problem, key="token_values")
    values = token_values.detach().to(like)
    return torch.nn.functional.pad(values, (0, vocabulary - len(values)))


def warn_infinite_kl(token: int) -> None:
    """Warn that only the policy gives probability to `token`; shown once per token."""
    warnings.warn(
        f"KL(policy || reference) is +inf: the policy gives probability to token {token}, the reference none",
        stacklevel=2,
    )


def _head_sums(policy: Tensor, reference: Tensor, tokens: Tensor, topk: TopK) -> HeadSums:
    ranked = policy if topk.support == "policy" else reference
    head = ranked.detach().topk(topk.k, dim=-1).indices
    return HeadSums.of(policy.gather(-1, head), reference.gather(-1, head), head, tokens)

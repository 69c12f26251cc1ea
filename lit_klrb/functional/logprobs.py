"""Per-token statistics of a policy and its reference, from their logits."""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError

# Log ratios below this take another road to the same number: exp(-log_ratio) would overflow in float32.
_LARGE_RATIO = 60.0


class TokenStats(NamedTuple):
    """What an estimator may know of each completion token; padding included, whatever it holds.

    Args:
        logprobs: log p(y_t | x, y_<t), shape [B, T].
        ref_logprobs: log q(y_t | x, y_<t), shape [B, T].
        kl: KL(p(. | x, y_<t) || q(. | x, y_<t)) in nats, shape [B, T]; None where nobody needs it.
        entropy: Entropy of p(. | x, y_<t) in nats, shape [B, T]; None where nobody needs it.
        value: a(y_t), the token value of the sampled token, shape [B, T]; None without token values.
        expected_value: sum_v p(v | x, y_<t) a(v), shape [B, T]; None without token values.
    """

    logprobs: Tensor
    ref_logprobs: Tensor
    kl: Tensor | None = None
    entropy: Tensor | None = None
    value: Tensor | None = None
    expected_value: Tensor | None = None

    def detach(self) -> "TokenStats":
        """The same numbers without their graph."""
        return self.map(Tensor.detach)

    def masked(self, mask: Tensor) -> "TokenStats":
        """Zero outside the mask, whatever was there, in float32 or better; gradients stay inside the mask."""
        return self.map(lambda field: torch.where(mask, full_precision(field), 0))

    def map(self, change: Callable[[Tensor], Tensor]) -> "TokenStats":
        """The same change made to each field that is there: rows selected, a device, a type."""
        logprobs, ref_logprobs, *optional = self
        changed = (None if field is None else change(field) for field in optional)
        return TokenStats(change(logprobs), change(ref_logprobs), *changed)


def token_stats(
    logits: Tensor,
    ref_logits: Tensor,
    tokens: Tensor,
    temperature: float = 1.0,
    token_values: Tensor | None = None,
) -> TokenStats:
    """Log-probabilities, KL and entropy of every token, over the full vocabulary.

    Computed in float32, or in float64 for float64 logits. The KL is summed as p (r + exp(-r) - 1) with r the
    log ratio, whose terms add up to those of p r and are never negative: the rounding of the normalisers,
    which p r passes on whole, cancels. Tokens that both models exclude (-inf) contribute 0.

    Args:
        logits: Policy logits, shape [B, T, V]; position t is read before `tokens[:, t]`. Gradients flow here.
        ref_logits: Reference logits, shape [B, T, V]; gradients flow here too if they are asked for.
        tokens: Sampled token ids, shape [B, T].
        temperature: The sampling temperature, by which both models' logits are divided.
        token_values: A value a(v) of every token, in units of reward, shape [V]; a constant.

    Returns:
        All fields, shape [B, T], those of the token values only if these are given. Where the policy gives
        mass to a token that the reference excludes the KL is +inf: a warning names that token.

    Raises:
        ConfigurationError: If the shapes do not fit or the temperature is not positive.

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
            f"logits, ref_logits, tokens have shapes {shapes}; [B, T, V], [B, T, V], [B, T] expected"
        )
    check_token_values(token_values, logits.shape[-1])
    if not temperature > 0:
        raise ConfigurationError(f"temperature is {temperature}; a number > 0 expected")
    policy, reference = (_log_softmax(values, temperature) for values in (logits, ref_logits))
    probabilities = policy.exp()
    kl = _kl(policy, reference, probabilities)
    if not torch.compiler.is_compiling() and bool((kl == torch.inf).any()):
        outside = (probabilities > 0) & (reference == -torch.inf)
        warn_infinite_kl(int(outside.flatten(0, -2).any(0).nonzero()[0]))
    surprise = torch.where(probabilities > 0, policy, 0)
    index = tokens.unsqueeze(-1)
    values = None if token_values is None else token_values.detach().to(policy.dtype)
    return TokenStats(
        logprobs=policy.gather(-1, index).squeeze(-1),
        ref_logprobs=reference.gather(-1, index).squeeze(-1),
        kl=kl,
        entropy=-(probabilities * surprise).sum(-1),
        value=None if values is None else values[tokens],
        expected_value=None if values is None else probabilities @ values,
    )


def check_token_values(token_values: Tensor | None, vocabulary: int) -> None:
    """Refuse token values that are not one number per token.

    Raises:
        ConfigurationError: If their shape is not [V].
    """
    if token_values is not None and token_values.shape != (vocabulary,):
        raise ConfigurationError(
            f"must have shape [{vocabulary}], got {list(token_values.shape)}", key="token_values"
        )


def warn_infinite_kl(token: int) -> None:
    """Warn that the policy gives mass to `token` where the reference gives none (shown once per token)."""
    warnings.warn(
        f"KL(policy || reference) is +inf: the policy gives mass to token {token}, the reference none",
        stacklevel=2,
    )


def full_precision(values: Tensor) -> Tensor:
    """Half precision to float32; float32 and float64 as they are."""
    return values if values.dtype == torch.float64 else values.float()


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    return (full_precision(logits) / temperature).log_softmax(-1)


def _kl(policy: Tensor, reference: Tensor, probabilities: Tensor) -> Tensor:
    """Sum over the vocabulary of p (r + exp(-r) - 1), that is of p r + q - p: p alone carries gradients."""
    present = probabilities > 0
    log_ratio = torch.where(present, policy - reference, 0)
    excess = probabilities * torch.expm1((-log_ratio).clamp(max=_LARGE_RATIO))
    extreme = ~present | (log_ratio < -_LARGE_RATIO)
    excess = torch.where(extreme, reference.exp() - probabilities, excess)
    return (probabilities * log_ratio + excess).sum(-1)

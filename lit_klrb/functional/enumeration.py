"""Autoregressive models whose completions of bounded length are all enumerated, in float64: every estimator
is tested against them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError, check_at_least

# What `help` lists
__all__ = ["TabularLM", "exact_kl", "exact_kl_gradient", "exact_objective", "num_prefixes", "optimal_policy"]


@dataclass(frozen=True, eq=False)
class TabularLM:
    """A language model whose next-token logits are rows of a table.

    Prefixes are numbered like the nodes of a heap with V - 1 children, one per token other than EOS: the
    empty prefix is 0, and prefix i followed by the r-th such token (r = 1..V-1) is (V - 1) i + r. Prefix i
    uses row `i % contexts`:

    - `contexts = num_prefixes(V, max_length)`: every prefix has its own row (unshared parameters);
    - `contexts = (V - 1) ** k`: the row is a function of the last k tokens (a Markov model of order k);
    - otherwise: unrelated prefixes share a row.

    Args:
        logits: Next-token logits, shape [contexts, V]; converted to float64, differentiable.
        max_length: Completions end with EOS (included) or after this many tokens.
        eos_token_id: The token that ends a completion.

    Raises:
        ConfigurationError: If `logits` is not a table with at least two tokens, or an argument is out of
            range.

    Example:
        >>> model = TabularLM(torch.zeros(1, 2), max_length=2)
        >>> tokens, mask = model.sequences()
        >>> tokens.tolist()
        [[0, 0], [1, 0], [1, 1]]
        >>> model.logprobs(tokens, mask).exp().tolist()
        [0.5, 0.25, 0.25]
    """

    logits: Tensor
    max_length: int
    eos_token_id: int = 0

    def __post_init__(self) -> None:
        if self.logits.ndim != 2 or self.logits.shape[0] < 1 or self.logits.shape[1] < 2:
            problem = f"must have shape [contexts, V] with V >= 2, got {list(self.logits.shape)}"
            raise ConfigurationError(problem, key="logits")
        check_at_least(1, max_length=self.max_length)
        if not 0 <= self.eos_token_id < self.vocab_size:
            problem = f"must be in 0..{self.vocab_size - 1}, got {self.eos_token_id}"
            raise ConfigurationError(problem, key="eos_token_id")

    @property
    def vocab_size(self) -> int:
        """Number of tokens V, EOS included."""
        return self.logits.shape[1]

    def sequences(self) -> tuple[Tensor, Tensor]:
        """All completions.

        Returns:
            Tokens [N, T], padded with EOS, and the mask [N, T], true up to the first EOS (included).
        """
        vocabulary = torch.arange(self.vocab_size)
        unfinished = torch.empty(1, 0, dtype=torch.long)
        finished = []
        for length in range(1, self.max_length + 1):
            extended = unfinished.repeat_interleave(self.vocab_size, dim=0)
            extended = torch.cat([extended, vocabulary.repeat(len(unfinished))[:, None]], dim=1)
            is_end = (extended[:, -1] == self.eos_token_id) | (length == self.max_length)
            padding = torch.full((int(is_end.sum()), self.max_length - length), self.eos_token_id)
            finished.append(torch.cat([extended[is_end], padding], dim=1))
            unfinished = extended[~is_end]
        tokens = torch.cat(finished)
        ends = (tokens == self.eos_token_id).long()
        return tokens, ends.cumsum(-1) - ends == 0  # no EOS before the token

    def prefixes(self, tokens: Tensor) -> Tensor:
        """The number of the prefix before each token, shape [N, T]; undefined after EOS."""
        rank = torch.where(tokens < self.eos_token_id, tokens + 1, tokens)
        numbers = torch.zeros_like(tokens)
        for t in range(1, tokens.shape[1]):
            numbers[:, t] = numbers[:, t - 1] * (self.vocab_size - 1) + rank[:, t - 1]
        return numbers

    def token_logits(self, tokens: Tensor) -> Tensor:
        """Logits [N, T, V] from which each of `tokens` [N, T] is sampled; undefined after EOS."""
        return self.logits.double()[self.prefixes(tokens) % len(self.logits)]

    def logprobs(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Log-probability of each completion, shape [N], differentiable in `logits`."""
        chosen = self.token_logits(tokens).log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
        return torch.where(mask, chosen, 0).sum(-1)


def num_prefixes(vocab_size: int, max_length: int) -> int:
    """Number of prefixes of completions of at most `max_length` tokens: the rows of an unshared table.

    Example:
        >>> num_prefixes(vocab_size=3, max_length=3)
        7
    """
    return sum((vocab_size - 1) ** length for length in range(max_length))


def exact_kl(policy: TabularLM, reference: TabularLM) -> Tensor:
    """KL(policy || reference) in nats per sequence: the sum over all completions of p (log p - log q).

    Differentiable in both tables. +inf if the policy gives probability to a completion that the reference
    excludes.

    Raises:
        ConfigurationError: If the two models do not have the same completions.

    Example:
        >>> p, q = (TabularLM(torch.tensor([[a, 1 - a]]).log(), max_length=1) for a in (0.7, 0.5))
        >>> round(exact_kl(p, q).item(), 4)
        0.0823
    """
    return _expected_log_ratio(policy, reference)[1]


def exact_kl_gradient(policy: TabularLM, reference: TabularLM) -> Tensor:
    """Gradient of `exact_kl` with respect to the policy's logits, shape [contexts, V], float64."""
    leaf = policy.logits.detach().double().requires_grad_()
    kl = exact_kl(TabularLM(leaf, policy.max_length, policy.eos_token_id), reference)
    (gradient,) = torch.autograd.grad(kl, leaf)
    return gradient


def exact_objective(policy: TabularLM, reference: TabularLM, reward: Tensor, beta: float) -> Tensor:
    """E_policy[reward] - beta KL(policy || reference), differentiable in both tables.

    Args:
        policy: The policy p.
        reference: The reference q.
        reward: Reward of each completion, in the order of `sequences()`, shape [N].
        beta: Weight of the KL, in units of reward per nat.
    """
    probabilities, kl = _expected_log_ratio(policy, reference)
    return probabilities @ reward.double() - beta * kl


def optimal_policy(reference: TabularLM, reward: Tensor, beta: float) -> TabularLM:
    """The maximiser of E[reward] - beta KL(. || reference): p*(y) proportional to q(y) exp(reward(y) / beta).

    The table has one row per prefix, which holds for each token the log of the total weight of all
    completions that continue the prefix with it. The path from the reference (`beta = math.inf`) to the
    optimum at `beta` is `optimal_policy(reference, reward, beta / s)` for s from 0 to 1.

    Args:
        reference: The reference q.
        reward: Reward of each completion, in the order of `reference.sequences()`, shape [N].
        beta: Weight of the KL, positive; +inf gives the reference itself.

    Raises:
        ConfigurationError: If `beta` is not positive or `reward` does not have one entry per completion.
    """
    tokens, mask = reference.sequences()
    if not beta > 0:
        raise ConfigurationError(f"must be positive, got {beta}", key="beta")
    if reward.shape != tokens.shape[:1]:
        raise ConfigurationError(f"must have shape [{len(tokens)}], got {list(reward.shape)}", key="reward")
    log_weights = reference.logprobs(tokens, mask).detach() + reward.double() / beta
    size = num_prefixes(reference.vocab_size, reference.max_length) * reference.vocab_size
    # An arc is a prefix with its next token; its weight is a log-sum-exp over the completions through it,
    # with the largest term subtracted as usual
    arcs = (reference.prefixes(tokens) * reference.vocab_size + tokens)[mask]
    through = log_weights[:, None].expand(mask.shape)[mask]
    largest = torch.full((size,), -torch.inf, dtype=torch.float64).scatter_reduce(0, arcs, through, "amax")
    shift = largest.nan_to_num(neginf=0.0)
    totals = torch.zeros(size, dtype=torch.float64).index_add(0, arcs, (through - shift[arcs]).exp())
    logits = (totals.log() + shift).view(-1, reference.vocab_size)
    # A row of -inf would give NaN probabilities; prefixes that are never reached may have any
    unreachable = logits.isneginf().all(-1, keepdim=True)
    logits = torch.where(unreachable, 0, logits)
    return TabularLM(logits, reference.max_length, reference.eos_token_id)


def _expected_log_ratio(policy: TabularLM, reference: TabularLM) -> tuple[Tensor, Tensor]:
    policy_shape, reference_shape = (
        f"V = {model.vocab_size}, max_length = {model.max_length}, eos_token_id = {model.eos_token_id}"
        for model in (policy, reference)
    )
    if policy_shape != reference_shape:
        raise ConfigurationError(
            f"must have the reference's {reference_shape}, got {policy_shape}", key="policy"
        )
    tokens, mask = policy.sequences()
    logprobs = policy.logprobs(tokens, mask)
    log_ratio = logprobs - reference.logprobs(tokens, mask)
    # 0 log 0 is 0: without the where, both value and gradient of an excluded completion would be NaN
    log_ratio = torch.where(logprobs == -torch.inf, 0, log_ratio)
    probabilities = logprobs.exp()
    return probabilities, (probabilities * log_ratio).sum()

"""Autoregressive models over every completion of bounded length, listed one by one in float64."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError


@dataclass(frozen=True, eq=False)
class TabularLM:
    """A language model whose next-token logits are rows of a table.

    A prefix is numbered like a node of a heap with V - 1 children, one per token other than EOS: the empty
    prefix is 0, and prefix i followed by the r-th such token (r = 1..V-1) is (V - 1) i + r. Prefix i reads
    row `i % contexts`, which covers the cases that matter with one rule:

    - `contexts = num_prefixes(V, max_length)`: every prefix has its own row (unshared parameters);
    - `contexts = (V - 1) ** k`: the row is a function of the last k tokens (a Markov model of order k);
    - anything else: rows pooled over unrelated prefixes.

    Args:
        logits: Next-token logits, shape [contexts, V]; read in float64, gradients reach the tensor given.
        max_length: Completions end with EOS (included) or at this many tokens.
        eos_token_id: The token that ends a completion.

    Raises:
        ConfigurationError: If `logits` is no table over two tokens or more, or an argument is out of range.

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
            raise ConfigurationError(
                f"logits has shape {list(self.logits.shape)}; [contexts, V] with V >= 2 expected"
            )
        if self.max_length < 1:
            raise ConfigurationError(f"max_length is {self.max_length}; at least 1 expected")
        if not 0 <= self.eos_token_id < self.vocab_size:
            raise ConfigurationError(
                f"eos_token_id is {self.eos_token_id}; 0..{self.vocab_size - 1} expected"
            )

    @property
    def vocab_size(self) -> int:
        """Number of tokens V, EOS included."""
        return self.logits.shape[1]

    def sequences(self) -> tuple[Tensor, Tensor]:
        """All completions, each once.

        Returns:
            Tokens [N, T], padded with EOS after the end, and the mask [N, T], true up to EOS (included).
        """
        vocabulary = torch.arange(self.vocab_size)
        growing = torch.empty(1, 0, dtype=torch.long)
        ended = []
        for length in range(1, self.max_length + 1):
            longer = growing.repeat_interleave(self.vocab_size, dim=0)
            longer = torch.cat([longer, vocabulary.repeat(len(growing))[:, None]], dim=1)
            is_end = (longer[:, -1] == self.eos_token_id) | (length == self.max_length)
            padding = torch.full((int(is_end.sum()), self.max_length - length), self.eos_token_id)
            ended.append(torch.cat([longer[is_end], padding], dim=1))
            growing = longer[~is_end]
        tokens = torch.cat(ended)
        return tokens, _completion_mask(tokens, self.eos_token_id)

    def prefixes(self, tokens: Tensor) -> Tensor:
        """The number of the prefix before each token, shape [N, T]; meaningless after EOS."""
        rank = torch.where(tokens < self.eos_token_id, tokens + 1, tokens)
        numbers = torch.zeros_like(tokens)
        for t in range(1, tokens.shape[1]):
            numbers[:, t] = numbers[:, t - 1] * (self.vocab_size - 1) + rank[:, t - 1]
        return numbers

    def token_logits(self, tokens: Tensor) -> Tensor:
        """Logits [N, T, V] from which each of `tokens` [N, T] was drawn; meaningless after EOS."""
        return self.logits.double()[self.prefixes(tokens) % len(self.logits)]

    def logprobs(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Log-probability of whole completions, shape [N], differentiable in `logits`."""
        chosen = self.token_logits(tokens).log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
        return torch.where(mask, chosen, 0).sum(-1)


def num_prefixes(vocab_size: int, max_length: int) -> int:
    """How many prefixes a completion of at most `max_length` tokens can have: the rows of an unshared table.

    Example:
        >>> num_prefixes(vocab_size=3, max_length=3)
        7
    """
    return sum((vocab_size - 1) ** length for length in range(max_length))


def exact_kl(policy: TabularLM, reference: TabularLM) -> Tensor:
    """KL(policy || reference) in nats per sequence: the sum over all completions of p (log p - log q).

    Differentiable in both tables. +inf where the policy gives mass to a completion the reference excludes.

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
        policy: The model that generates.
        reference: The model it is kept close to.
        reward: Reward of each completion, in the order of `sequences()`, shape [N].
        beta: Weight of the KL, in units of reward per nat.
    """
    probabilities, kl = _expected_log_ratio(policy, reference)
    return probabilities @ reward.double() - beta * kl


def optimal_policy(reference: TabularLM, reward: Tensor, beta: float) -> TabularLM:
    """The maximiser of E[reward] - beta KL(. || reference): p*(y) proportional to q(y) exp(reward(y) / beta).

    Returned with a row per prefix; a row holds the log of the total weight of the completions that go through
    each token, summed from the ends backward. The path from the reference (`beta = math.inf`) to the optimum
    at `beta` is `optimal_policy(reference, reward, beta / s)` for s from 0 to 1.

    Args:
        reference: The model q.
        reward: Reward of each completion, in the order of `reference.sequences()`, shape [N].
        beta: Weight of the KL, > 0; +inf gives the reference itself.

    Raises:
        ConfigurationError: If `beta` is not positive or `reward` does not have one entry per completion.
    """
    tokens, mask = reference.sequences()
    if not beta > 0:
        raise ConfigurationError(f"beta is {beta}; a number > 0 expected")
    if reward.shape != tokens.shape[:1]:
        raise ConfigurationError(f"reward has shape {list(reward.shape)}; [{len(tokens)}] expected")
    log_weights = reference.logprobs(tokens, mask).detach() + reward.double() / beta
    size = num_prefixes(reference.vocab_size, reference.max_length) * reference.vocab_size
    arcs = (reference.prefixes(tokens) * reference.vocab_size + tokens)[mask]
    through = log_weights[:, None].expand(mask.shape)[mask]
    largest = torch.full((size,), -torch.inf, dtype=torch.float64).scatter_reduce(0, arcs, through, "amax")
    shift = largest.nan_to_num(neginf=0.0)
    totals = torch.zeros(size, dtype=torch.float64).index_add(0, arcs, (through - shift[arcs]).exp())
    logits = (totals.log() + shift).view(-1, reference.vocab_size)
    unreachable = logits.isneginf().all(-1, keepdim=True)
    logits = torch.where(unreachable, 0, logits)
    return TabularLM(logits, reference.max_length, reference.eos_token_id)


def _completion_mask(tokens: Tensor, eos_token_id: int) -> Tensor:
    ends = (tokens == eos_token_id).long()
    return ends.cumsum(-1) - ends == 0


def _expected_log_ratio(policy: TabularLM, reference: TabularLM) -> tuple[Tensor, Tensor]:
    ours, theirs = (
        f"V = {model.vocab_size}, max_length = {model.max_length}, eos_token_id = {model.eos_token_id}"
        for model in (policy, reference)
    )
    if ours != theirs:
        raise ConfigurationError(f"policy has {ours}; as the reference expected: {theirs}")
    tokens, mask = policy.sequences()
    logprobs = policy.logprobs(tokens, mask)
    log_ratio = logprobs - reference.logprobs(tokens, mask)
    # A completion the policy excludes contributes 0, and must not send -inf through the product rule.
    log_ratio = torch.where(logprobs == -torch.inf, 0, log_ratio)
    probabilities = logprobs.exp()
    return probabilities, (probabilities * log_ratio).sum()

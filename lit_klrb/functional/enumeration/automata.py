"""Probabilistic finite-state automata: the exact KL over strings of unbounded length, by a linear solve."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError


@dataclass(frozen=True, eq=False)
class ProbabilisticAutomaton:
    """A deterministic probabilistic finite-state automaton: a language model with finitely many states.

    From state s it produces token v with probability softmax(logits[s])[v] and moves to `transitions[s, v]`;
    EOS ends the string. A missing arc has logit -inf. The length of strings is not bounded.

    Args:
        logits: Shape [states, V]; converted to float64, differentiable.
        transitions: Next states, int64, shape [states, V]; entries for EOS and missing arcs are ignored.
        eos_token_id: The token that ends a string.
        start: The initial state.

    Raises:
        ConfigurationError: If the shapes differ or an arc leads to a state that does not exist.
    """

    logits: Tensor
    transitions: Tensor
    eos_token_id: int = 0
    start: int = 0

    def __post_init__(self) -> None:
        if self.logits.ndim != 2 or self.logits.shape != self.transitions.shape:
            raise ConfigurationError(
                f"must have the shape [states, V] of logits, {list(self.logits.shape)}, "
                f"got {list(self.transitions.shape)}",
                key="transitions",
            )
        states, vocab_size = self.logits.shape
        if not (0 <= self.start < states and 0 <= self.eos_token_id < vocab_size):
            raise ConfigurationError(
                f"start must be in 0..{states - 1} and eos_token_id in 0..{vocab_size - 1}, "
                f"got {self.start} and {self.eos_token_id}"
            )
        used = ~self.logits.isneginf()
        used[:, self.eos_token_id] = False
        bad = used & ((self.transitions < 0) | (self.transitions >= states))
        if bad.any():
            state, token = bad.nonzero()[0].tolist()
            raise ConfigurationError(
                f"must be in 0..{states - 1}, got {int(self.transitions[state, token])}",
                key=f"transitions[{state}, {token}]",
            )


def automata_kl(policy: ProbabilisticAutomaton, reference: ProbabilisticAutomaton) -> Tensor:
    """KL(policy || reference) in nats over all strings; differentiable in both tables of logits.

    Reading the same string, the two automata visit a sequence of pairs of states (s, s'). With P the policy's
    transition matrix between pairs, the expected numbers of visits n solve n = e_start + P^T n, and

        KL = sum over pairs of n(s, s') sum_v p(v | s) (log p(v | s) - log q(v | s')).

    Args:
        policy: The automaton p; it must terminate with probability one.
        reference: The automaton q; it may give probability to infinite strings.

    Returns:
        A float64 scalar.

    Raises:
        ConfigurationError: If the vocabularies differ, if the policy does not terminate with probability one,
            or if the reference lacks an arc that the policy uses (the KL is then +inf).

    Example:
        A coin tossed until it shows EOS: one state each, a KL of 0.0823 nats per toss and 1 / 0.3 tosses on
        average.

        >>> loop = torch.zeros(1, 2, dtype=torch.long)
        >>> p, q = (ProbabilisticAutomaton(torch.tensor([[1 - a, a]]).log(), loop) for a in (0.7, 0.5))
        >>> round(automata_kl(p, q).item() * 0.3, 4)
        0.0823

    Reference: the tractable special case of Amini, Vieira and Cotterell (2025), arXiv:2504.10637.
    """
    pairs, moves = _walk_pairs(policy, reference)
    policy_states, reference_states = torch.tensor(pairs).T
    logprobs = policy.logits.double().log_softmax(-1)[policy_states]
    ref_logprobs = reference.logits.double().log_softmax(-1)[reference_states]
    probabilities = logprobs.exp()
    # 0 log 0 is 0: without the where, both value and gradient of an excluded token would be 0 * inf = NaN
    log_ratio = torch.where(logprobs.isneginf(), 0, logprobs - ref_logprobs)

    source, token, target = torch.tensor(moves, dtype=torch.long).view(-1, 3).T
    size = len(pairs)
    step = torch.zeros(size * size, dtype=torch.float64)
    step = step.index_add(0, source * size + target, probabilities[source, token]).view(size, size)
    # The series behind the solve, sum_k P^k, converges only for a spectral radius below 1
    radius = torch.linalg.eigvals(step.detach()).abs().max().item()
    if radius >= 1 - 1e-12:
        raise ConfigurationError(
            "must terminate with probability one, with a path to EOS from every state it reaches, "
            f"got spectral radius {radius:.6g}",
            key="policy",
        )
    start = torch.zeros(size, dtype=torch.float64)
    start[0] = 1
    visits: Tensor = torch.linalg.solve(torch.eye(size, dtype=torch.float64) - step.T, start)
    return visits @ (probabilities * log_ratio).sum(-1)


def _walk_pairs(
    policy: ProbabilisticAutomaton, reference: ProbabilisticAutomaton
) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]]]:
    """Pairs of states reachable by the policy's strings, and its moves (pair, token, pair) between them."""
    vocab = policy.logits.shape[1], policy.eos_token_id
    if vocab != (reference.logits.shape[1], reference.eos_token_id):
        raise ConfigurationError(
            f"must have the reference's V = {reference.logits.shape[1]} and eos_token_id = "
            f"{reference.eos_token_id}, got V = {vocab[0]} and eos_token_id = {vocab[1]}",
            key="policy",
        )
    uses, allows = (~automaton.logits.isneginf() for automaton in (policy, reference))
    numbers = {(policy.start, reference.start): 0}
    pairs = list(numbers)
    moves = []
    # Breadth-first search: pairs found in the body are appended to the list and visited in turn
    for source, (state, ref_state) in enumerate(pairs):
        for token in uses[state].nonzero().flatten().tolist():
            if not allows[ref_state, token]:
                raise ConfigurationError(
                    f"must have an arc for token {token} in state {ref_state}, as the policy produces it in "
                    f"state {state}: the KL is +inf",
                    key="reference",
                )
            if token == policy.eos_token_id:
                continue
            following = (
                int(policy.transitions[state, token]),
                int(reference.transitions[ref_state, token]),
            )
            if following not in numbers:
                numbers[following] = len(pairs)
                pairs.append(following)
            moves.append((source, token, numbers[following]))
    return pairs, moves

"""Probabilistic finite-state automata: the exact KL over all strings, of any length, by one linear solve."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError


@dataclass(frozen=True, eq=False)
class ProbabilisticAutomaton:
    """A deterministic probabilistic finite-state automaton: a language model with finitely many states.

    From state s it produces token v with probability softmax(logits[s])[v] and moves to `transitions[s, v]`;
    EOS ends the string. An arc that does not exist has logit -inf. Strings have no maximal length.

    Args:
        logits: Shape [states, V]; read in float64, gradients reach the tensor given.
        transitions: Next states, int64 [states, V]; entries of EOS and of missing arcs are not read.
        eos_token_id: The token that ends a string.
        start: The state of the empty string.

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
                f"transitions has shape {list(self.transitions.shape)}; [states, V] as logits expected, "
                f"which has {list(self.logits.shape)}"
            )
        states, vocab_size = self.logits.shape
        if not (0 <= self.start < states and 0 <= self.eos_token_id < vocab_size):
            raise ConfigurationError(
                f"start is {self.start} and eos_token_id {self.eos_token_id}; "
                f"0..{states - 1} and 0..{vocab_size - 1} expected"
            )
        used = ~self.logits.isneginf()
        used[:, self.eos_token_id] = False
        bad = used & ((self.transitions < 0) | (self.transitions >= states))
        if bad.any():
            state, token = bad.nonzero()[0].tolist()
            raise ConfigurationError(
                f"transitions[{state}, {token}] is {int(self.transitions[state, token])}; "
                f"0..{states - 1} expected"
            )


def automata_kl(policy: ProbabilisticAutomaton, reference: ProbabilisticAutomaton) -> Tensor:
    """KL(policy || reference) in nats, summed over all strings; differentiable in both tables of logits.

    Both machines read the same string, so together they walk over pairs of states (s, s'). With P the matrix
    of the policy's moves between pairs, the expected visits solve n = e_start + P^T n, and

        KL = sum over pairs of n(s, s') sum_v p(v | s) (log p(v | s) - log q(v | s')).

    Args:
        policy: The machine p that generates; it must end with probability one.
        reference: The machine q. It may lose mass to strings that never end.

    Returns:
        A float64 scalar.

    Raises:
        ConfigurationError: If the vocabularies differ, if the policy does not end with probability one, or
            if the reference lacks an arc that the policy uses (the KL is then +inf).

    Example:
        A coin that is thrown until it shows EOS; both have one state, the KL of one throw is 0.0823 nats and
        there are 1 / 0.3 throws on average.

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
    # A token the policy excludes contributes 0, and must not send -inf through the product rule.
    log_ratio = torch.where(logprobs.isneginf(), 0, logprobs - ref_logprobs)

    source, token, target = torch.tensor(moves, dtype=torch.long).view(-1, 3).T
    size = len(pairs)
    step = torch.zeros(size * size, dtype=torch.float64)
    step = step.index_add(0, source * size + target, probabilities[source, token]).view(size, size)
    radius = torch.linalg.eigvals(step.detach()).abs().max().item()
    if radius >= 1 - 1e-12:
        raise ConfigurationError(
            f"policy does not end with probability one (spectral radius {radius:.6g}); "
            "a path to EOS from every state it reaches expected"
        )
    begin = torch.zeros(size, dtype=torch.float64)
    begin[0] = 1
    visits: Tensor = torch.linalg.solve(torch.eye(size, dtype=torch.float64) - step.T, begin)
    return visits @ (probabilities * log_ratio).sum(-1)


def _walk_pairs(
    policy: ProbabilisticAutomaton, reference: ProbabilisticAutomaton
) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]]]:
    """Pairs of states the policy's strings reach, and its moves (pair, token, pair) between them."""
    vocab = policy.logits.shape[1], policy.eos_token_id
    if vocab != (reference.logits.shape[1], reference.eos_token_id):
        raise ConfigurationError(
            f"policy has V = {vocab[0]} and eos_token_id = {vocab[1]}; as the reference expected: "
            f"{reference.logits.shape[1]} and {reference.eos_token_id}"
        )
    uses, allows = (~machine.logits.isneginf() for machine in (policy, reference))
    numbers = {(policy.start, reference.start): 0}
    pairs = list(numbers)
    moves = []
    for source, (state, ref_state) in enumerate(pairs):  # grows while it is walked
        for token in uses[state].nonzero().flatten().tolist():
            if not allows[ref_state, token]:
                raise ConfigurationError(
                    f"reference excludes token {token} in state {ref_state}, which the policy produces in "
                    f"state {state}: the KL is +inf; a reference with that arc expected"
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

import math

import pytest
import torch

from lit_klrb.errors import ConfigurationError
from lit_klrb.functional.enumeration import (
    ProbabilisticAutomaton,
    TabularLM,
    automata_kl,
    exact_kl,
    num_prefixes,
)


def random_automaton(states, vocab_size, seed, eos=0, end=1.5):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(states, vocab_size, dtype=torch.float64, generator=generator)
    logits[:, eos] += end
    transitions = torch.randint(states, (states, vocab_size), generator=generator)
    return ProbabilisticAutomaton(logits, transitions, eos, start=states - 1)


def truncated_kl(policy, reference, depth):
    """Sum over every string of at most `depth` tokens, and the policy's mass on longer ones."""
    p, q = (m.logits.log_softmax(-1).tolist() for m in (policy, reference))
    alive = [(policy.start, reference.start, 0.0, 0.0)]
    total = 0.0
    for _ in range(depth):
        longer = []
        for s, t, logp, logq in alive:
            for v in range(len(p[0])):
                lp, lq = logp + p[s][v], logq + q[t][v]
                if v == policy.eos_token_id:
                    total += math.exp(lp) * (lp - lq) if lp > -math.inf else 0.0
                elif lp > -math.inf:
                    longer.append((int(policy.transitions[s, v]), int(reference.transitions[t, v]), lp, lq))
        alive = longer
    return total, sum(math.exp(lp) for _, _, lp, _ in alive)


@pytest.mark.parametrize(("p_states", "q_states", "eos"), [(1, 1, 0), (3, 2, 0), (2, 4, 2)])
def test_kl_over_all_strings_is_the_limit_of_truncated_enumeration(p_states, q_states, eos):
    policy, reference = random_automaton(p_states, 3, 0, eos, 5.0), random_automaton(q_states, 3, 1, eos)
    total, rest = truncated_kl(policy, reference, 15)
    assert rest < 1e-7
    assert automata_kl(policy, reference).item() == pytest.approx(total, abs=1e-5)


def test_missing_arcs_of_the_policy_cost_nothing():
    policy, reference = random_automaton(3, 3, 2, end=2.5), random_automaton(3, 3, 3)
    policy.logits[1, 2] = -math.inf
    policy.transitions[1, 2] = -1
    total, _ = truncated_kl(policy, reference, 15)
    leaf = policy.logits.requires_grad_()
    kl = automata_kl(policy, reference)
    assert kl.item() == pytest.approx(total, abs=1e-5)
    kl.backward()
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()
    assert leaf.grad[1, 2] == 0


def test_gradient_is_that_of_the_sum_in_both_machines():
    policy, reference = random_automaton(3, 4, 4), random_automaton(2, 4, 5)
    tables = (policy.logits.requires_grad_(), reference.logits.requires_grad_())

    def kl(p_table, q_table):
        return automata_kl(
            ProbabilisticAutomaton(p_table, policy.transitions, start=2),
            ProbabilisticAutomaton(q_table, reference.transitions, start=1),
        )

    assert torch.autograd.gradcheck(kl, tables)


def test_a_monte_carlo_mean_agrees():
    policy, reference = random_automaton(4, 3, 6), random_automaton(3, 3, 7)
    p, q = (m.logits.log_softmax(-1) for m in (policy, reference))
    generator = torch.Generator().manual_seed(8)
    count = 20_000
    state, ref_state = torch.full((count,), policy.start), torch.full((count,), reference.start)
    log_ratio, alive = torch.zeros(count, dtype=torch.float64), torch.ones(count, dtype=torch.bool)
    while alive.any():
        token = torch.multinomial(p[state].exp(), 1, generator=generator).squeeze(1)
        log_ratio += torch.where(alive, p[state, token] - q[ref_state, token], 0)
        state, ref_state = policy.transitions[state, token], reference.transitions[ref_state, token]
        alive &= token != policy.eos_token_id
    standard_error = log_ratio.std() / count**0.5
    assert abs(log_ratio.mean() - automata_kl(policy, reference)) < 4 * standard_error


def test_a_tree_that_ends_is_a_tabular_model():
    nodes, last = num_prefixes(3, 3), num_prefixes(3, 2)
    prefix, token = torch.arange(nodes)[:, None], torch.arange(3)
    machines, models = [], []
    for seed in (9, 10):
        logits = torch.randn(nodes, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        logits[last:, 1:] = -math.inf
        machines.append(ProbabilisticAutomaton(logits, 2 * prefix + token))
        models.append(TabularLM(logits, max_length=3))
    assert automata_kl(*machines).item() == pytest.approx(exact_kl(*models).item(), abs=1e-12)


def test_a_chain_that_need_not_end_is_refused():
    endless = ProbabilisticAutomaton(
        torch.tensor([[0.0, 0.0], [-math.inf, 0.0]]), torch.tensor([[0, 1], [0, 1]])
    )
    halting = random_automaton(2, 2, 11)
    with pytest.raises(ConfigurationError, match=r"spectral radius 1$"):
        automata_kl(endless, halting)
    assert (
        automata_kl(
            halting, ProbabilisticAutomaton(endless.logits + 0.0, torch.zeros_like(endless.transitions))
        )
        > 0
    )


def test_an_arc_the_reference_lacks_is_named():
    policy, reference = random_automaton(2, 3, 12), random_automaton(1, 3, 13)
    reference.logits[0, 2] = -math.inf
    with pytest.raises(ConfigurationError, match=r"arc for token 2 in state 0.*state 1: the KL is \+inf"):
        automata_kl(policy, reference)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(2, 3), torch.zeros(2, 2, dtype=torch.long)), r"transitions: must have .* got \[2, 2\]"),
        (
            (torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.long)),
            r"transitions\[0, 1\]: must be in 0..0, got 1",
        ),
        ((torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.long), 2), "eos_token_id in 0..1, got 0 and 2"),
        (
            (torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.long), 0, 1),
            "start must be in 0..0 .* got 1 and 0",
        ),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        ProbabilisticAutomaton(*arguments)


def test_machines_over_different_vocabularies_are_refused():
    with pytest.raises(ConfigurationError, match="V = 3"):
        automata_kl(random_automaton(1, 3, 14), random_automaton(1, 2, 15))

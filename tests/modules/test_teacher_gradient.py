"""The gradient of the KL to a teacher that reads another prompt than the policy, by enumeration."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lit_klrb.data.batches import pad
from lit_klrb.estimators import LossWeights, MonteCarlo, RaoBlackwell, RaoBlackwellLoss, RaoBlackwellTopK
from lit_klrb.models.adapters import add_adapter
from lit_klrb.models.rollout import Rollout
from lit_klrb.modules import DistillModule
from lit_klrb.rollouts.pair import Loaded, Pair
from lit_klrb.rollouts.step import policy_loss

END, VOCABULARY, LENGTH = 0, 3, 2
# All completions of at most two tokens.
COMPLETIONS = [[END, END], *([first, last] for first in (1, 2) for last in range(VOCABULARY))]
PAIRS = list(itertools.product(range(len(COMPLETIONS)), repeat=2))
PROMPTS, TEACHERS = [[1], [2, 1, 2]], [[2, 2, 1, 1], [1, 2]]
# LayerNorm computes in float64; the RMSNorm of Llama casts to float32.
KINDS = {
    "gpt2": {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16},
    "gpt_neox": {
        **{"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"rotary_pct": 0.5, "max_position_embeddings": 16},
    },
}


def tiny(kind, seed):
    ids = {"vocab_size": VOCABULARY, "bos_token_id": END, "eos_token_id": END, "pad_token_id": END}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **ids, **KINDS[kind])).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def completion_mask(completion):
    return [True, completion[0] != END]


def sequence_logprobs(model, prompt):
    """Next-token log-probabilities before each token of each completion, one sequence at a time."""
    rows = [
        model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        for completion in COMPLETIONS
    ]
    return torch.stack(rows)


def exact_kl(policy, teacher, prompts=PROMPTS, others=TEACHERS):
    """KL(p(. | prompt) ‖ q(. | teacher's prompt)), mean over the prompts; q without a gradient."""
    chosen = torch.tensor(COMPLETIONS)[..., None]
    mask = torch.tensor([completion_mask(completion) for completion in COMPLETIONS])
    total = 0.0
    for prompt, other in zip(prompts, others, strict=True):
        p, q = sequence_logprobs(policy, prompt), sequence_logprobs(teacher, other).detach()
        logp, logq = ((x.gather(-1, chosen)[..., 0] * mask).sum(1) for x in (p, q))
        total = total + (logp.exp() * (logp - logq)).sum()
    return total / len(PROMPTS)


def own_token_surrogate(policy, teacher):
    """What own-token credit differentiates: each KL_t at its prefix, the prefix's probability fixed."""
    mask = torch.tensor([completion_mask(completion) for completion in COMPLETIONS])
    chosen, total = torch.tensor(COMPLETIONS)[..., None], 0.0
    for prompt, other in zip(PROMPTS, TEACHERS, strict=True):
        p, q = sequence_logprobs(policy, prompt), sequence_logprobs(teacher, other).detach()
        weight = (p.gather(-1, chosen)[..., 0] * mask).sum(1).exp().detach()
        total = total + (weight[:, None] * mask * (p.exp() * (p - q)).sum(-1)).sum()
    return total / len(PROMPTS)


def every_batch():
    """Batches of both prompts with every pair of completions, as one rollout, and its prompts."""
    left = {name: pad(rows, END, side="left") for name, rows in (("own", PROMPTS), ("teacher", TEACHERS))}
    batch = {**left["own"], **{f"teacher_{name}": value for name, value in left["teacher"].items()}}
    rows = torch.tensor([COMPLETIONS[index] for pair in PAIRS for index in pair]).repeat(len(PROMPTS), 1)
    mask = torch.tensor([completion_mask(row) for row in rows.tolist()])
    tokens, attention = (
        batch[name].repeat_interleave(2 * len(PAIRS), 0) for name in ("tokens", "attention_mask")
    )
    return Rollout(torch.cat([tokens, rows], 1), torch.cat([attention, mask], 1), mask), batch


def pair_of(policy, teacher=None, reference_path="teacher", served=None):
    """Policy and teacher, whose ids have no texts."""
    no_words = SimpleNamespace(get_vocab=dict)
    second = None if teacher is None else Loaded("reference_path", "teacher", teacher, no_words)
    first = Loaded("policy_path", "student", policy, no_words)
    return Pair(first, second, itself=reference_path == "policy", teacher=served)


def flat_gradient(loss, parameters):
    gradients = torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
    return torch.nn.utils.parameters_to_vector(gradients)


def expected_gradients(estimator, module, tiled, reward=lambda tokens: 0.0, beta=1.0):
    """The gradient over all batches of both prompts, by both ways of computing it, and what it is made of.

    Returns:
        The two gradients, the statistics of all batches, and the probability of each batch, [rows, 1].
    """
    if not tiled:
        module.pair.scorer._parts = (None, None)
    rollout, batch = every_batch()
    states, stats = module.pair.score(rollout, batch, topk=estimator.topk)
    with torch.no_grad():
        logprobs = (stats.logprobs * rollout.mask).sum(1).view(-1, 2).sum(1)
        probability = logprobs.exp().repeat_interleave(2)[:, None]  # of each batch of two completions
    assert probability[::2].sum().item() == pytest.approx(len(PROMPTS), abs=1e-10)
    rewards = torch.tensor([reward(row) for row in rollout.completions.tolist()], dtype=torch.float64)
    weights = estimator.weights(stats.detach(), rollout.mask, rewards, beta=beta, group_size=2)
    weighted = LossWeights(*weights).map(lambda rows: rows * probability)
    own = stats.logprobs.detach()
    losses = [
        policy_loss(
            module.pair.scorer, estimator, rollout, states, weighted, beta=beta, behaviour_logprobs=own
        )[0],
        estimator.loss(stats, rollout.mask, weighted, beta=beta),
    ]
    parameters = [parameter for parameter in module.policy.parameters() if parameter.requires_grad]
    # Means over all rows, which count as sums over batches
    gradients = [flat_gradient(loss * len(PAIRS), parameters) for loss in losses]
    return gradients, stats, probability


@pytest.mark.parametrize(("kind", "tiled"), [("gpt2", True), ("gpt_neox", True), ("gpt2", False)])
@pytest.mark.parametrize("reference_path", ["teacher", "policy", None])
@pytest.mark.parametrize(
    ("estimator", "objective"),
    [
        (RaoBlackwell(), exact_kl),
        (MonteCarlo(), exact_kl),
        (RaoBlackwellTopK(k=1), exact_kl),
        (RaoBlackwellLoss(allow_biased=True), own_token_surrogate),
    ],
)
def test_the_gradient_of_all_batches_is_that_of_the_exact_kl(
    kind, tiled, reference_path, estimator, objective
):
    policy = tiny(kind, seed=0)
    module = DistillModule(policy_path="student", reference_path=reference_path)
    teacher = {"teacher": tiny(kind, seed=1), "policy": policy, None: tiny(kind, seed=0)}[reference_path]
    if reference_path is None:  # the policy without its adapter
        policy = add_adapter(policy, {"r": 2}, seed=2).double()
        with torch.no_grad():
            for parameter in policy.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.3)
    module.policy = policy
    module.pair = pair_of(policy, teacher if reference_path == "teacher" else None, reference_path)
    assert module.pair.scorer.tiled
    gradients, stats, probability = expected_gradients(estimator, module, tiled)
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    expected = flat_gradient(objective(policy, teacher), parameters)
    assert expected.abs().max() > 1e-2
    for gradient in gradients:
        assert (gradient - expected).abs().max().item() < 1e-10
    rollout, _ = every_batch()
    value = (probability[:, 0] * stats.kl.double().masked_fill(~rollout.mask, 0).sum(1)).sum() / 2
    if estimator.topk is None:
        assert value.item() / len(PROMPTS) == pytest.approx(exact_kl(policy, teacher).item(), abs=1e-10)

"""Losses on Tinker against exact gradients: with stand-ins, and with the client's own code where it is."""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import MonteCarloRewardToGo, RaoBlackwell, RaoBlackwellTopK
from lit_klrb.functional.enumeration import TabularLM, exact_kl, exact_kl_gradient, num_prefixes
from lit_klrb.integrations import tinker as adapter

PROMPT = [7, 8, 9]
V, LENGTH, GROUP = 4, 2, 2


class StandIn(NamedTuple):
    """Of Tinker's types: a datum with tensors that `to_torch` gives."""

    model_input: object
    loss_fn_inputs: dict


class TensorData(NamedTuple):
    tensor: torch.Tensor

    @classmethod
    def from_torch(cls, tensor):
        return cls(tensor)

    def to_torch(self):
        return self.tensor


STAND_INS = SimpleNamespace(
    Datum=StandIn, TensorData=TensorData, ModelInput=SimpleNamespace(from_ints=lambda tokens: tokens)
)


@pytest.fixture(params=["stand-ins", *(["client"] if find_spec("tinker") else [])])
def client(request, monkeypatch):
    """Tinker's module: its types, and the client's computation with them."""
    if request.param == "client":
        return import_module("tinker")
    monkeypatch.setitem(sys.modules, "tinker", STAND_INS)
    return STAND_INS


def tables():
    generator = torch.Generator().manual_seed(0)
    shape = 3, num_prefixes(V, LENGTH), V
    student, teacher, step = torch.randn(shape, generator=generator, dtype=torch.float64)
    return student, TabularLM(teacher, LENGTH), TabularLM(student + step / 2, LENGTH)


def answers_of(teacher, tokens, mask, k):
    """What the teacher's sampler says of each completion after the prompt, in Tinker's arrays."""
    logprobs = teacher.token_logits(tokens).log_softmax(-1)
    sampled = logprobs.gather(-1, tokens[..., None])[..., 0]
    heads = logprobs.topk(k)
    for row, length in enumerate(mask.sum(1)):
        of_prompt = torch.zeros(len(PROMPT))
        ids = torch.cat([torch.zeros(len(PROMPT), k, dtype=torch.long), heads.indices[row, :length]])
        values = torch.cat([torch.zeros(len(PROMPT), k), heads.values[row, :length].float()])
        yield SimpleNamespace(
            prompt_logprobs_np=torch.cat([of_prompt, sampled[row, :length].float()]).numpy(),
            topk_prompt_logprobs_np=SimpleNamespace(token_ids=ids.int().numpy(), logprobs=values.numpy()),
        )


def samples_of(sampler, tokens, mask):
    logprobs = sampler.token_logits(tokens).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    for row, length in enumerate(mask.sum(1)):
        yield SimpleNamespace(
            tokens=tokens[row, :length].tolist(), logprobs=logprobs[row, :length].float().tolist()
        )


def gradient(client, loss, data, logprobs):
    """With respect to the log-probabilities of each datum, as `forward_backward_custom` computes it."""
    if client is STAND_INS:
        leaves = [values.float().detach().requires_grad_() for values in logprobs]
        if loss is adapter.traced_loss:
            total = sum(loss(leaf, *of_datum(datum))[0] for leaf, datum in zip(leaves, data, strict=True))
        else:
            total, _ = loss(data, leaves)
        return torch.autograd.grad(total, leaves)
    from tinker.lib.public_interfaces import custom_loss
    from tinker.lib.public_interfaces.training_client import TrainingClient

    if loss is adapter.traced_loss:
        loss = custom_loss.trace_loss(loss, adapter.TRACED_RANKS, "session")
        custom_loss.encode_graph(loss)  # what is sent
        custom_loss.check_loss_inputs(loss, data)
    outputs = [{"logprobs": client.TensorData.from_torch(v.float().detach())} for v in logprobs]
    result = TrainingClient._compute_custom_loss(data, loss, SimpleNamespace(loss_fn_outputs=outputs))
    return [-datum.loss_fn_inputs["weights"].to_torch() for datum in result.data]


def of_datum(datum):
    return [datum.loss_fn_inputs[name].to_torch() for name in [*adapter.TRACED_RANKS][1:]]


def expected_gradient(client, loss, k, stale, reward=None):
    """Over all groups of two completions, with respect to the student's table."""
    student, teacher, old = tables()
    leaf = student.clone().requires_grad_()
    policy, sampler = TabularLM(leaf, LENGTH), old if stale else TabularLM(student, LENGTH)
    tokens, mask = policy.sequences()
    probabilities = sampler.logprobs(tokens, mask).exp()
    answers, samples = [*answers_of(teacher, tokens, mask, k)], [*samples_of(sampler, tokens, mask)]
    table = policy.token_logits(tokens).log_softmax(-1)
    total = torch.zeros(())
    for i in range(len(tokens)):
        for j in range(len(tokens)):
            rewards = None if reward is None else [reward[i].item(), reward[j].item()]
            data = adapter.datums(PROMPT, [samples[i], samples[j]], [answers[i], answers[j]], rewards)
            logprobs = []
            for row, datum in zip((i, j), data, strict=True):
                asked = datum.loss_fn_inputs["target_tokens"].to_torch()
                own = table[row, : mask[row].sum()].gather(-1, asked[len(PROMPT) - 1 :])
                logprobs.append(torch.cat([own.new_full((len(PROMPT) - 1, 1 + k), -3.0), own]))
            gradients = gradient(client, loss, data, logprobs)
            for values, slope in zip(logprobs, gradients, strict=True):
                total = total + probabilities[i] * probabilities[j] * (values * slope.double()).sum()
    return torch.autograd.grad(total, leaf)[0] / GROUP


@pytest.mark.parametrize("stale", [False, True], ids=["fresh", "stale"])
@pytest.mark.parametrize("k", range(1, V + 1))
@pytest.mark.parametrize("traced", [False, True], ids=["custom", "traced"])
def test_the_expected_gradient_is_the_exact_one(client, traced, k, stale):
    estimator = RaoBlackwellTopK(k=k, support="reference", off_policy="prefix" if stale else "none")
    loss = adapter.traced_loss if traced else adapter.custom_loss(estimator, GROUP)
    student, teacher, _ = tables()
    exact = exact_kl_gradient(TabularLM(student, LENGTH), teacher)
    expected = expected_gradient(client, loss, k, stale)
    assert (expected - exact).norm() < 1e-6 * exact.norm()
    assert torch.nn.functional.cosine_similarity(expected.flatten(), exact.flatten(), dim=0) > 0.9999


@pytest.mark.parametrize("traced", [False, True], ids=["custom", "traced"])
def test_rewards_in_units_of_the_kls_weight(client, traced):
    """The gradient of KL - r / beta, on samples of an earlier student."""
    estimator = RaoBlackwellTopK(k=2, support="reference", off_policy="prefix")
    loss = adapter.traced_loss if traced else adapter.custom_loss(estimator, GROUP)
    student, teacher, _ = tables()
    leaf = student.clone().requires_grad_()
    policy = TabularLM(leaf, LENGTH)
    tokens, mask = policy.sequences()
    reward = torch.sin(torch.arange(len(tokens), dtype=torch.float64))
    objective = exact_kl(policy, teacher) - policy.logprobs(tokens, mask).exp() @ reward
    (exact,) = torch.autograd.grad(objective, leaf)
    expected = expected_gradient(client, loss, 2, True, reward)
    assert (expected - exact).norm() < 1e-6 * exact.norm()


def test_the_baseline_is_the_mean_of_the_others():
    """Of their rewards, and of their sampled log ratios after each position, 0 after their ends."""
    _, teacher, sampler = tables()
    tokens, mask = teacher.sequences()
    rows, rewards = [0, 5, 9], [1.0, 4.0, 2.0]
    samples = [[*samples_of(sampler, tokens, mask)][row] for row in rows]
    answers = [[*answers_of(teacher, tokens, mask, 2)][row] for row in rows]
    inputs = adapter.loss_inputs(PROMPT, samples, answers, rewards)
    own, ref = (m.token_logits(tokens).log_softmax(-1) for m in (sampler, teacher))
    ratios = ((own - ref).gather(-1, tokens[..., None])[..., 0] * mask)[rows]
    for row, others in enumerate(([1, 2], [0, 2], [0, 1])):
        for t in range(int(mask[rows[row]].sum())):
            baseline = sum(rewards[other] - ratios[other, t + 1 :].sum().item() for other in others) / 2
            score = inputs[row]["score"][len(PROMPT) - 1 + t].item()
            assert score == pytest.approx(baseline - rewards[row], rel=1e-5)


def test_what_is_missing_is_named():
    _, teacher, sampler = tables()
    tokens, mask = teacher.sequences()
    (sample, *_), (answer, *_) = samples_of(sampler, tokens, mask), answers_of(teacher, tokens, mask, 2)
    for missing in ({"prompt_logprobs_np": None}, {"topk_prompt_logprobs_np": None}):
        with pytest.raises(ConfigurationError, match="answers: log-probabilities are missing"):
            adapter.loss_inputs(PROMPT, [sample], [SimpleNamespace(**vars(answer) | missing)])
    answer.topk_prompt_logprobs_np.logprobs[-1, 1] = -99999.0
    with pytest.raises(ConfigurationError, match="answers: the teacher sends fewer than k tokens"):
        adapter.loss_inputs(PROMPT, [sample], [answer])
    with pytest.raises(ConfigurationError, match="RaoBlackwell needs more than a served teacher sends"):
        adapter.custom_loss(RaoBlackwell(), GROUP)
    adapter.custom_loss(MonteCarloRewardToGo(), GROUP)

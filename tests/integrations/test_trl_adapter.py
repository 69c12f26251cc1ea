"""KL estimators in TRL's trainers: against the definition, and against TRL's own loss."""

import socket

import pytest
import torch

from benchmarks.kills.children import Child
from lit_klrb.data.tokenizer import grammar_tokenizer
from lit_klrb.estimators import EstimatorMemory, MonteCarlo, RaoBlackwell, RaoBlackwellTopK
from lit_klrb.functional import leave_one_out_baseline
from lit_klrb.integrations import trl as adapter
from lit_klrb.integrations.trl_batches import rollout_of
from lit_klrb.models.loading import freeze, fresh_model
from lit_klrb.rollouts.scoring import Scorer

CONFIG = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 32}
BETA, GROUP = 0.3, 4
KEPT = []  # what DDP wraps, as its destructor can wait forever; forked processes end without it


def models(noise=0.3):
    tokenizer = grammar_tokenizer()
    policy, reference = (fresh_model(CONFIG, tokenizer, seed=0) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return policy.eval(), freeze(reference)


def batch_of_trl(groups=3, length=5):
    """A batch in TRL's form: two prompt tokens, completions that end at different positions."""
    generator = torch.Generator().manual_seed(0)
    rows = groups * GROUP
    rewards = torch.randn(rows, generator=generator)
    ends = torch.randint(1, length + 1, (rows, 1), generator=generator)
    return rewards, {
        "prompt_ids": torch.randint(3, 90, (groups, 2), generator=generator).repeat_interleave(GROUP, 0),
        "prompt_mask": torch.ones(rows, 2, dtype=torch.long),
        "completion_ids": torch.randint(3, 90, (rows, length), generator=generator),
        "completion_mask": (torch.arange(length) < ends).long(),
        "advantages": rewards - leave_one_out_baseline(rewards, GROUP),
    }


def gradient(model, loss):
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])


@pytest.mark.parametrize(
    "estimator",
    [RaoBlackwell(), MonteCarlo(), MonteCarlo(baseline=None), RaoBlackwell(off_policy="prefix"),
     RaoBlackwellTopK(k=8), RaoBlackwell(divergence="jsd")],
    ids=str,
)  # fmt: skip
def test_the_loss_is_the_estimators_objective(estimator):
    policy, reference = models()
    rewards, batch = batch_of_trl()
    scorer = Scorer(policy, reference, 1.0)
    added, _ = adapter.add_weights(batch, scorer, EstimatorMemory(estimator), BETA, GROUP)
    found = gradient(policy, adapter.weighted_loss(added, scorer, estimator, BETA))
    rollout = rollout_of(batch)
    sums = {"topk": estimator.topk, "jsd_weight": estimator.reads_jsd}
    stats = scorer.stats(rollout, scorer.reference_states(rollout), **sums)
    # Without a baseline of its own, it gets rewards from which TRL has subtracted one
    given = rewards if estimator.baseline else batch["advantages"]
    objective = estimator.objective(
        stats, rollout.mask, given, beta=BETA, group_size=GROUP, behaviour_logprobs=stats.logprobs.detach()
    )
    torch.testing.assert_close(found, gradient(policy, objective), rtol=1e-4, atol=1e-6)


def test_parts_in_any_order_have_the_gradient_of_the_whole():
    policy, reference = models()
    _, batch = batch_of_trl()
    scorer, estimator = Scorer(policy, reference, 1.0), RaoBlackwell()
    added, kl = adapter.add_weights(batch, scorer, EstimatorMemory(estimator), BETA, GROUP)
    whole = gradient(policy, adapter.weighted_loss(added, scorer, estimator, BETA))
    order = torch.randperm(len(batch["advantages"]), generator=torch.Generator().manual_seed(2))
    parts = [{name: value[rows] for name, value in added.items()} for rows in order.chunk(3)]
    losses = [gradient(policy, adapter.weighted_loss(part, scorer, estimator, BETA)) for part in parts]
    torch.testing.assert_close(sum(losses) / 3, whole, rtol=1e-4, atol=1e-6)
    assert kl > 0


def test_ratios_are_to_the_log_probabilities_of_vllm_where_it_has_them():
    policy, reference = models()
    rewards, batch = batch_of_trl()
    scorer, estimator = Scorer(policy, reference, 1.0), RaoBlackwell(off_policy="prefix")
    rollout = rollout_of(batch)
    stats = scorer.stats(rollout, scorer.reference_states(rollout))
    of_vllm = stats.logprobs.detach() - 0.1
    of_vllm[:, 0] = torch.nan
    sampled = {**batch, "sampling_per_token_logps": of_vllm}
    added, _ = adapter.add_weights(sampled, scorer, EstimatorMemory(estimator), BETA, GROUP)
    behaviour = stats.logprobs.detach() - torch.tensor([0.0, 0.1, 0.1, 0.1, 0.1])
    weights = estimator.weights(stats.detach(), rollout.mask, rewards, beta=BETA, group_size=GROUP)
    expected = estimator.loss(stats, rollout.mask, weights, beta=BETA, behaviour_logprobs=behaviour)
    step = gradient(policy, adapter.weighted_loss(added, scorer, estimator, BETA))
    torch.testing.assert_close(step, gradient(policy, expected), rtol=1e-4, atol=1e-6)
    without, _ = adapter.add_weights(batch, scorer, EstimatorMemory(estimator), BETA, GROUP)
    plain = gradient(policy, adapter.weighted_loss(without, scorer, estimator, BETA))
    assert (plain - step).norm() > 0.05 * step.norm()


def test_tokens_of_tools_do_not_count():
    policy, reference = models()
    _, batch = batch_of_trl()
    tools = torch.ones_like(batch["completion_mask"])
    tools[:, 1] = 0
    added, _ = adapter.add_weights(
        {**batch, "tool_mask": tools},
        Scorer(policy, reference, 1.0),
        EstimatorMemory(RaoBlackwell()),
        BETA,
        GROUP,
    )
    assert added["kl_weights_score"][:, 1].eq(0).all()
    assert added["kl_weights_kl"][:, 1].eq(0).all()


def in_two_processes(function, tmp_path, *arguments, **environment):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # One thread: a forked process has no others
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    group |= environment
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    first, second = (
        Child(function, (rank, port, *arguments), log, group | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank, log in enumerate(logs)
    )
    with first, second:
        codes = [child.wait(120) for child in (first, second)]
        assert codes == [0, 0], "".join(log.read_text() for log in logs)

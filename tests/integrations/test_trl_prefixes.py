"""Rewards of the completion so far in TRL's trainers: against the estimator, and against their definition."""

from types import SimpleNamespace

import pytest
import torch
from test_trl_adapter import BETA, GROUP, batch_of_trl, in_two_processes, models
from test_trl_memory import trainer_in
from torch import distributed

from lit_klrb.data.tokenizer import grammar_tokenizer
from lit_klrb.distributed import gather_rows
from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import EstimatorMemory, RaoBlackwell, RaoBlackwellControlVariate
from lit_klrb.integrations import trl as adapter
from lit_klrb.integrations.trl_batches import WEIGHT, rollout_of
from lit_klrb.integrations.trl_prefixes import check_prefix_rewards, prefix_rewards_of
from lit_klrb.models.scoring import Scorer

PREFIXES = RaoBlackwellControlVariate(directions=("prefix_rewards",))


@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize(
    "estimator", [PREFIXES, RaoBlackwellControlVariate(), RaoBlackwellControlVariate(baseline=None)]
)
def test_the_weights_are_those_of_the_estimator_in_the_units_of_the_advantages(estimator, scale):
    rewards, batch = batch_of_trl()
    before = torch.randn(batch["completion_ids"].shape, generator=torch.Generator().manual_seed(1))
    batch["advantages"] = scale * batch["advantages"]
    scorer = Scorer(*models(), 1.0)
    added, _ = adapter.add_weights(
        batch, scorer, EstimatorMemory(estimator), BETA, GROUP, rewards, before[:, :-1]
    )
    rollout = rollout_of(batch)
    with torch.no_grad():
        stats = scorer.stats(rollout, scorer.reference_states(rollout))
    before[:, -1] = 0
    given = scale * rewards if estimator.baseline else batch["advantages"]
    to_come = torch.where(rollout.mask, given[:, None] - scale * before, 0)
    plain, expected = (
        estimator.weights(one, rollout.mask, given, beta=BETA, group_size=GROUP)
        for one in (stats, stats._replace(reward_to_come=to_come))
    )
    torch.testing.assert_close(added[WEIGHT + "score"], expected.score, rtol=1e-3, atol=1e-5)
    assert (plain.score - expected.score).abs().max() > 0.01


def calls_of(prompt, completion_ids, **changes):
    """What is called with which completions, and the result for rewards that are their numbers of tokens."""
    calls = []

    def calculate(texts, tokens):
        calls.append(texts)
        return gather_rows(torch.tensor([[1.0, len(row)] for row in tokens]))

    tokenizer = SimpleNamespace(
        batch_decode=lambda rows, skip_special_tokens: [".".join(map(str, row)) for row in rows]
    )
    trainer = {
        "processing_class": tokenizer, "kl_prefix_stride": 2, "model": SimpleNamespace(training=True),
        "reward_weights": torch.tensor([0.5, 10.0]), "accelerator": SimpleNamespace(device="cpu"),
        "_pending_extra_logs": None, "_pending_metrics": None,
    } | changes  # fmt: skip
    return calls, prefix_rewards_of(
        SimpleNamespace(**trainer), [prompt] * len(completion_ids), completion_ids, calculate
    )


def test_rewards_are_of_one_token_and_of_every_multiple_of_the_stride():
    calls, found = calls_of("I saw", [[7, 8, 9, 10, 11], [5, 6, 7]])
    assert calls == [["7", "5"], ["7.8", "5.6"], ["7.8.9.10", "5.6.7"]]
    assert found.tolist() == [[0, 10.5, 20.5, 20.5, 40.5], [0, 10.5, 20.5, 0, 0]]
    calls, _ = calls_of([{"role": "user", "content": "I saw"}], [[7, 8]])
    assert calls == [[[{"role": "assistant", "content": "7"}]]]
    for changes in ({"kl_prefix_stride": None}, {"model": SimpleNamespace(training=False)}):
        assert calls_of("I saw", [[7, 8]], **changes) == ([], None)


def with_half_of_the_completions(arguments):
    rank, port = arguments
    torch.set_num_threads(1)
    completions = [list(range(5)), [5], [6, 7, 8], [9]]
    _, whole = calls_of("I saw", completions)
    distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    calls, found = calls_of("I saw", completions[2 * rank : 2 * rank + 2])
    assert torch.equal(found, whole)
    assert len(calls) == 3  # as many in both, though one has shorter completions
    return 0


def test_two_processes_have_the_rewards_of_all_completions(tmp_path):
    in_two_processes(with_half_of_the_completions, tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_calls_its_rewards_with_the_first_tokens(tmp_path):
    seen, logged = [], []

    def reward(completions, completion_ids, log_metric, **_):
        seen.append((completions, completion_ids))
        log_metric("longest", max(map(len, completion_ids)))
        return [float(text.count("a")) for text in completions]

    changes = {}
    for stride in (None, 1):
        seen.clear()
        settings = {"save_strategy": "no", "reward_funcs": reward, "prefix_reward_every": stride}
        trainer = trainer_in(tmp_path, 2, PREFIXES, **settings, logging_steps=1)
        before = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
        trainer.train()
        changes[stride] = torch.cat([p.detach().flatten() for p in trainer.model.parameters()]) - before
        logged += [row["longest"] for row in trainer.state.log_history if "longest" in row]
        assert len(seen) == 2 * (4 if stride else 1)
    tokenizer = grammar_tokenizer()
    for texts, tokens in seen:
        assert texts == tokenizer.batch_decode(tokens, skip_special_tokens=True)
    assert [max(map(len, tokens)) for _, tokens in seen[:4]] == [4, 1, 2, 3]
    assert not torch.equal(changes[None], changes[1])
    assert logged == [4.0] * 4  # of whole completions alone


@pytest.mark.parametrize(
    ("estimator", "changes", "stride", "message"),
    [
        (PREFIXES, {}, 0, "prefix_reward_every: must be at least 1, got 0"),
        (RaoBlackwell(), {}, 2, "prefix_reward_every: 2 has no effect with RaoBlackwell; RaoBlackwellCon"),
        (PREFIXES, {"teacher_model": None}, 1, "prefix_reward_every: 1 has no effect in distillation"),
        (PREFIXES, {"tools": [print]}, 1, "prefix_reward_every: 1 is not supported with tools or env"),
        (PREFIXES, {"environments": [1]}, 1, "prefix_reward_every: 1 is not supported with tools or env"),
    ],
)
def test_trainers_whose_rewards_are_of_whole_completions_are_refused(estimator, changes, stride, message):
    with pytest.raises(ConfigurationError, match=message):
        check_prefix_rewards(SimpleNamespace(**changes), estimator, stride)
    check_prefix_rewards(SimpleNamespace(tools=[], environments=None), PREFIXES, 1)
    check_prefix_rewards(SimpleNamespace(**changes), estimator, None)

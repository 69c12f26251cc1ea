"""What estimators remember in TRL's trainers: as in `RLOOModule`, and resumed with TRL's checkpoints."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_trl_adapter import BETA, GROUP, models

from lit_klrb import estimators
from lit_klrb.data.tokenizer import grammar_tokenizer
from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import EstimatorMemory
from lit_klrb.functional import leave_one_out_baseline
from lit_klrb.integrations import trl as adapter
from lit_klrb.integrations.trl_batches import WEIGHT, rewards_of, rollout_of, total_rewards
from lit_klrb.integrations.trl_checkpoints import NAME
from lit_klrb.modules import RLOOModule
from lit_klrb.rollouts.scoring import Scorer
from replication.to_come import RaoBlackwellTokenValues

ANNEALED = estimators.RaoBlackwell(discount=0.2)
STATEFUL = (
    estimators.TiltedRaoBlackwell(),
    RaoBlackwellTokenValues(),
    estimators.RaoBlackwellControlVariate(),
)


def rollouts_of_trl(count):
    """Batches in TRL's form with their rewards, which depend on the tokens."""
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(3, 30, (3 * GROUP, 5), generator=generator)
        mask = torch.arange(5) < torch.randint(2, 6, (len(tokens), 1), generator=generator)
        rewards = (torch.sin(tokens.float()) * mask).sum(1)
        prompts = torch.randint(3, 90, (3, 2), generator=generator).repeat_interleave(GROUP, 0)
        yield (
            rewards,
            {
                "prompt_ids": prompts,
                "prompt_mask": torch.ones_like(prompts),
                "completion_ids": tokens,
                "completion_mask": mask.long(),
                "advantages": rewards - leave_one_out_baseline(rewards, GROUP),
            },
        )


@pytest.mark.parametrize("estimator", STATEFUL, ids=lambda e: type(e).__name__)
def test_the_weights_are_those_of_the_trainer_on_the_same_rollouts(estimator):
    scorer = Scorer(*models(), 1.0)
    memory = EstimatorMemory(estimator, vocabulary_size=len(scorer.policy.get_output_embeddings().weight))
    module = RLOOModule(policy_path="none", reference_path="none", completions_per_prompt=GROUP)
    module.memory, module.beta = EstimatorMemory(estimator, vocabulary_size=memory.vocabulary_size), BETA
    differences = []
    for rewards, batch in rollouts_of_trl(4):
        table, rollout = memory.token_values, rollout_of(batch)
        assert table is module.memory.token_values is None or torch.allclose(
            table, module.memory.token_values, atol=1e-5
        )
        added, _ = adapter.add_weights(batch, scorer, memory, BETA, GROUP, rewards)
        with torch.no_grad():
            stats = scorer.stats(rollout, scorer.reference_states(rollout), module.memory.token_values)
        weights = module.weigh(rollout, stats, rewards)
        for name, field in weights._asdict().items():
            if field is not None:
                torch.testing.assert_close(added[WEIGHT + name], field, rtol=1e-3, atol=1e-5)
        plain = estimators.RaoBlackwell().weights(stats, rollout.mask, rewards, beta=BETA, group_size=GROUP)
        differences.append((added[WEIGHT + "score"] - plain.score).abs().max().item())
    assert max(differences[1:]) > 1e-3
    # An evaluation is not remembered
    before = memory.state_dict()
    adapter.add_objective(batch, scorer, memory, BETA, rewards)
    assert str(memory.state_dict()) == str(before)


def test_the_mean_of_the_others_does_not_depend_on_the_own_reward():
    """With the advantages alone it would: they are centred with the own reward."""
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(3 * GROUP, generator=generator, dtype=torch.float64)
    changed = rewards.clone()
    changed[5] += 1
    estimator = estimators.RaoBlackwellControlVariate()

    def others(rewards, known):
        advantages = rewards - leave_one_out_baseline(rewards, GROUP)
        given = rewards_of(advantages, rewards if known else None, estimator, GROUP)
        torch.testing.assert_close(given - leave_one_out_baseline(given, GROUP), advantages)
        return leave_one_out_baseline(given, GROUP)[5]

    assert others(rewards, known=True) == pytest.approx(others(changed, known=True).item())
    assert abs(others(rewards, known=False) - others(changed, known=False)) > 0.1


def test_a_completion_without_a_reward_changes_none_of_the_others():
    """TRL leaves it out of the mean of the others and gives it the advantage 0."""
    rewards = torch.tensor([1.0, 4.0, math.nan, 7.0] + [math.nan] * 4)
    advantages = torch.tensor([1 - 5.5, 0.0, 0.0, 7 - 2.5] + [0.0] * 4)  # less the mean of the others
    given = rewards_of(advantages, rewards, estimators.RaoBlackwell(), GROUP)
    torch.testing.assert_close(given - leave_one_out_baseline(given, GROUP), advantages)
    scale = 3 / 4 * 3 / 2  # TRL's factor of leave-one-out, of three completions, and the estimator's, of four
    torch.testing.assert_close(given, scale * torch.tensor([1.0, 4, 4, 7] + [0.0] * 4))


def test_rewards_of_several_functions_are_weighted_and_clipped():
    by_function = torch.tensor([[1.0, 2.0], [math.nan, 3.0], [math.nan, math.nan]])
    trainer = SimpleNamespace(reward_weights=torch.tensor([1.0, 10.0]))
    assert total_rewards(by_function, trainer)[:2].tolist() == [21.0, 30.0]
    trainer.reward_clip_range = (0.0, 25.0)
    clipped = total_rewards(by_function, trainer)
    assert clipped[:2].tolist() == [21.0, 25.0]
    assert clipped[2].isnan()


def trainer_in(folder, steps, estimator, **settings):
    import datasets
    import trl

    policy, _ = models()
    policy.save_pretrained(folder / "policy")
    given = {"reward_funcs": lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids]}
    ours = ("final_discount", "final_forward_share", "reward_funcs")
    given |= {name: settings.pop(name) for name in ours if name in settings}
    arguments = {
        "output_dir": str(folder / "out"), "beta": BETA, "num_generations": 2, "max_completion_length": 4,
        "max_steps": steps, "learning_rate": 0.1, "lr_scheduler_type": "constant", "report_to": [],
        "use_cpu": True, "seed": 3, "save_strategy": "steps", "save_steps": 2,
        "disable_tqdm": True, "per_device_train_batch_size": 8, "disable_dropout": True,
    } | settings  # fmt: skip
    return adapter.with_kl_estimator(trl.RLOOTrainer)(
        model=str(folder / "policy"),
        args=trl.RLOOConfig(**arguments),
        processing_class=grammar_tokenizer(),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["I saw", "Do not", "What a", "It was"]}),
        kl_estimator=estimator,
        **given,
    )


@pytest.mark.filterwarnings("ignore")
def test_the_memory_is_resumed_with_the_checkpoint(tmp_path):
    estimator = estimators.RaoBlackwellControlVariate()
    whole = trainer_in(tmp_path, 2, estimator)
    whole.train()
    checkpoint = tmp_path / "out" / "checkpoint-2"
    saved = torch.load(checkpoint / NAME, weights_only=True)
    assert saved["token_values"]["lengths"].numel() == 16
    assert str(saved) == str(whole.kl_memory.state_dict())

    resumed, seen = trainer_in(tmp_path, 3, estimator), []
    observe = resumed.kl_memory.observe

    def observed(*arguments, **settings):
        seen.append(str(resumed.kl_memory.state_dict()["token_values"]))
        observe(*arguments, **settings)

    resumed.kl_memory.observe = observed
    resumed.train(resume_from_checkpoint=True)
    assert seen == [str(saved["token_values"])]
    assert resumed.kl_memory.state_dict()["token_values"]["lengths"].numel() == 24

    (checkpoint / NAME).unlink()
    with pytest.raises(ConfigurationError, match=r"resume_from_checkpoint: .* cannot be read"):
        trainer_in(tmp_path, 3, estimator).train(resume_from_checkpoint=str(checkpoint))
    torch.save({}, checkpoint / NAME)
    with pytest.raises(ConfigurationError, match=r"resume_from_checkpoint: .* holds no memory of"):
        trainer_in(tmp_path, 3, estimator).train(resume_from_checkpoint=str(checkpoint))


@pytest.mark.filterwarnings("ignore")
def test_the_discount_changes_over_the_training(tmp_path):
    estimator = replace(ANNEALED, forward_share=1.0)
    finals = {"final_discount": 1.0, "final_forward_share": 0.0}
    trainer, seen = trainer_in(tmp_path, 4, estimator, **finals, save_strategy="no"), []
    observe = trainer.kl_memory.observe

    def observed(*arguments, **settings):
        seen.append((trainer.kl_memory.estimator.discount, trainer.kl_memory.estimator.forward_share))
        observe(*arguments, **settings)

    trainer.kl_memory.observe = observed
    trainer.train()
    assert np.array(seen) == pytest.approx(np.array([(0.2, 1.0), (0.4, 0.75), (0.6, 0.5), (0.8, 0.25)]))

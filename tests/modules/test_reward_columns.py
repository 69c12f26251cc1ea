"""Rewards of prompts, completions and other columns of the data, wherever a reward is used."""

import csv
import sys
from dataclasses import replace
from types import ModuleType

import pytest
from lightning import Trainer
from written import write_splits

from lit_klrb.data.modules import PreferenceDataModule, PromptDataModule
from lit_klrb.estimators import EstimatorMemory, MonteCarlo
from lit_klrb.modules import DPOModule, RLOOModule
from replication.studies import CheckpointPair, PairGradientNoiseStudy

NOUNS = ("film", "movie", "thriller", "comedy", "drama", "plot", "cast", "acting")
PROMPTS = [f"{start} {noun}" for start in ("The", "This", "What a") for noun in NOUNS]
K = 3


def signed_length(prompts, completions, *, sign, **columns):
    """The number of letters of the completion, times the prompt's sign."""
    assert columns.keys() == {"number"}
    assert [PROMPTS[number] for number in columns["number"]] == prompts
    return [factor * len(text) for text, factor in zip(completions, sign, strict=True)]


def doubled(completions, **columns):
    """Twice as much, and a constant that a baseline removes."""
    return [2 * value + 7 for value in signed_length(completions=completions, **columns)]


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A folder of prompts with two more columns, and the reward that reads them, importable."""
    module = ModuleType("signed_rewards")
    module.signed_length = signed_length
    module.doubled = doubled
    monkeypatch.setitem(sys.modules, module.__name__, module)
    rows = [{"prompt": text, "sign": (-1) ** row, "number": row} for row, text in enumerate(PROMPTS)]
    splits = {"train": rows[:16], "validation": rows[16:20], "test": rows[20:]}
    return str(write_splits(tmp_path / "prompts", **splits))


def attached(chain, tmp_path, data, module):
    trainer = Trainer(
        max_steps=1, accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path
    )
    trainer.strategy.connect(module)
    module.trainer = data.trainer = trainer
    module.configure_model()
    module.log = lambda *args, **kwargs: None
    data.setup("fit")


def by_hand(module, rollout, rows):
    """The reward of each completion, decoded alone, with the sign of its prompt's row."""
    scores = []
    for index, (tokens, mask) in enumerate(zip(rollout.completions, rollout.mask, strict=True)):
        text = module.tokenizer.decode(tokens[mask], skip_special_tokens=True)
        scores.append(float(rows[index // K]["sign"] * len(text)))
    return scores


def test_training_and_evaluation_give_each_completion_the_columns_of_its_prompt(chain, tmp_path, source):
    module = RLOOModule(
        policy_path=chain.checkpoint("dpo"),
        reference_path=chain.checkpoint("sft"),
        reward_path="signed_rewards:signed_length",
        max_new_tokens=8,
        completions_per_prompt=K,
        evaluation_completions=K,
    )
    data = PromptDataModule(source=source, batch_size=8, train_size=0, eval_size=4, eval_batch_size=4)
    attached(chain, tmp_path, data, module)
    module.memory, module.beta = EstimatorMemory(MonteCarlo()), 0.3
    batch = next(iter(data.train_dataloader()))
    assert len({row["sign"] for row in batch["rows"]}) == 2
    module.training_step(batch, 0)
    trained = module.experience
    assert trained.rewards.tolist() == by_hand(module, trained.rollout, batch["rows"])
    assert len(set(trained.rewards.tolist())) > K
    batch = next(iter(data.val_dataloader()))
    evaluation = module.validation_step(batch, 0)["evaluation"]
    assert evaluation.rewards.tolist() == by_hand(module, evaluation.rollout, batch["rows"])


def test_pairs_for_dpo_are_chosen_with_the_columns(chain, tmp_path, source):
    module = DPOModule(
        reference_path=chain.checkpoint("sft"),
        reward_path="signed_rewards:signed_length",
        max_new_tokens=8,
        completions_per_prompt=K,
    )
    data = PreferenceDataModule(source=source, batch_size=4, train_size=16, eval_size=4)
    attached(chain, tmp_path, data, module)
    pairs = data.prepared(data.examples("train"))
    signs = {tuple(prompt.tokens): prompt.columns["sign"] for prompt in data.prompts("train")}
    assert len(pairs) > 8
    for pair in pairs:
        chosen, rejected = (
            len(module.tokenizer.decode(ids, skip_special_tokens=True))
            for ids in (pair.chosen, pair.rejected)
        )
        assert (chosen - rejected) * signs[tuple(pair.prompt)] > 0


def test_a_study_of_checkpoints_gives_the_reward_the_columns(chain, source):
    pair = CheckpointPair(
        policy_path=chain.checkpoint("dpo"),
        reference_path=chain.checkpoint("sft"),
        reward_path="signed_rewards:signed_length",
        max_new_tokens=8,
        source=source,
        split="train",
    )
    models, reward = pair.load(), pair.load_reward()
    for batch in pair.batches(models, number=2, size=8):
        assert len({row["sign"] for row in batch["rows"]}) == 2
        rollout = models.sample(batch, pair.sampling(K), seed=1)
        assert models.rewards(reward, rollout, batch).tolist() == by_hand(models, rollout, batch["rows"])
    assert pair.sample(prompts=8, completions=2, seed=1).mask.shape[0] == 16
    settings = {"batches": 4, "prompts_per_batch": 2, "completions": 2, "earlier_rollouts": 2}
    study = PairGradientNoiseStudy(pairs=[pair], estimators=[MonteCarlo()], **settings)
    (snapshot,) = study.measure(seed=0)["snapshots"]
    reward = snapshot["gram"][0][0]
    assert reward > 0, "the gradient of the reward"
    other = replace(pair, reward_path="signed_rewards:doubled")
    study = replace(study, pairs=[other])
    assert study.measure(seed=0)["snapshots"][0]["gram"][0][0] == pytest.approx(4 * reward, rel=1e-3)


def test_equal_rewards_are_counted_and_said_once(chain, tmp_path, capsys, monkeypatch):
    (tmp_path / "my_constant.py").write_text(
        "def constant(completions, log_metric, trainer_state):\n"
        "    log_metric('step', trainer_state.global_step)\n"
        "    [log_metric(name, 999.0) for name in ('kl', 'reward', 'grad_norm')]\n"
        "    return [0.5] * len(completions)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    reward = ["--model.reward_path", "my_constant:constant", "--trainer.max_steps", "3"]
    assert chain.run("fit", "rloo", *reward, run=tmp_path / "run") == 0
    said = "all completions of each prompt have the same reward, such as 0.5"
    assert capsys.readouterr().out.count(said) == 1
    (table,) = (tmp_path / "run" / "metrics").rglob("metrics.csv")
    rows = [row for row in csv.DictReader(table.read_text().splitlines()) if row["train/equal_rewards"]]
    assert {float(row["train/equal_rewards"]) for row in rows} == {1.0}
    assert {float(row["train/logged/step"]) for row in rows} <= {0.0, 1.0, 2.0}
    for name in ("kl", "reward", "grad_norm"):
        assert {float(row[f"train/logged/{name}"]) for row in rows} == {999.0}
        assert max(float(row[f"train/{name}"]) for row in rows) < 999

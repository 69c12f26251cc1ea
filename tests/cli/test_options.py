"""Options have an effect on the run."""

import json
from functools import cache

import pytest
from runs import equal, rows_of, weights_of
from written import write_rows

from lit_klrb.data.tokenizer import grammar_tokenizer

# Of the second rollout one step
SHORT = [
    "--trainer.limit_val_batches",
    "0",
    "--trainer.num_sanity_val_steps",
    "0",
    "--trainer.max_steps",
    "3",
]

# "{x}" stands for a file: the checkpoint of a stage, a tokenizer with one more token, other reviews.
RAO_BLACKWELL = ["--kl.estimator", "RaoBlackwell"]
TRAINING = [
    ("sft", ["--model.learning_rate", "0.001"]),
    ("sft", ["--model.weight_decay", "10"]),
    ("sft", ["--model.warmup_steps", "3"]),
    ("sft", ["--model.adam_epsilon", "0.1"]),
    ("sft", ["--model.policy_config.n_head", "1"]),
    ("sft", ["--model.policy_config", "null", "--model.policy_path", "{dpo}"]),
    ("sft", ["--model.tokenizer_path", "{tokenizer}"]),
    ("sft", ["--model.vocab_size", "300", "--data.overlong", "cut"]),
    ("sft", ["--data.max_tokens", "5", "--data.overlong", "cut"]),
    ("sft", ["--data.batch_size", "7"]),
    ("sft", ["--data.train_size", "32"]),
    ("sft", ["--data.source", "{reviews}"]),
    ("dpo", ["--model.beta", "3"]),
    ("dpo", ["--model.reward_path", "cli_rewards:length"]),
    ("dpo", ["--model.completions_per_prompt", "3"]),
    ("reward", ["--model.classifier_config", "null", "--model.classifier_path", "{reward}"]),
    ("reward", ["--model.classifier_config", "null", "--model.backbone_path", "{sft}"]),
    ("reward", ["--model.tokenizer_path", "{tokenizer}"]),
    ("rloo", ["--seed_everything", "3"]),
    ("rloo", ["--kl.beta", "3"]),
    ("rloo", ["--kl.final_beta", "30"]),
    ("rloo", ["--kl.target_kl", "0.01", "--kl.horizon", "5"]),
    ("rloo", ["--kl.estimator", "MonteCarlo"]),
    ("rloo", ["--kl.estimator.baseline", "null"]),
    ("rloo", ["--kl.estimator.off_policy", "clip"]),
    ("rloo", [*RAO_BLACKWELL, "--kl.estimator.discount", "0.5", "--kl.estimator.allow_biased", "true"]),
    ("rloo", [*RAO_BLACKWELL, "--kl.final_discount", "0.5", "--kl.estimator.allow_biased", "true"]),
    ("rloo", [*RAO_BLACKWELL, "--kl.estimator.forward_share", "0.5", "--kl.estimator.allow_biased", "true"]),
    ("rloo", [*RAO_BLACKWELL, "--kl.final_forward_share", "0.5", "--kl.estimator.allow_biased", "true"]),
    ("rloo", ["--model.policy_path", "{sft}"]),
    ("rloo", ["--model.reference_path", "{dpo}"]),
    ("rloo", ["--model.reward_path", "{reward}"]),
    ("rloo", ["--model.reward_path", "{grammar: 1.0, cli_rewards:length: 0.1}"]),
    ("rloo", ["--model.stop_at_eos", "false"]),
    ("rloo", ["--model.missing_eos_penalty", "3"]),
    ("rloo", ["--model.prefix_reward_every", "1"]),
    ("rloo", ["--model.schedule", "constant"]),
    ("rloo", ["--model.temperature", "0.5"]),
    ("rloo", ["--model.max_new_tokens", "3"]),
    ("rloo", ["--model.completions_per_prompt", "3"]),
    ("rloo", ["--model.inner_epochs", "1"]),
    ("rloo", ["--model.mini_batches", "2"]),
    ("rloo", ["--data.min_prompt_tokens", "8"]),
    ("rloo", ["--data.max_prompt_tokens", "2"]),
]
# Options that act on a learned reward: compared with a run that has it.
LEARNED = [["--model.reward_label", "negative"], ["--model.reward_output", "logit"]]
EVALUATION = [
    ["--model.evaluation_seed", "1"],
    ["--data.eval_size", "5"],
    ["--data.eval_batch_size", "3"],
]


@pytest.fixture(scope="module")
def files(chain, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    tokenizer = grammar_tokenizer()
    tokenizer.add_tokens(["cinematography"])
    tokenizer.save_pretrained(folder / "tokenizer")
    texts = [f"I saw this film {number} times and liked it." for number in range(200)]
    reviews = write_rows(folder / "reviews.jsonl", ({"text": text, "label": 1} for text in texts))
    checkpoints = {stage: chain.checkpoint(stage) for stage in ("sft", "dpo", "rloo", "reward")}
    return {**checkpoints, "tokenizer": folder / "tokenizer", "reviews": reviews}


@pytest.fixture(scope="module")
def short(chain, tmp_path_factory):
    """The weights of a stage after a short run without other options."""

    @cache
    def trained(stage):
        run = tmp_path_factory.mktemp(stage)
        assert chain.run("fit", stage, *SHORT, run=run) == 0
        return weights_of(run)

    return trained


@pytest.mark.parametrize(
    ("stage", "extra"), TRAINING, ids=lambda value: " ".join(value) if type(value) is list else None
)
def test_the_option_changes_the_trained_policy(chain, files, short, tmp_path, stage, extra, monkeypatch):
    monkeypatch.syspath_prepend(str(__file__).rpartition("/")[0])
    extra = [word if word.startswith("{grammar") else word.format_map(files) for word in extra]
    assert chain.run("fit", stage, *SHORT, *extra, run=tmp_path) == 0
    assert not equal(short(stage), weights_of(tmp_path))


@pytest.fixture(scope="module")
def with_learned_reward(chain, tmp_path_factory):
    run = tmp_path_factory.mktemp("learned")
    reward = ["--model.reward_path", chain.checkpoint("reward")]
    assert chain.run("fit", "rloo", *SHORT, *reward, run=run) == 0
    return weights_of(run), reward


@pytest.mark.parametrize("extra", LEARNED, ids=" ".join)
def test_the_option_of_a_learned_reward_changes_the_policy(chain, tmp_path, with_learned_reward, extra):
    expected, reward = with_learned_reward
    assert chain.run("fit", "rloo", *SHORT, *reward, *extra, run=tmp_path) == 0
    assert not equal(expected, weights_of(tmp_path))


@pytest.mark.parametrize(
    ("estimator", "option", "values"),
    [
        ("RaoBlackwellControlVariate", "directions", ["[kl]", "[constant]"]),
        ("RaoBlackwellTopK", "k", ["1", "20"]),
        ("RaoBlackwellTopK", "support", ["policy", "reference"]),
        ("MonteCarlo --kl.estimator.off_policy clip", "clip_range", ["0.2", "0.0001"]),
    ],
)
def test_the_option_of_a_single_estimator_changes_the_policy(chain, tmp_path, estimator, option, values):
    trained = []
    for value in values:
        settings = ["--kl.estimator", *estimator.split(), f"--kl.estimator.{option}", value]
        assert chain.run("fit", "rloo", *SHORT, *settings, run=tmp_path / value) == 0
        trained.append(weights_of(tmp_path / value))
    assert not equal(*trained)


@pytest.mark.parametrize("extra", EVALUATION, ids=" ".join)
def test_the_option_changes_the_evaluation_and_not_the_training(chain, tmp_path, extra):
    assert chain.run("fit", "rloo", *extra, run=tmp_path) == 0
    assert equal(weights_of(chain.root / "rloo"), weights_of(tmp_path))
    final, other = (
        json.loads((root / "summary.json").read_text())["final"] for root in (chain.root / "rloo", tmp_path)
    )
    assert final != other


def test_only_the_first_and_the_last_evaluation_have_more_completions(chain, tmp_path, capsys):
    evaluations = {"plain": evaluations_of(chain.root / "rloo")}
    for option in ("evaluation_completions", "final_evaluation_completions"):
        assert chain.run("fit", "rloo", f"--model.{option}", "6", run=tmp_path / option) == 0
        evaluations[option] = evaluations_of(tmp_path / option)
        assert equal(weights_of(chain.root / "rloo"), weights_of(tmp_path / option))
    plain, always, last = evaluations.values()
    assert len(plain) > 2
    assert last[1:-1] == plain[1:-1] != always[1:-1]
    assert [last[0], last[-1]] == [always[0], always[-1]]
    assert last[0] != plain[0]
    assert last[-1] != plain[-1]
    capsys.readouterr()
    final = ["--ckpt_path", str(tmp_path / option / "checkpoints" / "last.ckpt"), f"--model.{option}", "6"]
    assert chain.run("validate", "rloo", *final, run=tmp_path / "validated") == 0
    assert f"{float(last[-1]['val/reward']):.3f}" in capsys.readouterr().out


def evaluations_of(run):
    rows = [row for row in rows_of(run) if row["val/kl"]]
    return [{name: row[name] for name in row if name.startswith("val/")} for row in rows]

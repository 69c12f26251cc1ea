"""`check` reports for each command line what `fit` would do, without writing files."""

import inspect
import io
import json

import pytest
from transformers import T5Config
from written import save, write_rows

from lit_klrb import schema
from lit_klrb.cli.check import AT_FIRST, LATER
from lit_klrb.cli.main import main
from lit_klrb.data.modules import PromptDataModule
from lit_klrb.data.tokenizer import train_bpe
from lit_klrb.models import loading
from lit_klrb.modules import RLOOModule

UNBIASED = ["--kl.estimator", "MonteCarlo"]


@pytest.fixture
def ask(chain, tmp_path, monkeypatch, capsys):
    """Answers to tiny RLOO runs with further arguments, after the stages from which they start."""

    def asked(*extras, stages=()):
        runs = [chain.commands.argv("fit", "rloo", *extra, run=tmp_path / "run") for extra in extras]
        monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps([*stages, *runs])))
        capsys.readouterr()
        assert main(["check"]) == 0
        return json.loads(capsys.readouterr().out)[len(stages) :]

    return asked


def test_what_would_be_optimised_and_evaluated(ask, tmp_path):
    right, wrong = ask(
        [*UNBIASED, "--model.temperature", "0.7"],
        ["--kl.estimator", "K3Loss", "--kl.estimator.allow_biased", "true"],
    )
    assert right["module"] == "RLOOModule"
    assert right["estimator"]["name"] == "MonteCarlo"
    assert right["estimator"]["biased"] is False
    assert right["steps"] == 6
    assert right["prompts"]["batch_size"] == 4
    policy, reference = (right["models"][key] for key in ("policy_path", "reference_path"))
    assert policy == reference | {"path": policy["path"]}
    assert right["models"]["policy_path"]["type"] == "gpt2"
    assert wrong["estimator"]["biased"] is True
    assert "KL(reference || policy)" in wrong["estimator"]["optimises"]
    differing = [key for key, value in right["evaluation"].items() if wrong["evaluation"][key] != value]
    assert differing == ["model.init_args.temperature"]
    assert not (tmp_path / "run").exists()


def test_a_correction_that_is_biased_after_the_first_step_is_named(ask):
    clip, prefix, once = ask(
        *(
            [*UNBIASED, "--kl.estimator.off_policy", off_policy, "--model.inner_epochs", steps]
            for off_policy, steps in (("clip", "4"), ("prefix", "4"), ("clip", "1"))
        )
    )
    kl = "the gradient of KL(policy || reference)"
    later = "biased after the first of 4 steps on a rollout (off_policy clip)"
    assert clip["estimator"]["optimises"] == f"{kl}; {later}"
    assert [answer["estimator"]["biased"] for answer in (clip, prefix, once)] == [LATER, False, False]
    assert {answer["estimator"]["optimises"] for answer in (prefix, once)} == {f"{kl}; unbiased"}


def test_a_discount_that_changes_is_named(ask):
    def own_then(discount, *extra):
        options = ["--kl.estimator", "RaoBlackwell", "--kl.estimator.discount", "0"]
        return [*options, "--kl.final_discount", discount, *extra]

    passing, later, biased, refused = ask(
        own_then("1", "--model.inner_epochs", "1"),
        own_then("1", "--kl.estimator.off_policy", "clip", "--model.inner_epochs", "2"),
        own_then("0.5", "--kl.estimator.allow_biased", "true"),
        own_then("0.5"),
    )
    assert "unbiased" not in passing["estimator"]["optimises"]
    assert "the discount increases from 0 to 1 over the run: at first" in passing["estimator"]["optimises"]
    assert passing["estimator"]["biased"] == AT_FIRST
    assert later["estimator"]["biased"] == f"{AT_FIRST} and {LATER}"
    assert biased["estimator"]["optimises"].startswith("the gradient of KL(policy || reference); biased: ")
    assert biased["estimator"]["optimises"].endswith("; the discount changes to 0.5 over the run")
    assert biased["estimator"]["biased"] is True
    assert "refused for training unless allow_biased is true: with discount 0.5" in refused["error"]


def test_every_mistake_is_one_line_and_the_others_are_answered(ask, tmp_path):
    empty, bare, other, encoder = (tmp_path / name for name in ("empty", "bare", "other", "encoder"))
    empty.mkdir()
    tokenizer = train_bpe(["It was good."], 262)
    config = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 64}
    model = loading.fresh_model(config, tokenizer, seed=0)
    model.save_pretrained(other)
    model.config.save_pretrained(bare)
    T5Config().save_pretrained(encoder)
    for folder in (bare, other, encoder):
        tokenizer.save_pretrained(folder)
    mistakes = {
        "K3Loss is refused for training unless allow_biased": ["--kl.estimator", "K3Loss"],
        "kl.estimator.init_args.off_policy: must not be none with 2 optimizer steps": [
            *("--kl.estimator.off_policy", "none")
        ],
        f"model.init_args.policy_path: {empty}: cannot be loaded: ": ["--model.policy_path", str(empty)],
        f"model.init_args.policy_path: {bare}: it has no weights": ["--model.policy_path", str(bare)],
        f"{encoder}: t5 is not the architecture of a policy": ["--model.policy_path", str(encoder)],
        f"model.init_args.reference_path: {other} has another vocabulary than the policy": [
            *("--model.reference_path", str(other))
        ],
        "source: nowhere.jsonl does not exist": ["--data.source", "nowhere.jsonl"],
        "reward_path: cannot import math:nope": ["--model.reward_path", "math:nope"],
    }
    answers = ask(*mistakes.values(), UNBIASED)
    for message, answer in zip(mistakes, answers, strict=False):
        assert message in answer["error"]
        assert "\n" not in answer["error"]
    assert "error" not in answers[-1]


def test_every_argument_is_of_the_evaluation_or_of_training_alone():
    training = {
        *("completions_per_prompt", "policy_path", "policy_layers", "lora"),
        *("learning_rate", "weight_decay", "adam_epsilon"),
        *("schedule", "warmup_steps", "gradient_checkpointing", "seed"),
        *("inner_epochs", "mini_batches", "missing_eos_penalty", "rollout_backend", "vllm_options"),
        *("prefix_reward_every", "reward_retries", "reference_update"),
        *("batch_size", "train_size", "generated_size"),
    }
    mros = [cls for kind in (RLOOModule, PromptDataModule) for cls in kind.__mro__]
    ours = [cls for cls in mros if cls.__module__.startswith("lit_klrb.")]
    known = {name for cls in ours for name in inspect.signature(cls).parameters} - {"args", "kwargs"}
    evaluation = {key.partition(".")[2] for key in schema.EVALUATED_WITH} - {"precision", "teachers"}
    assert known == training | evaluation
    assert not training & evaluation


@pytest.mark.parametrize(
    ("stage", "wrong", "message"),
    [
        ("rloo", ["--data", "lightning.LightningDataModule"], "LightningDataModule has no train_dataloader"),
        (
            *("rloo", ["--trainer.callbacks+=EstimationStudy", "--trainer.callbacks.prompts", "1000"]),
            "EstimationStudy: needs 1 × 1000 training prompts, got 32",
        ),
        ("dpo", ["--model.completions_per_prompt", "1"], "must be at least 2 unless the data"),
        (
            "rloo",
            ["--model.policy_path", "models/mine"],
            "models/mine: is no folder here, and as a hub id cannot be loaded: ",
        ),
        ("rloo", ["--trainer.default_root_dir", "/dev/null"], "trainer.default_root_dir: /dev/null/"),
    ],
)
def test_what_fit_would_find_at_its_first_step(chain, capsys, stage, wrong, message):
    assert main(["check", *chain.commands.argv("fit", stage, *wrong)[1:]]) == 2
    assert message in capsys.readouterr().err


def test_the_arguments_of_fit_print_one_answer(chain, capsys):
    assert main(["check", *chain.commands.argv("fit", "rloo")[1:]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"model: RLOOModule: policy_path {chain.checkpoint('dpo')} (gpt2), reference")
    names = ["model", "rows", "first row", "estimator", "time"]
    assert [line.partition(":")[0] for line in lines] == names
    sft = ["check", *chain.commands.argv("fit", "sft")[1:]]
    assert main(sft) == 0
    said = capsys.readouterr().out
    assert "estimator: none" in said
    assert said.startswith("model: SFTModule: policy float32")
    assert main([*sft, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["module"] == "SFTModule"


def test_rows_are_shown_as_the_model_reads_them(chain, tmp_path, capsys):
    rows = [{"prompt": f"It {'was ' * number}", "completion": "good"} for number in (1, 2, 3, 80)]
    for split in ("train", "test", "validation"):
        given = rows if split == "train" else [{"prompt": split, "completion": "good"}]
        write_rows(tmp_path / f"{split}.jsonl", given)
    argv = ["--data.source", str(tmp_path), "--data.train_size", "0"]
    sft = chain.commands.argv("fit", "sft", *argv)[1:]
    assert main(["check", *sft, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["rows"]
    assert shown["kind"] == "texts"
    assert (shown["rows"], shown["left_out"], shown["cut"]) == (4, {"longer than max_tokens=64": 1}, 0)
    assert shown["longest_tokens"] - shown["median_tokens"] == 1, "one more word"
    assert shown["first"].partition(" | ")[2].strip().startswith("good")
    assert main(["check", *sft]) == 0
    assert "4 texts, 1 left out (1 longer than max_tokens=64)" in capsys.readouterr().out
    assert main(["check", *sft, "--model.vocab_size", "300"]) == 0
    assert "4 texts, 1 left out" in capsys.readouterr().out, "with a tokenizer trained on them"


def test_rows_of_the_evaluation_are_read_as_fit_reads_them(chain, tmp_path, capsys):
    for split, words in (("train", 1), ("test", 1), ("validation", 80)):
        row = {"prompt": f"A {split} of {'very ' * words}", "completion": "good"}
        write_rows(tmp_path / f"{split}.jsonl", [row])
    argv = ["--data.source", str(tmp_path), "--data.train_size", "0"]
    assert main(["check", *chain.commands.argv("fit", "sft", *argv)[1:]]) == 2
    assert "1 of 1 validation rows cannot be read: 1 longer than max_tokens=64" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{", "7", "[[1]]", "[7]", "[[]]", '[["train"]]'])
def test_invalid_requests_are_refused(monkeypatch, capsys, text):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main(["check"]) == 2
    assert "standard input must be a JSON list of command lines of fit" in capsys.readouterr().err


def test_a_terminal_is_not_waited_for(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    assert main(["check"]) == 2
    assert "name a configuration" in capsys.readouterr().err


# What fit refuses, and what the line says
REFUSED_BY_FIT = {
    "batch_size: 32 prompts cannot be split evenly into mini_batches=3": (
        *("--model.mini_batches", "3", "--data.batch_size", "32"),
    ),
    "trainer.devices: must be auto, a number of devices, or their indices, got 0": ("--trainer.devices", "0"),
    "`r` should be a positive integer value": ("--model.lora", "{r: 0}"),
    "Target modules {'nothing'} not found": ("--model.lora", "{r: 2, target_modules: [nothing]}"),
    "reward_path: {} must name rewards": ("--model.reward_path", "{}"),
    "policy_layers: 5 is not a layer: they are 0 to 1": ("--model.policy_layers", "[5]"),
    "63 after a prompt of 8 tokens exceeds the policy's context length, 64": ("--model.max_new_tokens", "63"),
    "trainer.strategy: 'nothing' is refused": ("--trainer.strategy", "nothing"),
    "data: TextDataModule provides texts, but RLOOModule needs prompts": ("--data", "TextDataModule"),
}


def test_a_plan_refuses_what_fit_would_of_models_that_its_stages_have_yet_to_write(chain, ask, tmp_path):
    written = tmp_path / "sft" / "checkpoints" / "last.ckpt"
    written.parent.mkdir(parents=True)
    written.touch()
    stage = chain.commands.argv("fit", "sft", "--model.policy_config.n_layer=2", run=tmp_path / "sft")
    start = ["--model.policy_path", str(written), "--model.reference_path", str(written)]
    fine = ["--model.lora", "{r: 2, init_lora_weights: pissa}", "--model.policy_layers", "[1]"]
    runs = ([*start, *extra] for extra in (*REFUSED_BY_FIT.values(), fine))
    *answers, right = ask(*runs, stages=[stage])
    for message, answer in zip(REFUSED_BY_FIT, answers, strict=True):
        assert message in answer.get("error", "accepted")
    assert "error" not in right
    assert right["models"]["policy_path"]["type"] == "gpt2"


@pytest.mark.parametrize("arguments", [{"n_embd": 7}, {"activation_function": "nothing"}])
def test_new_weights_are_refused_before_they_are_made(chain, capsys, arguments):
    (option,) = [f"--model.policy_config.{key}={value}" for key, value in arguments.items()]
    assert main(["check", *chain.commands.argv("fit", "sft", option)[1:]]) == 2
    assert capsys.readouterr().err.startswith("error: model.init_args.policy_config: {'model_type': 'gpt2'")


def test_folders_are_asked_without_their_weights(chain, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "model"
    policy = loading.load_model("policy_path", chain.checkpoint("sft"))
    save(folder, policy, loading.load_tokenizer("policy_path", chain.checkpoint("sft")))
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-64] + b"\xff" * 64)  # not finite
    argv = chain.commands.argv("fit", "rloo", "--model.policy_path", str(folder))
    assert main(["check", *argv[1:]]) == 0
    assert main(["check", *argv[1:], "--model.policy_layers", "[1]"]) == 2
    assert "policy_layers: 1 is not a layer: they are 0 to 0" in capsys.readouterr().err


def test_a_reward_is_called_on_two_prompts(chain, tmp_path, capsys):
    """In the same words as fit, before anything is spent."""
    rows = [{"prompt": f"It was {n}", "sign": 1} for n in range(60)]
    source = ["--data.source", write_rows(tmp_path / "rows.jsonl", rows)]
    reward = ["--model.reward_path", "cli_rewards:signed_length"]
    argv = chain.commands.argv("fit", "rloo", *reward, *source, run=tmp_path / "run")
    assert main(["check", *argv[1:]]) == 0
    for row in rows:
        del row["sign"]
    source = ["--data.source", write_rows(tmp_path / "without.jsonl", rows)]
    argv = chain.commands.argv("fit", "rloo", *reward, *source, run=tmp_path / "run")
    lines = []
    for command in (["check"], ["fit"]):
        capsys.readouterr()
        assert main([*command, *argv[1:]]) == 2
        lines.append(capsys.readouterr().err.strip().splitlines()[-1])
    assert lines[0] == lines[1]
    assert lines[0].startswith(
        "error: model.init_args.reward_path: cli_rewards:signed_length needs the column sign"
    )

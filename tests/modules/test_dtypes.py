"""Files of three dtypes through all stages: what is trained, in which numbers, and what is written.

Not every combination: each pair of values of two factors is in some row.
"""

import math

import pytest
import torch
from lightning import Trainer
from runs import equal, in_processes, logged, weights_of
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lit_klrb.cli.main import main
from lit_klrb.data.modules import PromptDataModule
from lit_klrb.data.tokenizer import grammar_tokenizer
from lit_klrb.models.adapters import has_adapter, merged
from lit_klrb.models.loading import CLASSIFIER, load_model
from lit_klrb.modules import RLOOModule

FILES = "float32", "bfloat16", "float16"
FULL, LORA = (), ("--model.lora", "{r: 2}")
ROWS = [
    ("sft", "float32", "bf16-true", FULL, "resumed"),
    ("sft", "float16", "32-true", FULL, "exported"),
    ("sft", "bfloat16", "bf16-mixed", LORA, "sharded"),
    ("reward", "bfloat16", "32-true", FULL, "resumed"),
    ("reward", "float16", "bf16-mixed", FULL, "exported"),
    ("reward", "float32", "bf16-true", FULL, "sharded"),
    ("dpo", "float32", "bf16-mixed", FULL, "resumed"),
    ("dpo", "bfloat16", "bf16-true", LORA, "exported"),
    ("dpo", "float16", "32-true", FULL, "sharded"),
    ("rloo", "bfloat16", "bf16-mixed", LORA, "resumed"),
    ("rloo", "float32", "bf16-true", FULL, "exported"),
    ("rloo", "float16", "32-true", LORA, "sharded"),
    ("distill", "float16", "bf16-true", FULL, "resumed"),
    ("distill", "bfloat16", "bf16-mixed", LORA, "exported"),
    ("distill", "float32", "32-true", LORA, "sharded"),
]
TINY = [
    *("--data.train_size", "16", "--data.eval_size", "4", "--data.batch_size", "4"),
    *("--model.schedule", "constant", "--model.warmup_steps", "0", "--model.learning_rate", "1e-6"),
    *("--trainer.val_check_interval", "4", "--trainer.enable_progress_bar", "false"),
]
SHORT = ["--model.max_new_tokens", "4"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Folders of one model in three dtypes, with the same numbers, and of its teacher."""
    root, tokenizer = tmp_path_factory.mktemp("files"), grammar_tokenizer()
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = LlamaConfig(
        vocab_size=len(tokenizer), num_key_value_heads=1, tie_word_embeddings=True, **sizes, **ids
    )
    for name in (*FILES, "teacher"):
        torch.manual_seed(name == "teacher")
        model = LlamaForCausalLM(config)
        for weight in model.parameters():
            weight.data = weight.data.half().bfloat16().float()
        model.to(getattr(torch, name, torch.bfloat16)).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return root


def argv(files, stage, file, *more):
    """A tiny run; the reference of a policy has the same numbers, in a file of float32."""
    path, reference = str(files / file), str(files / "float32")
    own = {
        "sft": ("--model.policy_path", path),
        "reward": ("--model.backbone_path", path),
        "dpo": ("--model.policy_path", path, "--model.reference_path", reference, *SHORT),
        "rloo": ("--model.policy_path", path, "--model.reference_path", reference, *SHORT),
        "distill": ("--model.policy_path", path, "--model.reference_path", str(files / "teacher"), *SHORT),
    }
    own["distill"] += ("--kl.estimator", "RaoBlackwell")  # whose settings do not depend on max_steps
    return ["fit", "--config", f"configs/demo/{stage}.yaml", *TINY, *own[stage], *more]


@pytest.mark.parametrize(("stage", "file", "precision", "lora", "then"), ROWS)
def test_what_is_trained(files, tmp_path, capsys, stage, file, precision, lora, then):
    run, dtype = tmp_path / "run", torch.bfloat16 if precision == "bf16-true" else torch.float32
    options = argv(files, stage, file, *lora, "--trainer.precision", precision)
    two = ["--trainer.devices", "2", "--trainer.strategy", "fsdp2", "--data.batch_size", "2"]
    log, there = tmp_path / "log", ["--trainer.max_steps", "4", "--trainer.default_root_dir", str(run)]
    if then == "sharded":
        in_processes(2, main, [*options, *there, *two], log)
    else:
        assert main([*options, *there]) == 0
    said = log.read_text() if then == "sharded" else capsys.readouterr().out
    assert ("updates smaller than 1/256 of a weight are lost" in said) == (precision == "bf16-true")

    content = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    (optimizer,) = content["optimizer_states"]
    moments = [
        value for state in optimizer["state"].values() for value in (state["exp_avg"], state["exp_avg_sq"])
    ]
    assert moments
    assert {moment.dtype for moment in moments} == {dtype}
    share = moved(content["state_dict"], files / "float32")
    assert (
        share < 0.1 if precision == "bf16-true" and not lora else share > (0.6 if stage == "reward" else 0.97)
    )
    if lora:
        base = {weight.dtype for name, weight in content["state_dict"].items() if "base_layer" in name}
        assert base == {torch.bfloat16 if (file, precision) == ("bfloat16", "bf16-mixed") else dtype}
    if stage in ("dpo", "rloo"):
        assert logged(run, "val/kl")[0] == 0
    if stage == "dpo":
        assert logged(run, "train/loss")[0] == pytest.approx(math.log(2), abs=1e-7)
    {"resumed": check_resumed, "exported": check_exported, "sharded": lambda *_: None}[then](
        run, options, stage
    )


def moved(state, start):
    """The share of weights that are not those of the file; with an adapter that of its second factor."""
    before = load_model("policy_path", str(start)).state_dict()
    lora = any("lora_" in name for name in state)
    compared = [
        weight != (0 if lora else before[name.partition(".")[2]])
        for name, weight in state.items()
        if ("lora_B" in name if lora else name.partition(".")[2] in before)
    ]
    return torch.cat([part.flatten() for part in compared]).double().mean().item()


def check_resumed(run, options, stage):
    """A run that was stopped has the same weights as one that was not."""
    other, checkpoint = run.with_name("stopped"), run.with_name("stopped") / "checkpoints" / "last.ckpt"
    there = ["--trainer.default_root_dir", str(other)]
    assert main([*options, *there, "--trainer.max_steps", "2"]) == 0
    assert main([*options, *there, "--trainer.max_steps", "4", "--ckpt_path", str(checkpoint)]) == 0
    assert equal(weights_of(other), weights_of(run))


def check_exported(run, options, stage):
    """What is read again has the numbers of the checkpoint, in the dtype in which they were trained."""
    checkpoint = str(run / "checkpoints" / "last.ckpt")
    stored = weights_of(run)
    if stage == "reward":  # a reward model is read from its checkpoint
        read = load_model("reward_path", checkpoint, CLASSIFIER).state_dict()
        assert all(
            torch.equal(read[name.removeprefix("classifier.")], weight) for name, weight in stored.items()
        )
        return
    folder = run.with_name("folder")
    assert main(["export", "--ckpt_path", checkpoint, "--output_dir", str(folder)]) == 0
    read, policy = AutoModelForCausalLM.from_pretrained(folder), load_model("policy_path", checkpoint)
    assert read.dtype == stored["policy.lm_head.weight"].dtype or has_adapter(policy)
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        before = policy.eval()(tokens).logits
        after = (merged(policy) if has_adapter(policy) else policy).to(read.dtype)
        assert equal(read.state_dict(), after.state_dict())
        torch.testing.assert_close(read.eval().float()(tokens).logits, before, rtol=0.02, atol=2e-3)


def test_a_student_that_is_its_teacher_has_a_kl_of_0(files, tmp_path):
    options = argv(files, "distill", "bfloat16", "--model.reference_path", str(files / "float16"))
    options += ["--trainer.precision", "bf16-mixed", "--trainer.default_root_dir", str(tmp_path)]
    assert main([*options, "--trainer.max_steps", "1"]) == 0
    assert logged(tmp_path, "val/kl")[0] == 0
    assert logged(tmp_path, "train/loss")[0] == 0


def test_check_and_the_first_lines_of_a_run_say_the_dtypes(files, tmp_path, capsys):
    line = "policy float32 (file: bfloat16), reference bfloat16, computed in bfloat16"
    options = argv(files, "rloo", "bfloat16", "--model.reference_path", str(files / "bfloat16"))
    options += ["--trainer.precision", "bf16-mixed", "--trainer.default_root_dir", str(tmp_path)]
    assert main(["check", *options[1:]]) == 0
    assert f", {line}\n" in capsys.readouterr().out
    assert main([*options, "--trainer.max_steps", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == f"weights: {line}"


def test_a_trainer_of_another_precision_evaluates_the_same_module(files):
    module = RLOOModule(
        policy_path=str(files / "bfloat16"),
        reference_path=str(files / "bfloat16"),
        reward_path={"grammar": 1.0},
        lora={"r": 2},
        max_new_tokens=4,
    )
    options = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
    }
    options |= {"enable_model_summary": False, "limit_val_batches": 1}
    for precision in ("bf16-mixed", "32-true", "bf16-true", "bf16-mixed"):
        data = PromptDataModule(batch_size=4, train_size=16, eval_size=4)
        (found,) = Trainer(precision=precision, **options).validate(module, data, verbose=False)
        assert found["val/kl"] == 0
        base = {model.lm_head.weight.dtype for model in (module.policy, module.reference)}
        assert base == {torch.float32 if precision == "32-true" else torch.bfloat16}

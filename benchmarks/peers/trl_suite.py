"""TRL's own tests of its trainers, with them as they are and with their KL by an estimator of this package.

`python -m benchmarks.peers.trl_suite CHECKOUT` takes a checkout of TRL's repository, or its path in the
variable TRL_CHECKOUT, and works in a folder that is deleted. The tests name models and data of the hub: tiny
models with new weights are made under these names, and prompts of this file stand for the data set. A test
counts if it passes with TRL alone. With an estimator, those in `REFUSED` end with its line, and all others
pass; the exit code is 1 if not.

As a plugin of pytest this module puts the wrapped trainers into `trl`, before the tests import them.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TESTS = (
    "tests/test_rloo_trainer.py",
    "tests/test_grpo_trainer.py",
    "tests/experimental/test_distillation_trainer.py",
    "tests/experimental/test_server_distillation_trainer.py",
)
SHARED = ("tests/__init__.py", "tests/conftest.py", "tests/testing_utils.py", "tests/testing_constants.py")
# Parts of a test's name -> how the error begins with which its trainer is refused.
REFUSED = {
    "test_train[trl-internal-testing/tiny-GptOssForCausalLM]": "router_aux_loss_coef: must be 0.0",
    "test_train[trl-internal-testing/tiny-Qwen3MoeForCausalLM]": "router_aux_loss_coef: must be 0.0",
    "test_train_multiple_iterations": "off_policy: must not be none with 2 optimizer steps per rollout",
    "test_train_sequence_importance_sampling": "off_policy: must not be none with 2 optimizer steps",
    "test_train_beta_zero": "beta: must not be 0",
    "test_train_with_generation_kwargs": "num_beams: must be 1",
    "test_train_with_additional_generation_kwargs": "top_p: must be 1",
    "static_entropy": "entropy_coef: must be 0.0",
    "adaptive_entropy": "entropy_coef: must be 0.0",
    "test_entropy_bonus_scale": "entropy_coef: must be 0.0",
    "test_loss_normalizes_by_num_items_in_batch": "beta: must be 1, got 0.5",
    # The test replaces TRL's client of a server that does not exist
    "test_reverse_kl_finite_grad_with_ragged_batch": "teacher_model_server_url: http://fake-teacher.invalid",
}
# GRPO's default is no KL at all, which is refused. The weight with which its tests are run
GRPO_BETA = 0.04
OPTIONS = ("-q", "-p", "no:cacheprovider", "--no-header", "-W", "ignore", "--continue-on-collection-errors")
# Variables of the child processes: whether trainers are wrapped, and the file of the results
WRAPPED, RESULTS = "LIT_KLRB_TRL_WRAPPED", "LIT_KLRB_TRL_RESULTS"
HUB = "trl-internal-testing"
SMALL = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# Name on the hub -> the type of the model, and settings besides `SMALL`.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny-Qwen2ForCausalLM-2.5": ("qwen2", {}),
    "tiny-Qwen2ForSequenceClassification-2.5": ("qwen2", {}),
    "tiny-Qwen3ForCausalLM": ("qwen3", {"head_dim": 4}),
    "tiny-Qwen3ForSequenceClassification": ("qwen3", {"head_dim": 4}),
    "tiny-Qwen3MoeForCausalLM": ("qwen3_moe", {"head_dim": 4, **EXPERTS}),
    "tiny-Glm4MoeForCausalLM": ("glm4_moe", {"n_routed_experts": 4, "num_experts_per_tok": 2, "head_dim": 4}),
    "tiny-GptOssForCausalLM": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 4}),
    "tiny-Cohere2ForCausalLM": ("cohere2", {}),
    "tiny-Gemma2ForCausalLM": ("gemma2", {"head_dim": 4}),
    "tiny-LlamaForCausalLM-3.2": ("llama", {}),
    "tiny-LlamaForSequenceClassification-3.2": ("llama", {}),
    "tiny-MistralForCausalLM-0.2": ("mistral", {}),
}
# The ids that the tests know
ENDS = {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROMPTS = {
    "train": ("Beautiful is better than", "Explicit is", "Simple is better", "Flat is"),
    "test": ("Errors", "Now"),
}


def make_models(folder: Path) -> None:
    """Write tiny models with new weights in bfloat16 and a tokenizer of bytes, under the names of the hub."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        PreTrainedTokenizerFast,
    )

    tokens = {
        letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    } | ENDS
    pad, begin, end = ENDS
    bytes_alone = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    special = {"eos_token": end, "pad_token": pad, "additional_special_tokens": [begin]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_alone, **special)
    tokenizer.chat_template = TEMPLATE
    of_text = {"vocab_size": max(ENDS.values()) + 1, "eos_token_id": tokenizer.eos_token_id}
    of_text |= {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    for name, (kind, settings) in MODELS.items():
        torch.manual_seed(0)
        classifies = "SequenceClassification" in name
        spread = 1.0 if classifies else 0.02  # so that rewards differ
        config = AutoConfig.for_model(
            kind, **{**SMALL, **of_text, **settings}, num_labels=1, initializer_range=spread
        )
        auto = AutoModelForSequenceClassification if classifies else AutoModelForCausalLM
        auto.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def make_data(folder: Path) -> None:
    """Write prompts as texts and as messages, in the place of TRL's data set."""
    shapes = {
        "standard_prompt_only": lambda text: text,
        "conversational_prompt_only": lambda text: [{"role": "user", "content": text}],
    }
    lines = ["---", "configs:"]
    for name, shape in shapes.items():
        lines += [f"- config_name: {name}", "  data_files:"]
        for split, prompts in PROMPTS.items():
            path = folder / "zen" / name / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps({"prompt": shape(text)}) + "\n" for text in prompts), "utf-8")
            lines += [f"  - split: {split}", f"    path: {name}/{split}.jsonl"]
    (folder / "zen" / "README.md").write_text("\n".join([*lines, "---", ""]), "utf-8")


def run_tests(folder: Path, wrapped: bool, chosen: str) -> dict[str, str]:
    """The tests in a process of their own: name -> "passed", "skipped", or the last line of the error."""
    results = folder / f"results-{wrapped}.json"
    tests = [path for path in TESTS if (folder / path).exists()]
    command = [sys.executable, "-m", "pytest", *tests, "-p", __spec__.name, "-k", chosen, *OPTIONS]
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        **{"PYTHONPATH": os.pathsep.join(filter(None, paths)), RESULTS: str(results)},
        **{WRAPPED: "1" if wrapped else "", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")},
        **{"TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
    }
    with (folder / f"output-{wrapped}.txt").open("w") as output:
        subprocess.run(command, cwd=folder, env=environment, stdout=output, stderr=output, check=False)
    outcomes: dict[str, str] = json.loads(results.read_text("utf-8"))
    return outcomes


def compare(plain: dict[str, str], wrapped: dict[str, str]) -> tuple[str, list[str]]:
    """A table of what passes and what is refused, and a line for each test that ends otherwise."""
    passed = [name for name, outcome in plain.items() if outcome == "passed"]
    lines = ["| tests of | pass with TRL alone | with an estimator |", "| --- | --- | --- |"]
    for path in TESTS:
        of_file = [name for name in passed if name.startswith(path)]
        same = sum(wrapped.get(name) == "passed" for name in of_file)
        lines.append(f"| {path} | {len(of_file)} | {same} |")
    lines += ["", "| refused | why |", "| --- | --- |"]
    problems = []
    for name in passed:
        outcome, short = wrapped.get(name, "not run"), name.split("::", 1)[-1]
        outcome = outcome.removeprefix("lit_klrb.errors.ConfigurationError: ")
        expected = next((line for part, line in REFUSED.items() if part in name), "passed")
        if not outcome.startswith(expected):
            problems.append(f"{short}: {outcome}; expected: {expected}")
        elif outcome != "passed":
            lines.append(f"| {short} | {outcome} |")
    return "\n".join(lines), problems if passed else ["no test passes with TRL alone"]


def missing_package(name: str) -> Any:
    """The function that says that an optional package is not installed."""
    if name.startswith("is_"):
        return lambda: False
    raise AttributeError(name)


def pytest_configure(config: Any) -> None:
    """Put wrapped trainers into `trl`; called by pytest with this module as a plugin."""
    import trl
    from trl import import_utils

    # The tests may be of another version, which has other names
    vars(import_utils)["__getattr__"] = missing_package
    moved = types.ModuleType("trl.experimental.distillation.distillation_trainer")
    moved._RepeatBatchDataLoader = None  # type: ignore[attr-defined]
    sys.modules.setdefault(moved.__name__, moved)
    if not os.environ.get(WRAPPED):
        return
    from trl.experimental import distillation, server_distillation

    from lit_klrb.engine import served
    from lit_klrb.integrations.trl import with_kl_estimator

    served.PAUSES = ()
    for module in (trl, distillation, server_distillation):
        for name in ("RLOOTrainer", "GRPOTrainer", "DistillationTrainer", "ServerDistillationTrainer"):
            if hasattr(module, name):
                setattr(module, name, with_kl_estimator(getattr(module, name)))
    check = trl.GRPOConfig.__post_init__

    def with_a_kl(config: Any) -> None:
        config.beta = config.beta or GRPO_BETA
        check(config)

    trl.GRPOConfig.__post_init__ = with_a_kl


_OUTCOMES: dict[str, str] = {}


def pytest_runtest_logreport(report: Any) -> None:
    """Note how a test ended."""
    if report.passed and report.when != "call":
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    outcome = (
        report.outcome if report.outcome != "failed" else str(getattr(crash, "message", report.longrepr))
    )
    _OUTCOMES[report.nodeid] = outcome.strip().splitlines()[0][:300]


def pytest_sessionfinish(session: Any) -> None:
    """Write the outcomes."""
    Path(os.environ[RESULTS]).write_text(json.dumps(_OUTCOMES, indent=1), "utf-8")


def main() -> None:
    """Run both, print the table, and end with 1 if a test ends otherwise than is known."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.trl_suite", description=__doc__)
    parser.add_argument(
        "checkout", nargs="?", default=os.environ.get("TRL_CHECKOUT"), help="of TRL's repository"
    )
    parser.add_argument(
        "--only", default="not VLM", help="an expression of names as of pytest's -k (not VLM)"
    )
    arguments = parser.parse_args()
    if arguments.checkout is None or not Path(arguments.checkout, TESTS[0]).exists():
        parser.error(f"{arguments.checkout} has no {TESTS[0]}: give a checkout of TRL's repository")
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in (*SHARED, *TESTS, "tests/experimental/__init__.py"):
            if (source := Path(arguments.checkout, path)).exists():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, folder / path)
        (folder / "pytest.ini").write_text("[pytest]\n")  # not one of a folder above
        make_models(folder / HUB)
        make_data(folder / HUB)
        with ThreadPoolExecutor(2) as side_by_side:
            outcomes = side_by_side.map(
                lambda wrapped: run_tests(folder, wrapped, arguments.only), (False, True)
            )
        table, problems = compare(*outcomes)
    print(table)
    print(f"\n{time.monotonic() - start:.0f} s")
    for problem in problems:
        print(f"unexpected: {problem}")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()

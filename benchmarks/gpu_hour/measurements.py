"""The measurements of `python -m benchmarks.gpu_hour`, each in a process of its own."""

import json
import os
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from benchmarks import op, step_case as case
from benchmarks.gpu_hour.__main__ import FOLDER
from benchmarks.measure import DEVICE, matrix_product_rate
from benchmarks.step import Trainer, ratio
from benchmarks.turns import take_turns
from lit_klrb.engine.generation import Sampling, generate_completions
from lit_klrb.files import new_folder

# Hidden size, intermediate size, layers, heads and heads of keys of Qwen3, whose heads have 128 dimensions.
SHAPES = {
    "0.6B": (1024, 3072, 28, 16, 8),
    "1.7B": (2048, 6144, 28, 16, 8),
    "4B": (2560, 9728, 36, 32, 8),
    "8B": (4096, 12288, 36, 32, 8),
    "14B": (5120, 17408, 40, 40, 8),
    "32B": (5120, 25600, 64, 64, 8),
}
VOCABULARY, TINY = 151_936, (32, 64, 2, 2, 1)
ROUNDS = 5
Row = dict[str, Any]


def shape(size: str, small: bool) -> dict[str, Any]:
    """The configuration of a model of Qwen3's shape; a tiny one for the stand-in."""
    hidden, inner, layers, heads, key_heads = TINY if small else SHAPES[size]
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": 16 if small else 128,
        "vocab_size": case.VOCABULARY if small else VOCABULARY,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": size in ("0.6B", "1.7B", "4B"),
    }


def folder_of(small: bool) -> Path:
    """A folder with an untrained model of Qwen3-0.6B's shape in bfloat16, written once."""
    folder = FOLDER / "models" / ("tiny" if small else "0.6B")
    if not folder.exists():
        with new_folder(folder) as partial:
            case.write_tokenizer(partial, case.VOCABULARY if small else VOCABULARY)
            torch.manual_seed(0)
            ends = {
                "bos_token_id": None,
                "eos_token_id": case.VOCABULARY - 1,
                "pad_token_id": case.VOCABULARY - 2,
            }
            model = AutoModelForCausalLM.from_config(Qwen3Config(**shape("0.6B", small), **ends))
            model.to(torch.bfloat16).save_pretrained(partial)
    return folder.absolute()


def task_of(small: bool) -> case.Task:
    """Prompts with four completions each."""
    prompts, tokens = (2, 8) if small else (64, 64)
    texts = [case.words(ids) for ids in case.draw(prompts, case.PROMPT_TOKENS, 1)]
    return case.Task(folder_of(small), texts, 4, tokens, "bf16-mixed", spread=tokens // 2)


def tests(path: str, small: bool) -> Row:
    """A file or folder of tests, on the GPU."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        **({} if small else {"LIT_KLRB_TEST_ACCELERATOR": "gpu"}),
    }
    quick = ["--collect-only"] if small else ["-n", "4", "--dist", "worksteal"]
    command = [sys.executable, "-m", "pytest", "-q", *quick, path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    lines = done.stdout.strip().splitlines() or [""]
    failed = [line.partition(" ")[2] for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {
        "passed": done.returncode == 0,
        "summary": lines[-1].strip("= "),
        "failed": "; ".join(failed)[:500],
    }


def step(work: str, small: bool) -> Row:
    """A step of training beside TRL's, in turns."""
    task, rounds = task_of(small), 1 if small else ROUNDS
    options = {"inner_epochs": 1} if work == "rloo" else {}
    own = {"estimator": "RaoBlackwellControlVariate"} if work == "rloo" else {}
    pair = Trainer(f"our_{work}", own | options), Trainer(f"trl_{work}", options)
    ours, other = take_turns([trainer.on(task) for trainer in pair], 1 + rounds)
    times = {"ours": ours.seconds[1:], "other": other.seconds[1:]}
    on_policy = work in ("rloo", "distill")
    operations = task.operations(1) if on_policy else task.pair_operations(whole=work == "sft")
    seconds = {name: statistics.median(values) for name, values in times.items()}
    peak = matrix_product_rate(task.dtype)
    return {
        "ours, s": seconds["ours"],
        "TRL, s": seconds["other"],
        "ours / TRL": ratio(times),
        "of the peak": f"{operations / peak / seconds['ours']:.0%}",
        "TRL, of the peak": f"{operations / peak / seconds['other']:.0%}",
        "ours, GB": ours.megabytes / 1e3,
        "TRL, GB": other.megabytes / 1e3,
    }


def dtypes(small: bool) -> Row:
    """The types of the weights that are trained, of a file in bfloat16."""
    from benchmarks import step_runs

    task = task_of(small)
    return {"ours": step_runs.our_dtype(task), "TRL": step_runs.trl_dtype(task)}


def tiled_loss(head: str, small: bool) -> Row:
    """The tiled loss and its rivals at one size of the head."""
    return {"text": op.report(head, small)}


class ProfiledClock:
    """Stands for the clock of a training, and profiles its steps after the first."""

    def __init__(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        activities += [torch.profiler.ProfilerActivity.CUDA] * (DEVICE.type == "cuda")
        self.profiler = torch.profiler.profile(activities=activities)
        self.steps, self.began = 0, 0.0

    def begin(self) -> None:
        """Nothing: the first step makes what all use."""

    def tick(self, steps: int) -> None:
        """A step has ended."""
        self.steps += 1
        if self.steps == 1:
            _wait()
            self.began = time.perf_counter()
            self.profiler.start()

    def table(self) -> str:
        """Seconds of a step, of the device in it, and the operations that take most."""
        _wait()
        seconds = time.perf_counter() - self.began
        self.profiler.stop()
        found, steps = self.profiler.key_averages(), self.steps - 1
        kind = "self_device_time_total" if DEVICE.type == "cuda" else "self_cpu_time_total"
        busy = sum(getattr(event, kind) for event in found) / 1e6
        head = f"{seconds / steps:.3f} s per step, of which the device computes {busy / steps:.3f} s; "
        head += f"{sum(event.count for event in found) // steps:,} operations."
        return f"{head}\n\n```\n{found.table(sort_by=kind, row_limit=15, max_name_column_width=60)}\n```"


def profile(who: str, work: str, small: bool) -> Row:
    """A profile of steps of this package, or of TRL."""
    from benchmarks import step_runs

    clock: Any = ProfiledClock()
    getattr(step_runs, f"{who}_{work}")(task_of(small), clock, 2 if small else 4)
    return {"text": clock.table()}


def largest(kind: str, size: str, small: bool) -> Row:
    """Two steps of SFT with a batch of 4 texts of 512 tokens, without a reference."""
    from benchmarks import step_runs

    sizes, length = shape(size, small), 16 if small else 512
    del sizes["vocab_size"]  # follows from the tokenizer
    options: dict[str, Any] = {"gradient_checkpointing": kind == "gradient checkpointing"}
    options["lora"] = {"r": 8} if kind == "LoRA" else None
    tokens = torch.randint(case.VOCABULARY - 2, (4, length))
    batch = {"tokens": tokens, "attention_mask": torch.ones_like(tokens, dtype=torch.bool)}
    try:
        number, seconds = step_runs.our_new_weights(
            {"model_type": "qwen3", **sizes}, str(folder_of(small)), batch, options
        )
    except torch.OutOfMemoryError:
        return {"fits": False}
    peak = torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else 0
    return {
        "fits": True,
        "parameters": number,
        "GB": peak / 1e9,
        "bytes per parameter": peak / number,
        "s per step": seconds,
    }


def rollouts(backend: str, small: bool) -> Row:
    """Sampling with one backend; of vLLM also KL(vLLM‖policy), in nats per sequence."""
    if backend == "vllm" and find_spec("vllm") is None:
        return {"error": "vllm is not installed"}
    policy: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder_of(small), dtype=torch.bfloat16)
    policy.to(DEVICE).eval()
    count, length = (2, 8) if small else (64, 128)
    prompts = torch.randint(case.VOCABULARY - 2, (count, 16), generator=torch.Generator().manual_seed(0)).to(
        DEVICE
    )
    sampling, mask = Sampling(4, length), torch.ones_like(prompts)
    sample: Any = generate_completions
    if backend == "vllm":
        from lit_klrb.engine.vllm import VLLMBackend

        sample = VLLMBackend({"max_model_len": 512, "gpu_memory_utilization": 0.5})
    seconds = []
    for seed in range(1 + (1 if small else 3)):
        _wait()
        began = time.perf_counter()
        with torch.no_grad():
            rollout = sample(policy, prompts, mask, sampling, seed=seed, ends=[], pad_token_id=0)
        _wait()
        seconds.append(time.perf_counter() - began)
    row = {
        "s": statistics.median(seconds[1:]),
        "tokens per s": rollout.mask.sum().item() / statistics.median(seconds[1:]),
    }
    if rollout.logprobs is not None:
        from benchmarks.engines.vllm_rollouts import divergence

        row["sampler KL"], _ = divergence(policy, rollout, sampling.temperature)
    return row


def _wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def main(request: str, answer: str) -> None:
    """Make a measurement, and write its result."""
    function, *arguments = json.loads(request)
    result = globals()[function](*arguments)
    Path(answer).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])

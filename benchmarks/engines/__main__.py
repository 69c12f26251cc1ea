"""Run each engine on this machine and print what it did: `make engines` installs them.

usage: python -m benchmarks.engines [vllm] [ray] [slurm] [loggers]
"""

import csv
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lit_klrb import schema

RUNS = Path("runs/engines")
SAMPLER_KL = "train/sampler_kl"
SHARDED = ["--trainer.strategy", "fsdp2"]
LLAMA = (
    "{model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, "
    "num_attention_heads: 2, max_position_embeddings: 64}"
)
SMALL = ["--data.eval_size", "64", "--trainer.enable_progress_bar", "false"]


def module(*words: object, processes: int = 1) -> list[str]:
    """The command line of a module of Python, by torchrun if in several processes."""
    torchrun = ["torch.distributed.run", "--nproc_per_node", str(processes), "-m"] if processes > 1 else []
    return [sys.executable, "-m", *torchrun, *map(str, words)]


def ran(title: str, command: Sequence[str]) -> bool:
    """Run a command with its output in a log; print its exit code, its time and what counts in it."""
    started, log = time.monotonic(), RUNS / f"{title.replace(' ', '_')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    lines = log.read_text(errors="replace").splitlines()
    print(f"{title}: exit code {code}, {time.monotonic() - started:.0f} s", flush=True)
    said = [line for line in lines if line.startswith("vLLM, ") or " passed" in line]
    print("\n".join(f"  {line}" for line in (said if code == 0 else lines[-8:])), flush=True)
    return code == 0


def fit(title: str, stage: str, *words: object) -> bool:
    """Run a stage of the demo in a folder of the title's name."""
    root = RUNS / title.replace(" ", "_")
    shutil.rmtree(root, ignore_errors=True)
    where = ["--config", f"configs/demo/{stage}.yaml", "--trainer.default_root_dir", root]
    done = ran(title, module("lit_klrb", "fit", *where, *SMALL, *words))
    for path in sorted(root.rglob("metrics.csv")):
        with path.open() as rows:
            found = [row[SAMPLER_KL] for row in csv.DictReader(rows) if row.get(SAMPLER_KL)]
        if found:
            print(f"  {SAMPLER_KL}: {', '.join(f'{float(value):.1e}' for value in found)}")
    return done


def vllm() -> bool:
    """Rollouts beside the policy, alone and in two processes, and RLOO with them."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    direct = "benchmarks.engines.vllm_rollouts"
    done = [
        ran("vllm", module(direct)),
        ran("vllm in two processes", module(direct, processes=2)),
        ran("vllm with FSDP2", module(direct, "--shard", processes=2)),
        fit("sft", "sft", "--model.policy_config", LLAMA, "--trainer.max_steps", 60),
    ]
    start = RUNS / "sft" / schema.CHECKPOINT
    options = "{max_model_len: 64, enforce_eager: true}"
    words = ["--model.policy_path", start, "--model.reference_path", start, "--trainer.max_steps", 6]
    words += ["--model.rollout_backend", "vllm", "--model.vllm_options", options]
    two = ["--trainer.devices", 2]
    for title, more in {
        "rloo with vllm": [],
        "rloo with vllm and LoRA": ["--model.lora", "{r: 4}"],
        "rloo with vllm and DDP": [*two, "--trainer.strategy", "ddp"],
        "rloo with vllm and FSDP2": [*two, *SHARDED],
    }.items():
        done.append(fit(title, "rloo", *words, *more))
    return all(done)


def ray() -> bool:
    """A sweep on a cluster of two nodes, one of which is killed."""
    tests = "tests/analysis/sweep/test_sweep_ray.py"
    return ran("ray", module("pytest", "-q", "-W", "default", "-m", "slow", tests))


def slurm() -> bool:
    """A sweep by jobs of SLURM, beside the local launcher."""
    if (
        shutil.which("sinfo") is None
        or subprocess.run(["sinfo"], capture_output=True, check=False).returncode
    ):
        print("slurm: left out, as no controller answers on this machine (sinfo)")
        return True
    plan = ["--config", "configs/demo/sweep.yaml"]
    return ran("slurm", module("analysis", "sweep", *plan, "--launcher", "slurm"))


def loggers() -> bool:
    """A run with W&B offline, and one with MLflow."""
    kinds, database = "lightning.pytorch.loggers", f"sqlite:///{RUNS.absolute()}/mlflow.db"
    wandb = [f"{kinds}.WandbLogger", "--trainer.logger.offline", "true", "--trainer.logger.save_dir", RUNS]
    mlflow = [f"{kinds}.MLFlowLogger", "--trainer.logger.tracking_uri", database]
    few = ["--trainer.max_steps", 10, "--trainer.val_check_interval", 10, "--data.train_size", 400]
    return all(
        [
            fit("wandb", "sft", *few, "--trainer.logger", *wandb),
            fit("mlflow", "sft", *few, "--trainer.logger", *mlflow),
        ]
    )


def main() -> int:
    """Run the parts that are named, or all; 1 if one fails."""
    parts: dict[str, Callable[[], bool]] = {"vllm": vllm, "ray": ray, "slurm": slurm, "loggers": loggers}
    return int(not all([parts[name]() for name in sys.argv[1:] or parts]))


if __name__ == "__main__":
    sys.exit(main())

"""Run each engine on this machine and print what it did: `make engines` installs them.

usage: python -m benchmarks.engines [teacher] [slurm] [vllm] [ray] [loggers] [smollm2]
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.engines import slurm, teacher
from benchmarks.engines.commands import (
    RUNS,
    checkpoint_of,
    fit,
    fit_command,
    module,
    new_folder,
    ran,
    running,
    small_llama,
    tell,
    wait_until,
)
from lit_klrb import schema

SHARDED = ["--trainer.strategy", "fsdp2"]
SMOLLM2 = Path("runs/models/smollm2")
LOGGERS = "lightning.pytorch.loggers"


def vllm() -> bool:
    """Rollouts beside the policy, alone and in two processes, and RLOO with them."""
    direct = "benchmarks.engines.vllm_rollouts"
    done = [
        ran("vllm", module(direct)),
        ran("vllm in two processes", module(direct, processes=2)),
        ran("vllm with FSDP2", module(direct, "--shard", processes=2)),
    ]
    start = small_llama()
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


def smollm2() -> bool | None:
    """Distillation of SmolLM2 with rollouts by vLLM, in two precisions."""
    if not (SMOLLM2 / "config.json").exists():
        print(f"smollm2: left out, as there is no {SMOLLM2} (make {SMOLLM2}/config.json)")
        return None
    options = "{max_model_len: 128, enforce_eager: true}"
    words = ["--model.rollout_backend", "vllm", "--model.vllm_options", options]
    words += ["--trainer.max_steps", "2", "--trainer.val_check_interval", "2", "--data.batch_size", "4"]
    words += ["--data.eval_size", "2", "--data.eval_batch_size", "2", "--model.evaluation_completions", "1"]
    return all(
        [
            fit(f"smollm2 {precision}", "configs/chat/distill.yaml", *words, "--trainer.precision", precision)
            for precision in ("32-true", "bf16-true")
        ]
    )


def ray() -> bool:
    """Sweeps on clusters of which a node is killed or of another kind, or whose driver is killed."""
    tests = "tests/analysis/sweep/test_sweep_ray.py"
    return ran("ray", module("pytest", "-q", "-rP", "--timeout", 1200, "-W", "default", "-m", "slow", tests))


def loggers() -> bool:
    """A run with MLflow, and one with W&B offline that is stopped and resumed."""
    few = ["--trainer.max_steps", 100, "--trainer.val_check_interval", 50, "--trainer.logger"]
    mlflow = [
        f"{LOGGERS}.MLFlowLogger",
        "--trainer.logger.tracking_uri",
        f"sqlite:///{RUNS.absolute()}/mlflow.db",
    ]
    done = [fit("mlflow", "sft", *few, *mlflow)]
    title, root = "wandb", new_folder("wandb")
    wandb = [f"{LOGGERS}.WandbLogger", "--trainer.logger.offline", "true", "--trainer.logger.save_dir", root]
    root.mkdir(parents=True)
    metrics, started = root / schema.METRICS_DIR / "attempt_0" / "metrics.csv", time.monotonic()
    with running(title, fit_command(root, "sft", *few, *wandb)) as process:
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 5, "a few steps")
        process.send_signal(signal.SIGTERM)
        process.wait()
    tell(title, 0, started)
    again = ["--config", root / schema.CONFIG, "--ckpt_path", checkpoint_of(title)]
    done.append(ran("wandb resumed", module("lit_klrb", "fit", *again)))
    names = sorted(path.name for path in root.glob("wandb/offline-run-*"))
    ids = {name.rpartition("-")[2] for name in names}
    print(f"  {len(names)} attempts of W&B, run ids {', '.join(ids)}")
    return all(done) and len(ids) == 1


def main() -> int:
    """Run the parts that are named, or all; 1 if one fails."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    # Models are so small that more threads wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parts: dict[str, Callable[[], bool | None]] = {
        "teacher": teacher.run,
        "slurm": slurm.run,
        "vllm": vllm,
        "ray": ray,
        "loggers": loggers,
        "smollm2": smollm2,
    }
    return int(not all([held(name, parts[name]) for name in sys.argv[1:] or parts]))


def held(name: str, part: Callable[[], bool | None]) -> bool:
    """Run a part, and print whether it held, if it could be run.

    Others follow even if something did not come in time.
    """
    started, good = time.monotonic(), None
    try:
        good = part()
    except TimeoutError as error:
        print(f"error: {error}")
        good = False
    said = {None: "was not run", True: "holds", False: "does not hold"}[good]
    print(f"{name} {said}, {(time.monotonic() - started) / 60:.1f} min", flush=True)
    return good is not False


if __name__ == "__main__":
    sys.exit(main())

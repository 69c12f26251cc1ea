"""Distillation from a teacher in a server of vLLM, alone, beside another one and in TRL; and a sweep.

In the sweep the server is killed and started again.
"""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

from benchmarks.engines.commands import (
    LLAMA,
    checkpoint_of,
    fit,
    kill,
    logged,
    module,
    new_folder,
    ran,
    results,
    running,
    same_results,
    small_llama,
    sweep_command,
    tell,
    wait_until,
    written,
)

PORT = 27830
HOST = f"http://127.0.0.1:{PORT}"
ADDRESS = f"{HOST}/v1"
# Seconds without a teacher: longer than the 31 s of a run's own attempts, so that a cell ends and is repeated
AWAY = 60.0
NORM = "train/grad_norm"
# Relative difference of its values, which grows from step to step by rounding.
LIMIT = 1e-4


@contextlib.contextmanager
def served(folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """The server of a teacher, once it answers, with the command of docs/distillation.md."""
    vllm = str(Path(sys.executable).with_name("vllm"))
    command = [vllm, "serve", str(folder), "--max-logprobs", "64", "--port", str(PORT)]
    with running("teacher", [*command, "--dtype", "float32", "--enforce-eager"]) as process:
        started = time.monotonic()
        wait_until(answers, "the teacher")
        print(f"the teacher answers {time.monotonic() - started:.0f} s after its command", flush=True)
        yield process


def answers() -> bool:
    """Whether the server names its models."""
    with contextlib.suppress(OSError), urlopen(f"{ADDRESS}/models", timeout=1):
        return True
    return False


def distilled() -> list[object]:
    """Options of a short distillation of the student, which reads teachers at their most likely tokens."""
    student = ["--model.policy_config", "null", "--model.policy_path", checkpoint_of("student")]
    topk = ["RaoBlackwellTopK", "--kl.estimator.k", 64, "--kl.estimator.support", "reference"]
    words = [*student, "--trainer.max_steps", 6, "--data.batch_size", 8, "--kl.estimator", *topk]
    return [*words, "--model.learning_rate", 0.0005, "--model.served_timeout", 120]


def same_norms(ours: str, theirs: str) -> bool:
    """Print by how much the gradients' norms of two runs differ, and whether that is rounding."""
    pairs = zip(logged(ours, NORM), logged(theirs, NORM), strict=True)
    differences = [abs(one / other - 1) for one, other in pairs]
    print(
        f"  {NORM} of {len(differences)} steps: within {max(differences, default=0):.1e} of itself",
        flush=True,
    )
    return bool(differences) and max(differences) < LIMIT


def alike(folder: Path) -> bool:
    """Distillation from the served teacher, beside the same teacher in memory."""
    titles = {"distillation from a server": ADDRESS, "distillation from memory": folder}
    done = [
        fit(title, "distill", *distilled(), "--model.reference_path", path) for title, path in titles.items()
    ]
    return same_norms(*titles) and all(done)


def mixed(folder: Path) -> bool:
    """Distillation from two teachers, of which a server has one, beside both in memory."""
    source = new_folder("rows of two teachers")
    source.mkdir(parents=True)
    for split, start in {"train": "The", "validation": "This"}.items():
        nouns = {"film": "a", "cast": "b", "plot": "a", "drama": "b"}
        rows = [{"prompt": f"{start} {noun} was", "teacher": name} for noun, name in nouns.items()]
        (source / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "--data.source",
        source,
        "--data.train_size",
        4,
        "--data.batch_size",
        4,
        "--model.reference_path",
        "null",
    ]
    titles = {"two teachers, one of a server": ADDRESS, "two teachers in memory": folder}
    done = []
    for title, path in titles.items():
        teachers = f"{{a: '{path}', b: {checkpoint_of('student')}}}"
        size = ["--data.eval_size", 4, "--model.teachers", teachers]
        done.append(fit(title, "distill", *distilled(), *words, *size))
    return same_norms(*titles) and all(done)


def plan_of(title: str) -> Path:
    """Four cells: two estimators, two replicates."""
    overrides = {
        "model.reference_path": ADDRESS,
        "model.policy_path": str(checkpoint_of("student").absolute()),
        "model.policy_config": None,
        "trainer.max_steps": 40,
        "trainer.val_check_interval": 40,
        "data.batch_size": 8,
        "data.eval_size": 64,
        "data.eval_batch_size": 64,
    }
    topk = {"class_path": "RaoBlackwellTopK", "init_args": {"k": 16, "support": "reference"}}
    plan = {
        "name": "teacher",
        "directory": str(new_folder(title).absolute()),
        "stages": {"distill": {"config": "configs/demo/distill.yaml", "overrides": overrides}},
        "grid": {
            "arms": {"sampled": {"kl.estimator": "MonteCarloRewardToGo"}, "top-k": {"kl.estimator": topk}},
            "beta": {0: 1.0},
            "replicates": 2,
        },
        "primary": {"control": "sampled"},
    }
    return written(title, plan)


def run() -> bool:
    """Both; in the sweep, nothing answers for a minute."""
    title, whole, folder = "sweep with a teacher killed", "sweep with a teacher", new_folder("served teacher")
    fit("student", "sft", "--model.policy_config", LLAMA, "--trainer.max_steps", 20, "--seed_everything", 1)
    where = ["--ckpt_path", small_llama(), "--output_dir", folder]
    done = [ran("export of the teacher", module("lit_klrb", "export", *where))]
    with served(folder) as server:
        done += [alike(folder), mixed(folder)]
        done.append(ran("TRL with a server", module("benchmarks.engines.trl_served", folder, HOST)))
        done.append(ran(whole, sweep_command(plan_of(whole), "--workers", 1)))
        started, command = time.monotonic(), sweep_command(plan_of(title), "--workers", 1)
        with running(title, command) as process:
            wait_until(lambda: results(title), "a result")
            time.sleep(3)  # into the next cell
            kill(server)
            lost = time.monotonic()
            print(f"the teacher is killed after {len(results(title))} results", flush=True)
            time.sleep(AWAY)
            with served(folder):
                print(f"it is back {time.monotonic() - lost:.0f} s later", flush=True)
                done.append(tell(title, process.wait(), started))
    for name in (whole, title):
        kls = [json.loads(content)["final"]["kl"] for _, content in sorted(results(name).items())]
        print(f"  final KLs of {name}: {', '.join(f'{kl:.6f}' for kl in kls)}")
    # Requests that a server batches otherwise are rounded otherwise: only counted
    same_results(title, whole)
    return all(done)

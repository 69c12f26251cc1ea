"""A stand-in for training: `python -m fake_job fit ...` writes a run directory in milliseconds.

`python -m fake_job check` answers as the real one does: an estimator whose behaviour is "refused" is refused.

Like those of training, its numbers are a function of its arguments and its initial checkpoints. The
configuration sets its duration (`seconds`), whether it waits for a minute in its first attempt (`waits`) or
ignores signals (`deaf`), and which estimators misbehave (`behaviour`). On SIGTERM it saves a checkpoint and
exits with 143; with --ckpt_path it resumes from one. The environment variable FAKE_JOB adds an error that
depends on nothing else: "noise" or "crash".
"""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import yaml

from lit_klrb import schema
from lit_klrb.stops import Stops


def main(argv):
    if argv == ["check"]:
        json.dump([check(*read(request)) for request in json.load(sys.stdin)], sys.stdout)
        return
    options, config = read(argv)
    begun = resumed_at(options.pop("ckpt_path", None))
    run = Path(options["trainer.default_root_dir"])
    ran = run.parents[1] / "ran.txt"
    with ran.open("a") as file:
        file.write(f"{run.name} {os.getpid()}\n")
    estimator = str(options.get("kl.estimator"))
    print("running", estimator)
    gpus = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    for name in gpus:  # an error if another cell has it
        (run.parents[1] / f"gpu {name}").touch(exist_ok=False)
    with (run.parents[1] / "gpus.txt").open("a") as file:
        file.write(f"{run.name} {','.join(gpus)}\n")
    sources = [
        Path(value).read_bytes().hex() for key, value in sorted(options.items()) if key.endswith("_path")
    ]
    identity = [options["seed_everything"], estimator, options.get("kl.beta"), *sources]
    identity += [options[key] for key in ("lr",) if key in options]
    digest = hashlib.sha256(json.dumps(identity).encode()).digest()
    reward, kl = (int.from_bytes(digest[i : i + 4], "big") / 2**32 for i in (0, 4))
    if os.environ.get("FAKE_JOB") == "noise":
        reward += 1
    if os.environ.get("FAKE_JOB") == "crash":
        raise OSError("no luck today")

    seconds = [config.get("seconds", 0) / 3] * 3
    if config.get("waits") and ran.read_text().count(run.name) == 1:
        seconds[2] = 60
    with Stops(later="stopping") as stops:
        write_metrics(run, reward, kl, seconds, begun, lambda: stops.asked and not config.get("deaf"))
    for name in gpus:
        (run.parents[1] / f"gpu {name}").unlink()
    misbehave(config.get("behaviour", {}).get(estimator), run, ran)
    (run / schema.CHECKPOINT).parent.mkdir(exist_ok=True)
    (run / schema.CHECKPOINT).write_bytes(digest)
    write_summary(run, schema.DONE, {schema.REWARD: reward, schema.KL: kl})


def read(argv):
    command, *pairs = argv
    assert command == "fit"
    options = {key.removeprefix("--"): value for key, value in zip(pairs[::2], pairs[1::2], strict=True)}
    return options, yaml.safe_load(Path(options["config"]).read_text())


def check(options, config):
    for key, value in options.items():
        if key.endswith("_path") and not Path(value).exists():
            return {"error": f"{key}: {value} does not exist"}
    estimator = options.get("kl.estimator")
    if config.get("behaviour", {}).get(estimator) == "refused":
        return {"error": f"{estimator} is refused for training"}
    about = {"name": estimator, "optimises": "a hash", "biased": estimator == "K3Loss"}
    batches = float(options.get("trainer.limit_val_batches", 1))
    evaluation = {"prompts": int(options.get("prompts", 8)), "trainer.limit_val_batches": batches}
    return {"module": "FakeModule", "estimator": estimator and about, "evaluation": evaluation}


def resumed_at(checkpoint):
    """The step to resume from."""
    if checkpoint is None:
        return 0
    content = Path(checkpoint).read_bytes()
    if not (len(content) == 32 or content.startswith(b"step ")):
        print("error: ckpt_path: damaged", file=sys.stderr)
        sys.exit(2)
    print("resumed")
    return 3 if len(content) == 32 else int(content[5:])


def save_and_stop(run, step):
    time.sleep(0.6)  # in which the coordinator, which looks every 0.3 s, has sent the signal once more
    (run / schema.CHECKPOINT).parent.mkdir(exist_ok=True)
    (run / schema.CHECKPOINT).write_bytes(b"step %d" % step)
    sys.exit(143)


def write_metrics(run, reward, kl, seconds, begun, asked_to_stop):
    attempt = run / schema.METRICS_DIR / f"attempt_{len(list(run.glob('metrics/*')))}"
    attempt.mkdir(parents=True)
    with (attempt / "metrics.csv").open("w") as file:
        print("step,train/reward,val/kl,time/tokens_per_second", file=file)
        for step in range(begun, 3):
            due = time.monotonic() + seconds[step]
            while time.monotonic() < due:
                if asked_to_stop():
                    save_and_stop(run, step)
                time.sleep(min(0.01, seconds[step]))
            print(f"{step},{reward * step},{kl if step == 2 else ''},{time.time()}", file=file, flush=True)


def write_summary(run, state, final):
    content = {"state": state, "final": final, "versions": {"fake_job": "1"}}
    (run / schema.SUMMARY).write_text(json.dumps(content))


def misbehave(behaviour, run, ran):
    if behaviour == "usage":
        print("error: kl.estimator: no such class", file=sys.stderr)
        sys.exit(2)
    if behaviour == "crash":
        raise RuntimeError("out of luck")
    if behaviour == "crash once" and ran.read_text().count(run.name) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "diverge":
        write_summary(run, schema.DIVERGED, {})
        sys.exit(1)
    if behaviour == "not a number":
        write_summary(run, schema.DONE, {schema.REWARD: float("nan"), schema.KL: 1.0})
        sys.exit(0)
    if behaviour == "exit 75":
        sys.exit(75)
    if behaviour == "no summary":
        sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])

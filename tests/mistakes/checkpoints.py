"""Mistakes in checkpoints: damaged ones, those of other software, and those with a single error."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from mistakes.driver import Mistake
from mistakes.places import odd_places

CHECKPOINTS: dict[str, bytes] = {
    "empty.ckpt": b"",
    "text.ckpt": b"no checkpoint\n",
    "zeros.ckpt": b"\0" * 5000,
    "binary.ckpt": bytes(range(256)) * 20,
    "pickle.ckpt": b"cos\nsystem\n(S'echo pwned >&2'\ntR.",
}


def make_checkpoints(root: Path, finished: Path) -> None:
    """Write checkpoints of the RLOO run with one error each."""
    for name, damaged_bytes in CHECKPOINTS.items():
        (root / name).write_bytes(damaged_bytes)
    odd_places(root, "ckpt")
    whole = finished / "rloo" / "checkpoints" / "last.ckpt"
    content = whole.read_bytes()
    (root / "truncated.ckpt").write_bytes(content[: len(content) // 2])
    (root / "no_end.ckpt").write_bytes(content[:-100])
    shutil.copy(whole, root / "checkpoint.pt")
    torch.save({}, root / "nothing.ckpt")
    torch.save([1, 2], root / "list.ckpt")
    torch.save(torch.zeros(3), root / "tensor.ckpt")

    def damaged(name, edit):
        checkpoint = torch.load(whole, weights_only=True)
        # With a schedule, a completed run cannot be resumed for more steps, and its learning rate is 0.
        checkpoint["run"]["settings"]["model"]["init_args"]["schedule"] = "constant"
        rates = checkpoint["lr_schedulers"][0]["base_lrs"]
        checkpoint["lr_schedulers"][0]["_last_lr"] = rates
        checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] = rates[0]
        edit(checkpoint)
        torch.save(checkpoint, root / f"{name}.ckpt")

    key = "policy.transformer.wte.weight"
    damaged("no_state", lambda c: c.pop("state_dict"))
    damaged("text_state", lambda c: c.update(state_dict="text"))
    damaged("other_shape", lambda c: c["state_dict"].update({key: torch.zeros(2, 2)}))
    damaged("missing_weight", lambda c: c["state_dict"].pop(key))
    damaged("more_weights", lambda c: c["state_dict"].update({"policy.nothing": torch.zeros(2)}))
    damaged("text_weight", lambda c: c["state_dict"].update({key: "text"}))
    damaged("nan_weights", lambda c: c["state_dict"].update({key: c["state_dict"][key] * float("nan")}))
    damaged("no_tokenizer", lambda c: c.pop("tokenizer_files"))
    damaged("empty_tokenizer", lambda c: c.update(tokenizer_files={}))
    damaged("torn_tokenizer", lambda c: c["tokenizer_files"].update({"tokenizer.json": "{"}))
    damaged("text_tokenizer", lambda c: c.update(tokenizer_files="text"))
    damaged("no_type", lambda c: c["policy_config"].pop("model_type"))
    damaged("other_type", lambda c: c["policy_config"].update(model_type="llama"))
    damaged("text_config", lambda c: c.update(policy_config="text"))
    damaged("no_loops", lambda c: c.pop("loops"))
    damaged("no_step", lambda c: c.pop("global_step"))
    damaged("no_optimizer", lambda c: c.pop("optimizer_states"))
    damaged("no_version", lambda c: c.pop("pytorch-lightning_version"))
    damaged("no_callbacks", lambda c: c.pop("callbacks"))
    damaged("text_hyper_parameters", lambda c: c.update(hyper_parameters="text"))
    damaged("no_experience", lambda c: c.pop("experience"))
    damaged("text_experience", lambda c: c.update(experience="text"))
    damaged("two_experiences", lambda c: c.update(experience=c["experience"] * 2))
    damaged("text_step", lambda c: c.update(global_step="text"))
    for name in ("callbacks", "loops", "optimizer_states", "lr_schedulers", "run", "experience"):
        for kind, value in {"text": "text", "none": None, "number": 5, "empty": {}, "one": ["text"]}.items():
            damaged(f"{name}_{kind}", lambda c, name=name, value=value: c.update({name: value}))
    for name in ("text", "empty"):
        value = {"text": "text", "empty": {}}[name]
        damaged(
            f"each_callback_{name}", lambda c, v=value: c.update(callbacks=dict.fromkeys(c["callbacks"], v))
        )
        damaged(f"each_entry_{name}", lambda c, v=value: c.update(callbacks=_with_values(c["callbacks"], v)))
        damaged(f"each_loop_{name}", lambda c, v=value: c.update(loops=dict.fromkeys(c["loops"], v)))
        damaged(
            f"fit_loop_{name}", lambda c, v=value: c["loops"].update(fit_loop=_all(c["loops"]["fit_loop"], v))
        )
        damaged(
            f"optimizer_{name}",
            lambda c, v=value: c.update(optimizer_states=[_all(c["optimizer_states"][0], v)]),
        )
        damaged(
            f"scheduler_{name}", lambda c, v=value: c.update(lr_schedulers=[_all(c["lr_schedulers"][0], v)])
        )
        damaged(
            f"experience_each_{name}", lambda c, v=value: c.update(experience=[[v] * len(c["experience"][0])])
        )
    damaged("experience_other_shapes", lambda c: c.update(experience=[_halved(c["experience"][0])]))


def _all(content: dict, value: object) -> dict:
    return dict.fromkeys(content, value)


def _with_values(content: dict, value: object) -> dict:
    return {key: _all(state, value) if isinstance(state, dict) else state for key, state in content.items()}


def _halved(state: list) -> list:
    """An experience that has the rewards of only half of its completions."""
    return [
        part[: len(part) // 2] if isinstance(part, torch.Tensor) and part.ndim == 1 else part
        for part in state
    ]


STARTS = [
    "empty",
    "text",
    "zeros",
    "binary",
    "pickle",
    "truncated",
    "no_end",
    "nothing",
    "list",
    "tensor",
    "folder",
    "fifo",
    "dangling",
    "circle",
]
DAMAGED = [
    "no_state",
    "text_state",
    "other_shape",
    "missing_weight",
    "more_weights",
    "text_weight",
    "no_tokenizer",
    "empty_tokenizer",
    "torn_tokenizer",
    "text_tokenizer",
    "no_type",
    "other_type",
    "text_config",
    "nan_weights",
]
RESUMED = [
    "no_state",
    "other_shape",
    "missing_weight",
    "more_weights",
    "no_tokenizer",
    "torn_tokenizer",
    "no_type",
    "no_loops",
    "no_step",
    "no_optimizer",
    "no_version",
    "no_callbacks",
    "text_hyper_parameters",
    "no_experience",
    "text_experience",
    "two_experiences",
    "text_step",
]
# Each is one entry of what a trainer restores, crafted.
CRAFTED = [
    *(f"{n}_{k}" for n in ("callbacks", "loops", "optimizer_states", "lr_schedulers", "run", "experience")
      for k in ("text", "none", "number", "empty", "one")),
    *(f"{n}_{k}" for n in ("each_callback", "each_entry", "each_loop", "fit_loop", "optimizer", "scheduler",
      "experience_each") for k in ("text", "empty")),
    "experience_other_shapes",
]  # fmt: skip
# Entries that are optional.
SPARED = {"no_experience", "experience_none", "text_hyper_parameters"}


def wrong_checkpoints() -> Iterator[Mistake]:
    """Each checkpoint as the initial policy; some also as reference, reward, or run to resume."""
    for name in (*STARTS, *DAMAGED):
        line = rf"model\.init_args\.policy_path: FILES/{name}\.ckpt\b"
        yield Mistake(["--model.policy_path", f"FILES/{name}.ckpt"], line)
    for key in ("reference_path", "reward_path"):
        for name in (*STARTS[::3], *DAMAGED[::3]):
            line = rf"model\.init_args\.{key}: FILES/{name}\.ckpt\b"
            yield Mistake([f"--model.{key}", f"FILES/{name}.ckpt"], line)
    for name in (*STARTS, *RESUMED, *CRAFTED):
        line = None if name in SPARED else rf"^error: ckpt_path: .*FILES/{name}\.ckpt\b"
        more = ["--trainer.max_steps", "8", "--model.schedule", "constant"]
        yield Mistake(["--ckpt_path", f"FILES/{name}.ckpt", *more], line)
    for command in ("validate", "test", "predict"):
        for name in ("truncated", "other_shape", "nothing", "fifo"):
            line = rf"^error: ckpt_path: FILES/{name}\.ckpt\b"
            yield Mistake(["--ckpt_path", f"FILES/{name}.ckpt"], line, command=command)
        yield Mistake(
            ["--ckpt_path", "/no/where.ckpt"], r"ckpt_path: /no/where\.ckpt does not exist", command=command
        )
    for stage in ("sft", "dpo", "reward"):
        other = "rloo" if stage != "rloo" else "sft"
        line = rf"CHAIN/{other}/checkpoints/last\.ckpt was trained with "
        yield Mistake(["--ckpt_path", f"CHAIN/{other}/checkpoints/last.ckpt"], line, stage)
    for path in ("best", "last", "hpc", "registry:x", "s3://bucket/x.ckpt", "", "~/none.ckpt", "FILES"):
        yield Mistake(["--ckpt_path", path], r"^error: ckpt_path: ")

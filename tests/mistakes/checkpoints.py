"""Mistakes in checkpoints: damaged ones, those of other software, and those with a single error."""

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from mistakes.driver import Mistake
from mistakes.places import KINDS, odd_places

CHECKPOINTS: dict[str, bytes] = {
    "empty": b"",
    "text": b"no checkpoint\n",
    "zeros": b"\0" * 5000,
    "binary": bytes(range(256)) * 20,
    "pickle": b"cos\nsystem\n(S'echo pwned >&2'\ntR.",
}
CONTENTS = {"nothing": {}, "list": [1, 2], "tensor": torch.zeros(3)}
STARTS = [*CHECKPOINTS, *CONTENTS, "truncated", "no_end", *KINDS]
WEIGHT = "policy.transformer.wte.weight"
WRONG = {"text": "text", "none": None, "number": 5, "empty": {}, "one": ["text"]}
Edit = Callable[[dict], object]


def _all(content: dict, value: object) -> dict:
    return dict.fromkeys(content, value)


def _halved(state: list) -> list:
    """An experience that has the rewards of only half of its completions."""
    return [
        part[: len(part) // 2] if isinstance(part, torch.Tensor) and part.ndim == 1 else part
        for part in state
    ]


# Errors that a checkpoint has wherever it is read, and those in what only a trainer restores.
DAMAGED: dict[str, Edit] = {
    "no_state": lambda c: c.pop("state_dict"),
    "text_state": lambda c: c.update(state_dict="text"),
    "other_shape": lambda c: c["state_dict"].update({WEIGHT: torch.zeros(2, 2)}),
    "missing_weight": lambda c: c["state_dict"].pop(WEIGHT),
    "more_weights": lambda c: c["state_dict"].update({"policy.nothing": torch.zeros(2)}),
    "text_weight": lambda c: c["state_dict"].update({WEIGHT: "text"}),
    "nan_weights": lambda c: c["state_dict"].update({WEIGHT: c["state_dict"][WEIGHT] * float("nan")}),
    "no_tokenizer": lambda c: c.pop("tokenizer_files"),
    "empty_tokenizer": lambda c: c.update(tokenizer_files={}),
    "torn_tokenizer": lambda c: c["tokenizer_files"].update({"tokenizer.json": "{"}),
    "text_tokenizer": lambda c: c.update(tokenizer_files="text"),
    "no_type": lambda c: c["policy_config"].pop("model_type"),
    "other_type": lambda c: c["policy_config"].update(model_type="llama"),
    "text_config": lambda c: c.update(policy_config="text"),
}
RESUMED: dict[str, Edit] = {
    "no_loops": lambda c: c.pop("loops"),
    "no_step": lambda c: c.pop("global_step"),
    "no_optimizer": lambda c: c.pop("optimizer_states"),
    "no_version": lambda c: c.pop("pytorch-lightning_version"),
    "no_callbacks": lambda c: c.pop("callbacks"),
    "text_hyper_parameters": lambda c: c.update(hyper_parameters="text"),
    "no_experience": lambda c: c.pop("experience"),
    "text_experience": lambda c: c.update(experience="text"),
    "two_experiences": lambda c: c.update(experience=c["experience"] * 2),
    "text_step": lambda c: c.update(global_step="text"),
    "experience_other_shapes": lambda c: c.update(experience=[_halved(c["experience"][0])]),
    **{
        f"{name}_{kind}": lambda c, name=name, value=value: c.update({name: value})
        for name in ("callbacks", "loops", "optimizer_states", "lr_schedulers", "run", "experience")
        for kind, value in WRONG.items()
    },
}


def _inner(value: object) -> dict[str, Edit]:
    """Every entry of a part of what a trainer restores is the same wrong value."""
    return {
        "each_callback": lambda c: c.update(callbacks=_all(c["callbacks"], value)),
        "each_entry": lambda c: c.update(
            callbacks={k: _all(s, value) if isinstance(s, dict) else s for k, s in c["callbacks"].items()}
        ),
        "each_loop": lambda c: c.update(loops=_all(c["loops"], value)),
        "fit_loop": lambda c: c["loops"].update(fit_loop=_all(c["loops"]["fit_loop"], value)),
        "optimizer": lambda c: c.update(optimizer_states=[_all(c["optimizer_states"][0], value)]),
        "scheduler": lambda c: c.update(lr_schedulers=[_all(c["lr_schedulers"][0], value)]),
        "experience_each": lambda c: c.update(experience=[[value] * len(c["experience"][0])]),
    }


RESUMED |= {f"{name}_{k}": edit for k in ("text", "empty") for name, edit in _inner(WRONG[k]).items()}
# Entries that are optional; errors of weights that a resumed run names, too.
SPARED = {"no_experience", "experience_none", "text_hyper_parameters"}
ALSO_RESUMED = [
    "no_state",
    "other_shape",
    "missing_weight",
    "more_weights",
    "no_tokenizer",
    "torn_tokenizer",
    "no_type",
]


def make_checkpoints(root: Path, finished: Path) -> None:
    """Write checkpoints of the RLOO run with one error each."""
    odd_places(root, "ckpt")
    whole = finished / "rloo" / "checkpoints" / "last.ckpt"
    content = whole.read_bytes()
    cut = {"truncated": content[: len(content) // 2], "no_end": content[:-100]}
    for name, raw in (CHECKPOINTS | cut).items():
        (root / f"{name}.ckpt").write_bytes(raw)
    shutil.copy(whole, root / "checkpoint.pt")
    for name, value in CONTENTS.items():
        torch.save(value, root / f"{name}.ckpt")
    for name, edit in (DAMAGED | RESUMED).items():
        checkpoint = torch.load(whole, weights_only=True)
        # With a schedule, a completed run cannot be resumed for more steps, and its learning rate is 0.
        checkpoint["run"]["settings"]["model"]["init_args"]["schedule"] = "constant"
        rates = checkpoint["lr_schedulers"][0]["base_lrs"]
        checkpoint["lr_schedulers"][0]["_last_lr"] = rates
        checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] = rates[0]
        edit(checkpoint)
        torch.save(checkpoint, root / f"{name}.ckpt")


def wrong_checkpoints() -> Iterator[Mistake]:
    """Each checkpoint as the initial policy; some also as reference, reward, or run to resume."""
    keys = {"policy_path": 1, "reference_path": 3, "reward_path": 3}
    for key, each in keys.items():
        for name in (*STARTS[::each], *[*DAMAGED][::each]):
            line = rf"model\.init_args\.{key}: FILES/{name}\.ckpt\b"
            yield Mistake([f"--model.{key}", f"FILES/{name}.ckpt"], line)
    for name in (*STARTS, *ALSO_RESUMED, *RESUMED):
        line = None if name in SPARED else rf"^error: ckpt_path: .*FILES/{name}\.ckpt\b"
        more = ["--trainer.max_steps", "8", "--model.schedule", "constant"]
        yield Mistake(["--ckpt_path", f"FILES/{name}.ckpt", *more], line)
    for command in ("validate", "test", "predict"):
        evaluated = partial(Mistake, command=command)
        for name in ("truncated", "other_shape", "nothing", "fifo"):
            yield evaluated(
                ["--ckpt_path", f"FILES/{name}.ckpt"], rf"^error: ckpt_path: FILES/{name}\.ckpt\b"
            )
        yield evaluated(["--ckpt_path", "/no/where.ckpt"], r"ckpt_path: /no/where\.ckpt does not exist")
    for stage in ("sft", "dpo", "reward"):
        line = r"CHAIN/rloo/checkpoints/last\.ckpt was trained with "
        yield Mistake(["--ckpt_path", "CHAIN/rloo/checkpoints/last.ckpt"], line, stage)
    for path in ("best", "last", "hpc", "registry:x", "s3://bucket/x.ckpt", "", "~/none.ckpt", "FILES"):
        yield Mistake(["--ckpt_path", path], r"^error: ckpt_path: ")

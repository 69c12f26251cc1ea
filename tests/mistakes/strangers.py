"""Files of strangers: every kind of file, with one entry or its bytes changed.

Any command line that reads one must end with exit code 0, or in one line. It must not run code, nor read,
write or delete anything outside its own folders, nor take more than forty seconds or eight gigabytes.
"""

import copy
import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from mistakes.driver import Mistake

SECRET = "correct-horse-battery-staple"
SECONDS = 40.0
# What one entry of a file is changed to; HOME stands for a folder that no file may lead to.
VALUES: list[Any] = [
    *(None, True, -1, 0, 10**9, 10**90, 1e308, float("nan"), "", "x", "HOME/secret.txt", "HOME/pipe"),
    *("/dev/zero", "../../home/new", "os:system", "(a*)*b", "\0", "\ud800", "a" * 200_000, [], {}, ["x"]),
    *(
        {"a": 1},
        [[[[]]]],
        {"__import__": "os"},
        "{{ cycler.__init__.__globals__.os.system('touch HOME/ran') }}",
    ),
    "{% for a in range(10**9) %}{% for b in range(10**9) %}{% endfor %}{% endfor %}",
]
# Keys that a stranger adds, which a library might follow.
KEYS: dict[str, Any] = {
    "auto_map": {
        "AutoConfig": "theirs.C",
        "AutoTokenizer": ["theirs.T", None],
        "AutoModelForCausalLM": "theirs.M",
    },
    "_attn_implementation": "theirs/kernel",
    "vocab_file": "HOME/secret.txt",
    "vocab": "HOME/pipe",
    "tokenizer_file": "HOME/secret.txt",
    "init_inputs": ["HOME/secret.txt"],
    "sp_model_kwargs": {"model_file": "HOME/secret.txt"},
    "tokenizer_class": "BertJapaneseTokenizer",
    "num_labels": 10**9,
    "n_layer": 10**9,
    "quantization_config": {"quant_method": "theirs"},
    "chat_template": [{"name": "../../../home/new", "template": "x"}],
    "target_modules": "(a*)*b",
    "megatron_core": "theirs",
    "extends": "HOME/secret.txt",
}


# Makes a document of another and the folder that no file may lead to.
Edit = Callable[[Any, Path], Any]


def at_home(value: Any, home: Path) -> Any:
    """A value with the path of the folder in it."""
    if isinstance(value, dict):
        return {key: at_home(part, home) for key, part in value.items()}
    if isinstance(value, list):
        return [at_home(part, home) for part in value]
    return value.replace("HOME", str(home)) if isinstance(value, str) else value


def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all entries of a nested document, at most ten of each mapping or list."""
    items = list(content.items()) if isinstance(content, dict) else list(enumerate(content))
    for key, part in items[:40]:
        yield (*path, key)
        if isinstance(part, (dict, list)) and len(path) < 4:
            yield from places(part, (*path, key))


def changed(content: Any, place: tuple[Any, ...], value: Any) -> Any:
    """A copy of a document with one other entry."""
    found = copy.deepcopy(content)
    parent = found
    for key in place[:-1]:
        parent = parent[key]
    parent[place[-1]] = value
    return found


def of_entries(
    content: Any, name: str, count: int, seed: int
) -> Iterator[tuple[str, Callable[[Any, Path], Any]]]:
    """So many changes of a document, all different: one entry with another value, or another entry."""
    draw, every = random.Random(f"{name} {seed}"), list(places(content))
    for key, value in KEYS.items():
        yield f"+{key}", lambda c, home, k=key, v=value: changed(c, (k,), at_home(v, home))
    changes = list(product(every, VALUES))
    for place, value in draw.sample(changes, min(count, len(changes))):
        shown = f"{'.'.join(map(str, place))[:60]}={str(value)[:20]!a}"
        yield shown, lambda c, home, p=place, v=value: changed(c, p, at_home(v, home))


def _bytes(path: Path, edit: Callable[[bytes], bytes]) -> None:
    path.write_bytes(edit(path.read_bytes()))


def _replaced(path: Path, make: Callable[[Path], None]) -> None:
    path.unlink()
    make(path)


def _flipped(content: bytes, where: float) -> bytes:
    index = int(where * (len(content) - 1))
    return content[:index] + bytes([content[index] ^ 4]) + content[index + 1 :]


def _sparse(path: Path) -> None:
    os.truncate(path, 2**42)


# Changes of the bytes of a file, or of what is in its place.
DAMAGES: dict[str, Callable[[Path, Path], None]] = {
    **{f"cut at {n}/8": lambda p, _, n=n: _bytes(p, lambda c: c[: len(c) * n // 8]) for n in range(8)},
    **{f"bit {n}": lambda p, _, n=n: _bytes(p, partial(_flipped, where=n / 8)) for n in range(9)},
    "zeros": lambda p, _: _bytes(p, lambda c: bytes(len(c))),
    "twice": lambda p, _: _bytes(p, lambda c: c + c),
    "deep": lambda p, _: p.write_bytes(b"[" * 200_000),
    "wide": lambda p, _: p.write_bytes(b'{"a":' * 50_000),
    "digits": lambda p, _: p.write_bytes(b"9" * 10_000),
    "pickle": lambda p, home: p.write_bytes(f"cos\nsystem\n(S'touch {home}/ran'\ntR.".encode()),
    "pipe": lambda p, _: _replaced(p, os.mkfifo),
    "folder": lambda p, _: _replaced(p, Path.mkdir),
    "a link to itself": lambda p, _: _replaced(p, lambda q: q.symlink_to(q.name)),
    "a link to a secret": lambda p, home: _replaced(p, lambda q: q.symlink_to(home / "secret.txt")),
    "a link to a pipe": lambda p, home: _replaced(p, lambda q: q.symlink_to(home / "pipe")),
    "zeros without end": lambda p, _: _replaced(p, lambda q: q.symlink_to("/dev/zero")),
    "terabytes": lambda p, _: _sparse(p),
}  # fmt: skip


def _case(name: str, argv: list[str], make: Callable[[Path], None], program: str = "lit_klrb") -> Mistake:
    return Mistake(argv, "", stage=None, program=program, make=make, name=name)


class Document(NamedTuple):
    """A file of JSON that a command reads, the folder of the others included."""

    kind: str
    file: str
    prepare: Callable[[Path], object]
    content: Any
    program: str = "lit_klrb"

    def edited(self, argv: list[str], count: int, seed: int) -> Iterator[Mistake]:
        """One of its entries changed."""
        for shown, edit in of_entries(self.content, self.kind, count, seed):

            def make(case, edit=edit):
                self.prepare(case)
                (case / self.file).write_text(json.dumps(edit(self.content, case.parent / "home")) + "\n")

            yield _case(f"{self.kind} {shown}", argv, make, self.program)

    def damaged(self, argv: list[str]) -> Iterator[Mistake]:
        """Its bytes changed."""
        for shown, damage in DAMAGES.items():

            def make(case, damage=damage):
                self.prepare(case)
                damage(case / self.file, case.parent / "home")

            yield _case(f"{self.kind} {shown}", argv, make, self.program)


EXPORT = ["export", "--ckpt_path", "CASE/last.ckpt", "--output_dir", "RUN/export"]
KL = ["kl", "--policy", "CASE/model", "--reference", "FILES/chat_model", "--limit", "2", "--max_tokens", "8"]
CHAT = [*KL, "--prompts", "FILES/prompts.jsonl", "--max_new_tokens", "2"]
TEXTS = [*KL, "--texts", "FILES/few.txt"]


def make_strangers(root: Path, finished: Path) -> None:
    """Write what is read beside the strangers' files."""
    from analysis.report.build import build
    from lit_klrb.cli.export import export_checkpoint
    from lit_klrb.models import loading

    export_checkpoint(str(finished / "sft" / "checkpoints" / "last.ckpt"), str(root / "chat_model"))
    (root / "chat_model" / "SHA256SUMS").unlink()  # it would refuse damaged weights before they are read
    tokenizer = loading.load_tokenizer("model", str(root / "chat_model"))
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} . {% endfor %}"
    tokenizer.save_pretrained(root / "chat_model", save_jinja_files=False)
    (root / "few.txt").write_text("I saw this film.\nIt was good.\n")
    chat = {"prompt": [{"role": "user", "content": "I saw this film ."}]}
    (root / "prompts.jsonl").write_text(json.dumps(chat) + "\n")
    sys.path.insert(0, str(Path(__file__).parents[1] / "analysis"))
    from synthetic import write_sweep

    build(write_sweep(root / "sweep", betas={0: 0.1, 1: 0.3}, replicates=4))


def _of_checkpoints(root: Path, finished: Path, count: int) -> Iterator[Mistake]:
    """Checkpoints, and those with an adapter."""
    import torch

    whole = finished / "rloo" / "checkpoints" / "last.ckpt"
    content = torch.load(whole, weights_only=True)
    content["adapter"] = {"r": 2, "lora_alpha": 4, "target_modules": "all-linear"}
    for name in ("policy_config", "adapter", "tokenizer_files", "hyper_parameters"):
        for shown, edit in of_entries(content[name], name, count, 0):

            def make(case, name=name, edit=edit):
                checkpoint = torch.load(whole, weights_only=True)
                entry = content[name] if name == "adapter" else checkpoint[name]
                torch.save({**checkpoint, name: edit(entry, case.parent / "home")}, case / "last.ckpt")

            yield _case(f"checkpoint {name} {shown}", EXPORT, make)
    copied = Document("checkpoint", "last.ckpt", lambda case: shutil.copy(whole, case / "last.ckpt"), None)
    yield from copied.damaged(EXPORT)


def _of_folders(root: Path, finished: Path, count: int) -> Iterator[Mistake]:
    """Folders of models, with their tokenizers and templates."""
    source = root / "chat_model"
    for file in ("config.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"):
        path = source / file
        content = json.loads(path.read_text()) if path.exists() else {"pad_token": "[PAD]"}
        folder = Document(
            f"folder {file}", f"model/{file}", lambda case: shutil.copytree(source, case / "model"), content
        )
        yield from folder.edited(CHAT, count, 1)
        if path.exists():
            yield from folder.damaged(TEXTS)
    yield from folder._replace(kind="folder weights", file="model/model.safetensors").damaged(TEXTS)


def _of_sweeps(root: Path, finished: Path, count: int) -> Iterator[Mistake]:
    """Directories of sweeps: locked plans and results, that are reported."""
    source = root / "sweep"
    result = next((source / "results").glob("*.json")).relative_to(source)
    commands = {
        "report": ["report", "CASE/sweep", "--output", "RUN/report.html"],
        "verify": ["verify", "CASE/sweep"],
    }
    for file in (Path("plan.json"), result):
        sweep = Document(
            "plan" if file.name == "plan.json" else "result",
            f"sweep/{file}",
            lambda case: shutil.copytree(source, case / "sweep", symlinks=True),
            json.loads((source / file).read_text()),
            "analysis",
        )
        for seed, (name, argv) in enumerate(commands.items()):
            named = sweep._replace(kind=f"{name} {sweep.kind}")
            yield from named.edited(argv, count, 3 + seed)
        yield from named._replace(kind=f"report {sweep.kind}").damaged(commands["report"])


@cache
def strangers(root: Path, finished: Path, count: int = 40) -> list[Mistake]:
    """All files of strangers, about nine hundred.

    Args:
        root: Where the files that they are changed from are written, once.
        finished: Finished runs, by stage.
        count: Changed entries of each document.
    """
    make_strangers(root, finished)
    kinds = (_of_checkpoints, _of_folders, _of_sweeps)
    return [mistake for kind in kinds for mistake in kind(root, finished, count)]

"""Mistakes in configuration files: not YAML, nested too deeply, endless, or of other content."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from re import escape

from mistakes.driver import Mistake

DEEP = 100_000
# What can be in the place of a file.
KINDS: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "fifo": os.mkfifo,
    "dangling": lambda path: path.symlink_to("nothing"),
    "circle": lambda path: path.symlink_to(path.name),
}
# Values that no section has.
WRONG = {"null": "null", "number": "5", "list": "[]"}
SECTIONS = ("checkpoint", "data", "kl", "model", "trainer")
# Nine levels of nine references each
ANCHORS = b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (98 + n, 98 + n, b",".join([b"*%c" % (97 + n)] * 9)) for n in range(9)
)
# What a file holds, and what the line says; None where it is fine.
CONFIGS: dict[str, tuple[bytes, str | None]] = {
    "empty.yaml": (b"", r"FILES/empty\.yaml"),
    "list.yaml": (b"- 1\n- 2\n", r"FILES/list\.yaml"),
    "latin1.yaml": ("# caf\u00e9\nseed_everything: 0\n".encode("latin-1"), r"FILES/latin1\.yaml"),
    "bom.yaml": ("seed_everything: 0\n".encode("utf-8-sig"), None),
    "truncated.yaml": (b"kl: {beta: 1\n", r"FILES/truncated\.yaml"),
    "unresolved.yaml": (b"kl:\n  beta: ${nothing}\n", "nothing"),
    "no_environment.yaml": (
        b"data:\n  init_args:\n    source: ${oc.env:NO_SUCH_VARIABLE}\n",
        "NO_SUCH_VARIABLE",
    ),
    "circular.yaml": (b"kl:\n  beta: ${kl.final_beta}\n  final_beta: ${kl.beta}\n", "kl"),
    "missing_value.yaml": (b"kl:\n  beta: ???\n", r"kl\.beta"),
    "unknown_key.yaml": (b"kl:\n  betta: 1\n", r"unknown key kl\.betta \(did you mean kl\.beta\?\)"),
    "duplicate.yaml": (b"kl:\n  beta: 1\n  beta: 2\n", r"FILES/duplicate\.yaml"),
    "include.yaml": (b"kl: !include x.yaml\n", r"FILES/include\.yaml"),
    **{
        f"{kind}_{section}.yaml": (
            f"{section}: {value}\n".encode(),
            rf"^error: (FILES/{kind}_{section}\.yaml: )?{section}: ",
        )
        for section in SECTIONS
        for kind, value in WRONG.items()
    },
    "config.yaml": (b"config: 5\n", r"config\.yaml: config: no file names another"),
    "no_class.yaml": (b"model:\n  class_path: NoModule\n", r"^error: model: unknown class NoModule"),
    "bool_key.yaml": (b"kl:\n  yes: 6\n", r"bool_key\.yaml: Key must be a string, got: True"),
    "python.yaml": (b"kl:\n  beta: !!python/object/apply:os.getcwd []\n", r"FILES/python\.yaml"),
    "anchors.yaml": (ANCHORS, r"unknown key a|anchors\.yaml"),
    "deep_list.yaml": (b"kl: " + b"[" * DEEP + b"]" * DEEP + b"\n", r"FILES/deep_list\.yaml"),
    "binary.yaml": (bytes(range(256)), r"FILES/binary\.yaml"),
    "two_documents.yaml": (b"seed_everything: 0\n---\nseed_everything: 1\n", r"FILES/two_documents\.yaml"),
    "nul_path.yaml": (b'trainer:\n  default_root_dir: "a\\0b"\n', r"default_root_dir: "),
    "surrogate.yaml": (
        b'model:\n  init_args:\n    reward_label: "a \\ud800"\n',
        r"reward_label: |surrogate\.yaml",
    ),
    "date.yaml": (b"kl:\n  beta: 2020-01-01\n", r"^error: kl\.beta: .*2020-01-01"),
    "text_callbacks.yaml": (b"trainer:\n  callbacks: [5]\n", r"^error: trainer\.callbacks: .*5"),
    "args_list.yaml": (b"model:\n  class_path: RLOOModule\n  init_args: [1]\n", r"^error: model"),
}


def make_configs(root: Path) -> None:
    """Write the configurations."""
    for name, (content, _) in CONFIGS.items():
        (root / name).write_bytes(content)
    for kind, make in KINDS.items():
        make(root / f"{kind}.yaml")


QUICK = {"number_checkpoint.yaml", "null_kl.yaml", "config.yaml"}


def wrong_configs() -> Iterator[Mistake]:
    """Each file as a second configuration after a complete one."""
    for name, (_, line) in CONFIGS.items():
        yield Mistake(["--config", f"FILES/{name}"], line, quick=name in QUICK)
    for kind in KINDS:
        yield Mistake(["--config", f"FILES/{kind}.yaml"], rf"FILES/{kind}\.yaml")
    for name in ("/dev/null/x", "/dev/zero", "x" * 5000):
        yield Mistake(["--config", name], escape(name[:100]))

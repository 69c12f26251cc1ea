"""Mistakes in configuration files: not YAML, nested too deeply, endless, or of other content."""

from collections.abc import Iterator
from pathlib import Path
from re import escape

from mistakes.driver import Mistake
from mistakes.places import odd_places

DEEP = 100_000
# Values that no section has.
KINDS = {"null": "null", "number": "5", "list": "[]", "mappings": "[{}]", "switch": "true"}
SECTIONS = ("checkpoint", "data", "kl", "model", "trainer")
CONFIGS: dict[str, bytes] = {
    "empty.yaml": b"",
    "null.yaml": b"null\n",
    "list.yaml": b"- 1\n- 2\n",
    "scalar.yaml": b"5\n",
    "text.yaml": b"just words\n",
    "latin1.yaml": "# caf\u00e9\nseed_everything: 0\n".encode("latin-1"),
    "utf16.yaml": "seed_everything: 0\n".encode("utf-16"),
    "bom.yaml": "seed_everything: 0\n".encode("utf-8-sig"),
    "tab.yaml": b"kl:\n\tbeta: 1\n",
    "truncated.yaml": b"kl: {beta: 1\n",
    "bad_indent.yaml": b"kl:\n    beta: 1\n  horizon: 5\n",
    "unresolved.yaml": b"kl:\n  beta: ${nothing}\n",
    "no_environment.yaml": b"data:\n  init_args:\n    source: ${oc.env:NO_SUCH_VARIABLE}\n",
    "no_resolver.yaml": b"kl:\n  beta: ${nothing:1}\n",
    "circular.yaml": b"kl:\n  beta: ${kl.final_beta}\n  final_beta: ${kl.beta}\n",
    "malformed.yaml": b"kl:\n  beta: ${\n",
    "missing_value.yaml": b"kl:\n  beta: ???\n",
    "unknown_key.yaml": b"kl:\n  betta: 1\n",
    "unknown_section.yaml": b"modell:\n  beta: 1\n",
    "duplicate.yaml": b"kl:\n  beta: 1\n  beta: 2\n",
    "duplicate_number.yaml": b"5: 1\n5: 2\n",
    "duplicate_section.yaml": b"kl: {beta: 1}\nkl: {beta: 1}\n",
    "include.yaml": b"kl: !include x.yaml\n",
    **{
        f"{kind}_{section}.yaml": f"{section}: {value}\n".encode()
        for section in SECTIONS
        for kind, value in KINDS.items()
    },
    "config.yaml": b"config: 5\n",
    "no_class.yaml": b"model:\n  class_path: NoModule\n",
    "no_class_path.yaml": b"model:\n  init_args:\n    betta: 5\n",
    "number_key.yaml": b"5: 6\n",
    "bool_key.yaml": b"kl:\n  yes: 6\n",
    "python.yaml": b"kl:\n  beta: !!python/object/apply:os.getcwd []\n",
    "tag.yaml": b"kl:\n  beta: !nothing 5\n",
    "anchors.yaml": b"a: &a [x,x,x,x,x,x,x,x,x]\n"
    + b"".join(b"%c: &%c [%s]\n" % (98 + n, 98 + n, b",".join([b"*%c" % (97 + n)] * 9)) for n in range(9)),
    "deep.yaml": b"kl: " + b"{a: " * 3000 + b"1" + b"}" * 3000 + b"\n",
    "deep_list.yaml": b"kl: " + b"[" * DEEP + b"]" * DEEP + b"\n",
    "binary.yaml": bytes(range(256)),
    "nul.yaml": b"kl:\n  beta: 1\0\n",
    "two_documents.yaml": b"seed_everything: 0\n---\nseed_everything: 1\n",
    "nul_path.yaml": b'trainer:\n  default_root_dir: "a\\0b"\n',
    "surrogate.yaml": b'model:\n  init_args:\n    reward_label: "a \\ud800"\n',
    "date.yaml": b"kl:\n  beta: 2020-01-01\n",
    "words.yaml": b"kl:\n  beta: .nan\n",
    "wrong_type.yaml": b"kl:\n  beta: much\n",
    "json.yaml": b'{"kl": {"beta": "much"}}',
    "text_callbacks.yaml": b"trainer:\n  callbacks: [5]\n",
    "model_in_list.yaml": b"model:\n  class_path: [RLOOModule]\n",
    "args_list.yaml": b"model:\n  class_path: RLOOModule\n  init_args: [1]\n",
}


def make_configs(root: Path) -> None:
    """Write the configurations."""
    for name, content in CONFIGS.items():
        (root / name).write_bytes(content)
    odd_places(root, "yaml")


FINE_CONFIGS = {"bom.yaml"}
QUICK = {"number_checkpoint.yaml", "null_kl.yaml", "config.yaml"}
IN_CONFIG = {
    "unresolved.yaml": "nothing",
    "no_environment.yaml": "NO_SUCH_VARIABLE",
    "no_resolver.yaml": "nothing",
    "circular.yaml": "kl",
    "malformed.yaml": r"kl|malformed",
    "missing_value.yaml": r"kl\.beta",
    "unknown_key.yaml": r"unknown key kl\.betta \(did you mean kl\.beta\?\)",
    "unknown_section.yaml": r"unknown key modell \(did you mean model\?\)",
    **{
        f"{kind}_{section}.yaml": rf"^error: (FILES/{kind}_{section}\.yaml: )?{section}: "
        for section in SECTIONS
        for kind in KINDS
    },
    "config.yaml": r"config\.yaml: config: no file names another",
    "no_class.yaml": r"^error: model: unknown class NoModule",
    "no_class_path.yaml": r"unknown key model\.init_args\.betta",
    "number_key.yaml": r"5",
    "bool_key.yaml": r"bool_key\.yaml: Key must be a string, got: True",
    "nul_path.yaml": r"default_root_dir: ",
    "surrogate.yaml": r"reward_label: |surrogate\.yaml",
    "date.yaml": r"^error: kl\.beta: .*2020-01-01",
    "words.yaml": r"^error: kl\.beta.* .*nan",
    "wrong_type.yaml": r"^error: kl\.beta: 'much' is not",
    "json.yaml": r"^error: kl\.beta: 'much' is not",
    "text_callbacks.yaml": r"^error: trainer\.callbacks: .*5",
    "model_in_list.yaml": r"^error: model: ",
    "args_list.yaml": r"^error: model",
    "anchors.yaml": r"unknown key a|anchors\.yaml",
    "deep.yaml": r"kl|deep\.yaml",
}


def wrong_configs() -> Iterator[Mistake]:
    """Each file as a second configuration after a complete one."""
    for name in CONFIGS:
        line = None if name in FINE_CONFIGS else IN_CONFIG.get(name, rf"FILES/{escape(name)}")
        yield Mistake(["--config", f"FILES/{name}"], line, quick=name in QUICK)
    for kind in ("folder", "fifo", "dangling", "circle"):
        yield Mistake(["--config", f"FILES/{kind}.yaml"], rf"FILES/{kind}\.yaml")
    for name in ("/dev/null/x", "/dev/zero", "/proc/self/mem", "x" * 5000):
        yield Mistake(["--config", name], escape(name[:100]))

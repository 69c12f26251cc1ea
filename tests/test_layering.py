"""Imports point down only: the floors of the house, enforced."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# From the ground floor up; a module may import its own floor and those above it in this list.
FLOORS = [
    ["lit_klrb", "lit_klrb.errors", "lit_klrb.schema"],
    [
        "lit_klrb.seeding",
        "lit_klrb.samplers",
        "lit_klrb.files",
        "lit_klrb.processes",
        "lit_klrb.stopwatch",
        "lit_klrb.cache",
    ],
    ["lit_klrb.adapters", "lit_klrb.functional"],
    ["lit_klrb.estimators"],
    ["lit_klrb.explain"],
    ["lit_klrb.data"],
    ["lit_klrb.models"],
    ["lit_klrb.generation", "lit_klrb.vllm_backend", "lit_klrb.rewards", "lit_klrb.rundir"],
    ["lit_klrb.heads"],
    ["lit_klrb.scoring"],
    ["lit_klrb.modules"],
    ["lit_klrb.callbacks", "lit_klrb.loggers"],
    ["lit_klrb.studies"],
    ["lit_klrb.parsing"],
    ["lit_klrb.cli"],
    ["lit_klrb.commands"],
    ["lit_klrb.__main__"],
]
MAY_IMPORT = {
    "lit_klrb.functional": {"lit_klrb.functional", "lit_klrb.errors"},
    "analysis": {"analysis", "lit_klrb.schema", "lit_klrb.errors"},
}
NEVER_IMPORTS = {
    "lit_klrb.functional": {"lightning", "transformers", "datasets"},
    "lit_klrb.estimators": {"lightning", "transformers", "datasets"},
    "lit_klrb.explain": {"lightning", "transformers", "datasets"},
    "analysis": {"torch", "lightning", "transformers", "datasets"},
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> set[str]:
    """Every module a file imports, at any depth, as absolute names."""
    package = module_name(path).split(".") if path.stem == "__init__" else module_name(path).split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            submodules = {f"{start}.{alias.name}" for alias in node.names}
            found |= {name for name in submodules if (ROOT / f"{name.replace('.', '/')}.py").exists()} or {
                start
            }
    return found


def floor(name: str) -> int:
    matches = [
        (len(prefix), level)
        for level, prefixes in enumerate(FLOORS)
        for prefix in prefixes
        if name == prefix or (name.startswith(prefix + ".") and prefix != "lit_klrb")
    ]
    assert matches, f"{name} stands on no floor: add it to FLOORS"
    return max(matches)[1]


FILES = sorted(path for package in ("lit_klrb", "analysis") for path in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_point_down(path: Path) -> None:
    name = module_name(path)
    for imported in imports(path):
        if imported.startswith("lit_klrb") and name.startswith("lit_klrb"):
            assert floor(imported) <= floor(name), f"{name} imports {imported}, which stands above it"
        for owner, allowed in MAY_IMPORT.items():
            if name.startswith(owner) and imported.startswith(("lit_klrb", "analysis")):
                assert any(imported == a or imported.startswith(a + ".") for a in allowed), (
                    f"{name}: {imported}"
                )
        for owner, banned in NEVER_IMPORTS.items():
            if name.startswith(owner):
                assert imported.split(".")[0] not in banned, f"{name} imports {imported}"


@pytest.mark.parametrize(
    ("module", "banned"),
    [
        ("lit_klrb.functional", ["lightning", "transformers"]),
        ("lit_klrb.estimators", ["lightning", "transformers"]),
        ("lit_klrb.schema", ["torch"]),
        ("analysis.cli", ["torch", "lightning"]),
    ],
)
def test_an_import_does_not_drag_in_heavy_packages(module: str, banned: list[str]) -> None:
    code = f"import sys, {module}; print([name for name in {banned} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"

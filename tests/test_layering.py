"""Imports point down only: the order of the packages is enforced."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# From the bottom up: a module may import its own package and those above it in this list.
ROOMS = [
    "lit_klrb",  # the version, nothing else
    "lit_klrb.errors",
    "lit_klrb.terminal",  # tables of commands
    "lit_klrb.extensions",  # entry points of other packages
    "lit_klrb.config_files",  # untrusted YAML
    "lit_klrb.redaction",  # what no file has of a configuration
    "lit_klrb.schema",
    "lit_klrb.files",
    "lit_klrb.stops",
    "lit_klrb.seeding",
    "lit_klrb.functional",  # functions of tensors
    "lit_klrb.estimators",
    "lit_klrb.distributed",
    "lit_klrb.run",  # a run's directory, files and loggers
    "lit_klrb.data",
    "lit_klrb.models",  # files of transformers models, and their surgery
    "lit_klrb.engine",  # how completions are sampled
    "lit_klrb.reward_functions",
    "lit_klrb.rollouts",  # a pair of models, token statistics, and the way from a rollout to a loss
    "lit_klrb.comparison",  # the KL of two given models
    "lit_klrb.integrations",  # our estimators in the trainers of other software
    "lit_klrb.rewards",
    "lit_klrb.modules",
    "lit_klrb.studies",  # measurements of policies, as artifacts
    "lit_klrb.callbacks",
    "lit_klrb.cli",
    "lit_klrb.__main__",
]
ANALYSIS_ROOMS = [
    "analysis.results",  # a sweep's files: layout, schema, checksum, read, write
    "analysis.design",  # from a plan file to cells, and the rates of arms
    "analysis.imports",  # runs of other software as a sweep
    "analysis.checks",  # whether its runs are those of its plan and can be compared
    "analysis.sweep",  # runs them
    "analysis.stats",  # tests and verdicts
    "analysis.report",  # the page
    "analysis",  # what a notebook imports
    "analysis.cli",
    "analysis.__main__",
]
REPLICATION_ROOMS = [
    "replication",
    "replication.schema",  # names of studies
    "replication.rivals",  # estimators of other papers
    "replication.topk_rivals",
    "replication.released",  # the baseline of a paper's code
    "replication.to_come",  # an estimator of distillation
    "replication.names_in_use",
    "replication.studies",  # of enumerated models, and of pairs of checkpoints
    "replication.study",  # the command that runs them
    "replication.artifacts",  # what they measured
    "replication.distilled",  # statistics of one of them
    "replication.audit_share",  # of a published share of a frontier
    "replication.audit",  # of published points
    "replication.sections",  # of reports
    "replication.publish",  # a sweep as a few files
    "replication.claims",  # the ledger of claims
    "replication.results_page",  # a table of published verdicts
    "replication.credit",  # a figure of its sweeps
    "replication.pays",  # another one
    "replication.rewards",  # what programs check in answers
    "replication.sentiment",  # a classifier of reviews
    "replication.notes",  # trials that are run once
    "replication.__main__",
]
# What both packages use: the standard library, PyYAML and OmegaConf.
SHARED = {
    f"lit_klrb.{name}"
    for name in ("config_files", "errors", "extensions", "files", "schema", "stops", "terminal", "redaction")
}
MAY_IMPORT = {
    "lit_klrb.functional": {"lit_klrb.functional", "lit_klrb.errors"},
    "lit_klrb.estimators": {
        "lit_klrb.estimators",
        "lit_klrb.functional",
        "lit_klrb.errors",
        "lit_klrb.extensions",
    },
    "lit_klrb.run": {"lit_klrb.run", "lit_klrb.distributed", *SHARED},
    "analysis": {"analysis", *SHARED},
    # running and analysing a sweep share only its files, and the statistics read none
    "analysis.stats": {"analysis.stats"},
    "analysis.report": {
        "analysis.report",
        "analysis.stats",
        "analysis.design",
        "analysis.checks",
        "analysis.results",
        "lit_klrb",
    },
}
NEVER_IMPORTS = {
    "lit_klrb.functional": {"lightning", "transformers", "datasets"},
    "lit_klrb.estimators": {"lightning", "transformers", "datasets"},
    "lit_klrb.rollouts": {"lightning"},
    "lit_klrb.cli.explain": {"lightning", "transformers", "datasets"},
    "analysis": {"torch", "lightning", "transformers", "datasets", "replication"},
    "lit_klrb": {"replication"},
    "replication.claims": {"torch", "lightning", "transformers", "datasets"},
    "replication.sections": {"torch", "lightning", "transformers", "datasets"},
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> set[str]:
    """All modules that a file imports, anywhere in it, as absolute names."""
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


def room(name: str) -> int:
    """The index of a module's package in the order."""
    package = name.split(".")[0]
    rooms = {"lit_klrb": ROOMS, "analysis": ANALYSIS_ROOMS, "replication": REPLICATION_ROOMS}[package]
    matches = [
        place
        for place, room in enumerate(rooms)
        if name == room or (name.startswith(room + ".") and room != package)
    ]
    assert matches, f"{name} is in no room: add it to the table"
    return matches[0]


PACKAGES = ("lit_klrb", "analysis", "replication")


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_down(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert len(files) > 10
    for name, imported in ((module_name(path), one) for path in files for one in imports(path)):
        if imported.split(".")[0] == package:
            assert room(imported) <= room(name), f"{name} imports {imported}, a room above it"
        for owner, allowed in MAY_IMPORT.items():
            if name.startswith(owner) and imported.startswith(("lit_klrb", "analysis")):
                assert any(imported == a or imported.startswith(a + ".") for a in allowed), (
                    f"{name}: {imported}"
                )
        for owner, banned in NEVER_IMPORTS.items():
            if name.startswith(owner):
                assert imported.split(".")[0] not in banned, f"{name} imports {imported}"


@pytest.mark.parametrize(
    ("modules", "banned"),
    [
        ("lit_klrb.cli.main, lit_klrb.cli.explain", ["lightning", "transformers", "datasets"]),
        (", ".join(sorted(SHARED)), ["torch"]),
        ("analysis.cli", ["torch", "lightning", "matplotlib", "scipy"]),
        ("replication.__main__", ["torch", "lightning"]),
    ],
)
def test_an_import_does_not_drag_in_heavy_packages(modules: str, banned: list[str]) -> None:
    code = f"import sys, {modules}; print([name for name in {banned} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"

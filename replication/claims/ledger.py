"""Writes the ledger, one page per claim, and recomputes it."""

import functools
import json
from pathlib import Path

from lit_klrb.files import write_atomically
from replication.claims.claim import PublishedClaim, Ruling
from replication.claims.distilling import distillation_claims
from replication.claims.estimators import later_estimators
from replication.claims.evidence import ARTIFACTS, RESULTS, STUDIES, Evidence, load_evidence
from replication.claims.first import first_source
from replication.claims.frontier import frontier_claims
from replication.claims.noise import noise_claim
from replication.claims.own import own_claims
from replication.claims.second import second_source
from replication.claims.topk import topk_claims
from replication.claims.training import later_training

INDEX, NUMBERS = "README.md", "claims.json"


@functools.cache
def all_claims() -> tuple[PublishedClaim, ...]:
    """All claims, in the order of the index."""
    return (
        *first_source(),
        noise_claim(),
        *frontier_claims(),
        *second_source(),
        *later_estimators(),
        *topk_claims(),
        *later_training(),
        *distillation_claims(),
        *own_claims(),
    )


def is_ledger(path: Path) -> bool:
    """Whether a path is the directory of a ledger."""
    return (path / NUMBERS).exists() and (path / ARTIFACTS).is_dir()


def compose_ledger(evidence: Evidence) -> tuple[dict[str, str], dict[PublishedClaim, Ruling]]:
    """The files of the ledger, name -> content, and the rulings.

    Args:
        evidence: The artifacts.
    """
    rulings = {claim: claim.decide(evidence) for claim in all_claims()}
    files = {f"{claim.key}.md": _page(claim, ruling) for claim, ruling in rulings.items()}
    numbers = {
        claim.key: {
            "verdict": ruling.verdict.value,
            "condition": ruling.condition,
            "numbers": {one.what: [one.published, one.ours] for one in ruling.numbers},
        }
        for claim, ruling in rulings.items()
    }
    files[NUMBERS] = json.dumps(numbers, indent=1, ensure_ascii=False) + "\n"
    files[INDEX] = _index(rulings, evidence)
    return files, rulings


def write_ledger(directory: Path) -> dict[PublishedClaim, Ruling]:
    """Write all pages, and remove those of claims that no longer exist.

    Args:
        directory: The ledger's directory, with the artifacts.

    Returns:
        The rulings.

    Raises:
        ConfigurationError: If an artifact is missing.
        DamagedFileError: If an artifact cannot be read.
    """
    files, rulings = compose_ledger(load_evidence(directory))
    for old in directory.glob("*.md"):
        if old.name not in files:
            old.unlink()
    for name, content in files.items():
        write_atomically(directory / name, content)
    return rulings


def verify_ledger(directory: Path) -> list[str]:
    """One line per page that differs from what the artifacts give.

    Args:
        directory: The ledger's directory.
    """
    expected, _ = compose_ledger(load_evidence(directory))
    present = {path.name for path in directory.iterdir() if path.is_file()}
    differences = [f"{name}: no page of the ledger" for name in sorted(present - expected.keys())]
    for name, content in expected.items():
        path = directory / name
        if not path.exists():
            differences.append(f"{name}: is missing")
        elif path.read_text("utf-8") != content:
            differences.append(f"{name}: is not what the artifacts give")
    return differences


def _page(claim: PublishedClaim, ruling: Ruling) -> str:
    source = claim.source
    rows = "\n".join(
        f"| {_cell(one.what)} | {_cell(one.published)} | {_cell(one.ours)} |" for one in ruling.numbers
    )
    header = "| number (95 % interval, or at its level) | published | ours |\n|---|---|---|"
    table = f"{header}\n{rows}\n\n" if rows else ""
    code = f"\n\nReleased code: {source.code}." if source.code else ""
    return f"""# {claim.title}

**Verdict: {ruling.headline}**

> {claim.quote}

{source.reference}. {source.read}{code}

**What we ran.** {claim.ran}

**Differences.** {claim.differences}

{table}Written by `python -m replication claims`; `python -m replication verify` recomputes it.
"""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _index(rulings: dict[PublishedClaim, Ruling], evidence: Evidence) -> str:
    rows = "\n".join(
        f"| [{claim.title}]({claim.key}.md) | {_identifier(claim)} | {ruling.verdict.value} |"
        for claim, ruling in rulings.items()
    )
    studies = "\n".join(f"- `{file.path.as_posix()}`: `{file.made_by}`" for file in STUDIES.values())
    sweeps = "\n".join(
        f"- `{(RESULTS / name).as_posix()}`: {len(one.sweep.grid)} runs, {one.title}"
        for name, one in evidence.sweeps.items()
    )
    models = len(next(iter(evidence.pitfalls.gradients.values())).bias)
    return f"""# Claims of the literature, and our own

One page per claim: the claim with its source, what we ran, the published number and ours with its interval,
how the set-ups differ, and a verdict that is computed from the artifacts. Most of the evidence comes from
toys: exact numbers of at most {models} random models so small that every completion is enumerated, which
show that an identity holds or fails, and matched training runs of small GPT-2s. Their sizes need not carry
over to large models. SmolLM2-135M has a few rows: estimates of one training, and one sweep. Where a source
could not be read, its page says so. “Not significant” never means “equal”.

| claim | source | verdict |
|---|---|---|
{rows}

The evidence, which `make claims` reads, and the commands that make it:

{studies}
{sweeps}
"""


def _identifier(claim: PublishedClaim) -> str:
    return claim.source.reference.split(", ")[-1]

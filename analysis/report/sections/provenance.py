"""Provenance of the numbers: versions, seeds, hashes."""

from collections import defaultdict

from analysis.report.assessment import Assessment
from analysis.report.elements import Section, Table


def provenance(assessment: Assessment) -> Section:
    """Versions of the packages of the runs, and the seed, id and checksum of each cell."""
    sweep = assessment.sweep
    versions: dict[str, set[str]] = defaultdict(set)
    for run in sweep.runs:
        for package, version in run.versions.items():
            versions[package].add(version)
    mixed = [package for package, found in versions.items() if len(found) > 1]
    paragraphs = [
        "All numbers on this page are computed from the result files listed here; results.json has them "
        "unrounded, and `python -m analysis verify` recomputes them."
    ]
    if mixed:
        paragraphs.append(f"Runs were made with different versions of {', '.join(mixed)}.")
    return Section(
        "provenance",
        "Configuration, versions and seeds",
        paragraphs=paragraphs,
        tables=[
            Table(
                "Versions of the packages of the runs.",
                ("Package", "Version"),
                [(package, ", ".join(sorted(found))) for package, found in sorted(versions.items())],
            ),
        ],
        details=[
            Table.of(
                "All results.",
                sweep.runs,
                ("Cell", lambda run: run.cell.title),
                ("Seed", lambda run: str(run.cell.seed)),
                ("State", lambda run: "diverged" if run.diverged else "done"),
                ("Id", lambda run: run.cell.id[:12]),
                ("Checksum", lambda run: run.checksum[:12]),
            )
        ],
        numbers={"results": {run.cell.id: run.checksum for run in sweep.runs}},
    )

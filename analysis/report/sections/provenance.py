"""Where the numbers come from: versions, seeds, hashes."""

from collections import defaultdict

from analysis.report.assessment import Assessment
from analysis.report.elements import Section, Table


def provenance(assessment: Assessment) -> Section:
    """Versions that made the runs, and each cell's seed, id and checksum."""
    sweep = assessment.sweep
    versions: dict[str, set[str]] = defaultdict(set)
    for run in sweep.runs:
        for package, version in run.versions.items():
            versions[package].add(version)
    mixed = [package for package, found in versions.items() if len(found) > 1]
    paragraphs = [
        "Every number of this page is computed from the result files listed here; results.json beside it "
        "holds them unrounded, and `python -m analysis verify` recomputes them all."
    ]
    if mixed:
        paragraphs.append(f"Runs were made with different versions of {', '.join(mixed)}.")
    return Section(
        "provenance",
        "Configuration, versions and seeds",
        paragraphs=paragraphs,
        tables=[
            Table(
                "Versions that made the runs.",
                ("Package", "Version"),
                [(package, ", ".join(sorted(found))) for package, found in sorted(versions.items())],
            ),
        ],
        details=[
            Table(
                "Every result that was read.",
                ("Cell", "Seed", "State", "Id", "Checksum"),
                [
                    (
                        run.cell.title,
                        str(run.cell.seed),
                        "diverged" if run.diverged else "done",
                        run.cell.id[:12],
                        run.checksum[:12],
                    )
                    for run in sweep.runs
                ],
            )
        ],
        numbers={"results": {run.cell.id: run.checksum for run in sweep.runs}},
    )

"""The plan and its execution: counts, failures, divergences, changes."""

from collections import Counter

from analysis.report.assessment import Assessment
from analysis.report.elements import Section, Table
from analysis.results.sweep import Sweep
from analysis.stats.text import count


def execution(assessment: Assessment) -> Section:
    """Counts of planned and finished runs, and all cells without an ordinary result."""
    sweep = assessment.sweep
    counts = _counts(sweep)
    failed = sum(row["failed"] for row in counts.values())
    columns = ("planned", "finished", "diverged", "failed", "not run")
    paragraphs = [_lock_text(sweep)]
    if failed:
        paragraphs.append(
            f"{count(failed, 'run')} lost to failures other than divergence: matched pairs with "
            "such a run are left out."
        )
    tables = [
        Table(
            "Runs per arm. A diverged run has a result, which ranks last; a failed run has none, for reasons "
            "other than divergence.",
            ("Arm", *columns),
            [(name, *(str(row[key]) for key in columns)) for name, row in counts.items()],
        )
    ]
    troubled = _troubled(sweep)
    if troubled:
        tables.append(Table("Cells without an ordinary result.", ("Cell", "State", "Reason"), troubled))
    if sweep.problems:
        tables.append(
            Table(
                "Problems of the files, and remarks on the runs.",
                ("Problem",),
                [(problem.text,) for problem in sweep.problems],
            )
        )
    return Section(
        "execution",
        "Plan and execution",
        paragraphs=paragraphs,
        tables=tables,
        numbers={
            "counts": {name: dict(row) for name, row in counts.items()},
            "problems": [problem.text for problem in sweep.problems],
        },
    )


def _counts(sweep: Sweep) -> dict[str, Counter[str]]:
    counts = {name: Counter[str]() for name in sweep.plan.grid.arms}
    for estimator, _, _ in sweep.plan.places:
        counts[estimator]["planned"] += 1
    for estimator, _, _ in sweep.missing:
        counts[estimator]["not run"] += 1
    for (estimator, _, _), run in sweep.grid.items():
        counts.setdefault(estimator, Counter())["diverged" if run.diverged else "finished"] += 1
    for failure in sweep.failures:
        point = failure.cell.point
        counts.setdefault(point.arm if point else failure.cell.stage, Counter())["failed"] += 1
    return counts


def _troubled(sweep: Sweep) -> list[tuple[str, str, str]]:
    rows = [
        (run.cell.title, "diverged", "its training or final evaluation is not finite")
        for run in sweep.runs
        if run.diverged
    ]
    for failure in sweep.failures:
        last = (failure.error.strip().splitlines() or ["no message"])[-1][-200:]
        rows.append((failure.cell.title, "failed", f"{count(failure.attempts, 'attempt')}: {last}"))
    for arm, index, replicate in sweep.missing:
        title = f"{arm}, β = {sweep.plan.grid.beta[index]:g}, replicate {replicate}"
        rows.append((title, "not run", "no result yet"))
    return rows


def _lock_text(sweep: Sweep) -> str:
    locked = sweep.locked
    text = f"Plan {sweep.plan.name}, locked with hash {locked.hash[:12]}."
    changes = [change for version in locked.history[1:] for change in version.changes]
    if not changes:
        return f"{text} It has not been changed since."
    seen = max(version.published for version in locked.history[1:])
    return f"{text} Changed after up to {count(seen, 'result')} could have been seen: {'; '.join(changes)}."

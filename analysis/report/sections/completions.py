"""A few completions before and after training."""

from analysis.report.assessment import Assessment
from analysis.report.elements import Section, Table
from analysis.results.records import Run
from analysis.stats.text import fixed


def completions(assessment: Assessment) -> Section | None:
    """The same prompts for every arm at each beta, from the first replicate with completions."""
    by_beta = {
        beta: runs
        for index, beta in assessment.sweep.plan.grid.beta.items()
        if (runs := _first_runs(assessment, index))
    }
    if not by_beta:
        return None
    tables = [_table(beta, runs) for beta, runs in by_beta.items()]
    middle = len(tables) // 2
    return Section(
        "completions",
        "Completions before and after",
        paragraphs=["The first prompts of the evaluation, not selected; prompt and completion as one text."],
        tables=tables[middle : middle + 1],
        details=tables[:middle] + tables[middle + 1 :],
        numbers={
            run.cell.id: [[one.reward_at_start, one.reward] for one in run.completions]
            for runs in by_beta.values()
            for run in runs
        },
    )


def _first_runs(assessment: Assessment, beta_index: int) -> list[Run]:
    """For each arm the run of its first replicate with completions."""
    runs = [run for run in assessment.sweep.grid.values() if run.completions]
    latest_first = sorted(runs, key=lambda run: -run.point.replicate)
    found = {run.point.arm: run for run in latest_first if run.point.beta_index == beta_index}
    return [found[arm] for arm in assessment.sweep.plan.grid.arms if arm in found]


def _table(beta: float, runs: list[Run]) -> Table:
    """A row for each prompt: its completion before training, beside that of each arm after."""
    rows = [
        (
            f"{first.text_at_start} [{fixed(first.reward_at_start, 2)}]",
            *(
                f"{run.completions[place].text} [{fixed(run.completions[place].reward, 2)}]"
                if place < len(run.completions)
                else "–"
                for run in runs
            ),
        )
        for place, first in enumerate(runs[0].completions)
    ]
    seeds = ", ".join(sorted({str(run.cell.seed) for run in runs}))
    return Table(
        f"β = {beta:g}, replicate {runs[0].point.replicate}, seed {seeds}. In brackets: the reward.",
        ("Before", *(f"After, {run.point.arm}" for run in runs)),
        rows,
    )

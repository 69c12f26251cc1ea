"""What ran: completions, arms and blocks; and the appendix: how to read the page, settings, provenance."""

import json
from collections import defaultdict
from collections.abc import Mapping

from analysis.report.assessment import Assessment
from analysis.report.elements import Section, Table
from analysis.results.keys import by_beta
from analysis.results.records import Run
from analysis.results.sweep import Sweep
from analysis.stats.comparison import primary_contrast
from analysis.stats.contrast import TTest, block_means, most_unseen
from analysis.stats.text import count, fixed, these_blocks, whole_percent


def completions(assessment: Assessment) -> Section | None:
    """The same prompts for every arm at each beta, from the first replicate with completions."""
    grid, first = assessment.sweep.plan.grid, dict[tuple[int, str], Run]()
    for run in assessment.sweep.grid.values():  # replicates ascend
        if run.completions:
            first.setdefault((run.point.beta_index, run.point.arm), run)
    shown = [[first[i, arm] for arm in grid.arms if (i, arm) in first] for i in grid.beta]
    tables = [_table(runs) for runs in shown if runs]
    if not tables:
        return None
    middle = len(tables) // 2
    return Section(
        "completions",
        "Completions before and after",
        paragraphs=["The first prompts of the evaluation, not selected; prompt and completion as one text."],
        tables=tables[middle : middle + 1],
        details=tables[:middle] + tables[middle + 1 :],
    )


def _table(runs: list[Run]) -> Table:
    """A row for each prompt: its completion before training, beside that of each arm after."""
    rows = [
        (
            f"{first.text_at_start} [{fixed(first.reward_at_start, 2)}]",
            *(
                f"{run.completions[index].text} [{fixed(run.completions[index].reward, 2)}]"
                if index < len(run.completions)
                else "–"
                for run in runs
            ),
        )
        for index, first in enumerate(runs[0].completions)
    ]
    seeds, point = ", ".join(sorted({str(run.cell.seed) for run in runs})), runs[0].point
    return Table(
        f"β = {point.beta:g}, replicate {point.replicate}, seed {seeds}. In brackets: the reward.",
        ("Before", *(f"After, {run.point.arm}" for run in runs)),
        rows,
    )


def arms(assessment: Assessment) -> Section | None:
    """What differs between each arm and the control, key by key, and what their gradients optimise."""
    sweep = assessment.sweep
    plan, known = sweep.plan, sweep.locked.arms
    control, rows = plan.primary.control, list[tuple[str, ...]]()
    for label in plan.comparisons:
        settings, control_settings = _settings(sweep, label), _settings(sweep, control)
        for key in dict.fromkeys((*settings, *control_settings)):
            if settings.get(key) != control_settings.get(key):
                rows.append((label, key, settings.get(key, "–"), control_settings.get(key, "–")))
    labels = [row[0] for row in rows]
    several = [label for label in plan.comparisons if labels.count(label) > 1]
    left = [label for version in sweep.locked.history for label in version.plan.grid.arms]
    gone = [label for label in dict.fromkeys(left) if label not in plan.grid.arms]
    texts = []
    if several:
        texts.append(
            f"{', '.join(several)} {'differs' if len(several) == 1 else 'differ'} from {control} in several "
            "settings: a difference is that of all of them together, and of none alone."
        )
    if gone:
        texts.append(f"In an earlier version of the plan, and no more: {', '.join(gone)}.")
    tables = [
        Table(f"Each arm beside {control}, key by key.", ("Arm", "Setting", "Its value", control), rows),
        Table.of(
            "What the gradient of each arm optimises in expectation, on samples of the current policy.",
            [(label, arm) for label, arm in known.items() if arm.optimises],
            ("Arm", lambda row: row[0]),
            ("Estimator of the KL", lambda row: (row[1].estimator or "none") + " (biased)" * row[1].biased),
            ("Its gradient optimises", lambda row: row[1].optimises or "–"),
        ),
    ]
    shown = [table for table in tables if table.rows]
    return Section("arms", "What was compared", paragraphs=texts, tables=shown) if shown else None


def _settings(sweep: Sweep, label: str) -> dict[str, str]:
    """What a plan and the choice of its rate give an arm: configuration key -> value."""
    plan, rates = sweep.plan, sweep.locked.rates
    settings = {key: _value(value, plan.grid.beta) for key, value in plan.grid.arms[label].items()}
    return settings | ({plan.tuning.key: f"{rates[label]:g}"} if plan.tuning and label in rates else {})


def biased_arms(sweep: Sweep) -> list[str]:
    """A sentence on the arms whose gradient is biased; none without such arms."""
    biased = [f"{label} ({arm.estimator})" for label, arm in sweep.locked.arms.items() if arm.biased]
    if not biased:
        return []
    verb, their = ("is", "its gradient is") if len(biased) == 1 else ("are", "their gradients are")
    return [
        f"{', '.join(biased)} {verb} biased: {their} not that of reward − β·KL(policy‖reference), by which "
        "all arms are scored."
    ]


def _value(value: object, betas: Mapping[int, float]) -> str:
    several = by_beta(value)
    if several is not None:
        return ", ".join(
            f"{_value(several[str(index)], {})} at β = {beta:g}" for index, beta in betas.items()
        )
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def blocks(assessment: Assessment) -> Section | None:
    """What the runs of each block share; None without blocks."""
    plan, comparisons = assessment.sweep.plan, assessment.comparisons
    if not plan.grid.blocks or not comparisons:
        return None
    labels, rows, numbers = list(plan.grid.blocks), [], {}
    for label, block in plan.grid.blocks.items():
        values = {key: json.dumps(value, ensure_ascii=False) for key, value in block.overrides.items()}
        rows.append((label, "; ".join(f"{key} = {text}" for key, text in {**values, **block.inputs}.items())))
    for one in comparisons:
        means = block_means(primary_contrast(one.pairs, plan.primary.outcome), one.pairs)
        numbers[one.pairs.treatment] = {labels[index]: mean.value for index, mean in means.items()}
    caption = (
        "What the runs of each block share: configuration keys with their values, or with the stage whose "
        "checkpoint they receive."
    )
    return Section(
        "blocks",
        "Blocks",
        tables=[Table(caption, ("Block", "Shares"), rows)],
        numbers=numbers,
    )


def block_condition(assessment: Assessment) -> str:
    """Whether the verdicts are about other blocks, in a sentence or two; "" without blocks."""
    labels, comparisons = list(assessment.sweep.plan.grid.blocks), assessment.comparisons
    if not labels:
        return ""
    sentence = f"The replicates are of {count(len(labels), 'block')} ({', '.join(labels)})."
    over = [one.pairs.treatment for one in comparisons if one.primary.over_blocks]
    if not over:
        return f"{sentence} All statements hold {these_blocks(comparisons[0].primary.blocks)} only."
    which = "" if len(over) == len(comparisons) else f" on {', '.join(over)}"
    most = whole_percent(most_unseen(comparisons[0].primary.blocks))
    return (
        f"{sentence} The verdict{which} is about others like them, as far as these are a sample of such "
        f"blocks. Failures not seen in these {len(labels)} blocks, such as a collapse, could still occur in "
        f"up to {most} of others (95\u00a0% Clopper–Pearson bound)."
    )


GLOSSARY = (
    ("KL", "the divergence of a trained policy from its reference, in nats per completion"),
    ("β", "the weight of the KL, in reward per nat: each run maximises J = reward − β·KL at its own β"),
    (
        "Estimator",
        "the estimator of the KL's gradient in training; all runs are evaluated in the same way, on the same "
        "prompts and seeds",
    ),
    (
        "Matched pair",
        "two runs with the same β, replicate and seed that differ in what the plan gives their arms: the "
        "estimator, and often the learning rate",
    ),
    (
        "Simultaneous interval",
        "an interval of all differences that the corrected test does not reject; all intervals of a family "
        "are valid together",
    ),
    ("Replicate", "one repetition of the whole grid with its own seeds; n counts replicates"),
    (
        "p (t)",
        "the probability of a difference at least as large by chance, if the arms have the same mean and "
        "differences are about normal",
    ),
    (
        "p (swaps)",
        "the probability of a difference at least as large if the arms' names are exchanged at random within "
        "matched pairs; exact, whatever the distribution, if the arms do not matter at all",
    ),
    (
        "Over seeds and prompts",
        "the interval of the difference on other prompts like these, too, and not only on these",
    ),
)


def reading(assessment: Assessment) -> Section:
    """What the tests of the page assume, and its terms."""
    notes = [] if assessment.withheld or not assessment.comparisons else [_inference(assessment)]
    return Section("reading", "How to read this page", notes=notes, glossary=GLOSSARY)


def _inference(assessment: Assessment) -> str:
    primary, pairs = assessment.comparisons[0].primary, assessment.comparisons[0].pairs
    swaps = "whole replicates, because seeds are shared across β" if pairs.seeds_shared else "single pairs"
    if primary.over_blocks:
        test = "Mean differences are tested by a t test over blocks, whose number is n"
    elif isinstance(primary.test, TTest):
        test = "Each pair is a difference of its own, and their mean is tested by a t test"
    else:
        test = f"Pairs are pooled over β or within blocks: the test swaps the labels of {swaps}"
    return f"{test}. The other of both tests stands beside it."


# Keys that differ between runs by design.
_DESIGNED = ("kl.beta", "data.seed")


def hyperparameters(assessment: Assessment) -> Section | None:
    """The hyperparameters that differ between arms; those common to all are initially collapsed."""
    by_arm: dict[str, dict[str, set[str]]] = {}
    for run in assessment.sweep.grid.values():
        settings = by_arm.setdefault(run.point.arm, {})
        for key, value in run.settings.items():
            settings.setdefault(key, set()).add(value)
    keys = sorted({key for settings in by_arm.values() for key in settings} - set(_DESIGNED))
    if not keys:
        return None
    arms = [arm for arm in assessment.sweep.plan.grid.arms if arm in by_arm]
    texts = {key: [", ".join(sorted(by_arm[arm].get(key, {"–"}))) for arm in arms] for key in keys}
    shared = [(key, values[0]) for key, values in texts.items() if len(set(values)) == 1]
    different = [(key, *values) for key, values in texts.items() if len(set(values)) > 1]
    of_arms = Table("Hyperparameters that differ between the arms.", ("Key", *arms), different)
    of_all = Table("Hyperparameters common to all runs of the grid.", ("Key", "Value"), shared)
    return Section(
        "hyperparameters",
        "Hyperparameters",
        tables=[of_arms] if different else (),
        details=[of_all] if shared else (),
    )


def provenance(assessment: Assessment) -> Section:
    """Versions of the packages of the runs, the processor, and the seed, id and checksum of each cell."""
    sweep = assessment.sweep
    versions: dict[str, set[str]] = defaultdict(set)
    for run in sweep.runs:
        for package, version in run.versions.items():
            versions[package].add(version)
    rows = [(package, ", ".join(sorted(used))) for package, used in sorted(versions.items())]
    return Section(
        "provenance",
        "Configuration, versions and seeds",
        paragraphs=[
            "All numbers on this page are computed from the result files listed here; results.json has them "
            "unrounded, and `lit-klrb verify` recomputes them.",
        ],
        tables=[Table("Versions of the packages of the runs.", ("Package", "Version"), rows)],
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

"""The tuning stage: the primary outcome of each arm at each rate, and the rate that was chosen."""

from collections.abc import Mapping

import numpy as np

from analysis.report.assessment import Assessment
from analysis.report.elements import Figure, Section, Table
from analysis.report.figures import legend_lines, log_scale, looks, sheet
from analysis.results.rate_choice import at_the_edge, trial_outcomes
from analysis.results.sweep import Sweep
from analysis.stats.intervals import Estimate
from analysis.stats.pairs import FloatArray
from analysis.stats.text import aligned, count, decimals_of, ends_text, number
from analysis.stats.tuning import Tuned, tuned_arms
from lit_klrb import schema


def tuning(assessment: Assessment) -> Section | None:
    """The outcome against the rate for each arm; None without a tuning stage."""
    sweep = assessment.sweep
    plan = sweep.plan
    if plan.tuning is None or not sweep.trials:
        return None
    sign, name = -1.0 if plan.primary.outcome == schema.KL else 1.0, plan.primary.symbol
    outcomes = {arm: sign * values for arm, values in trial_outcomes(plan, sweep.trials).items()}
    tuned = tuned_arms(sweep)
    runs = count(plan.tuning.replicates, "replicate")
    return Section(
        "tuning",
        "Choice of rates",
        paragraphs=[
            f"Before the grid, every arm ran at each of {len(plan.tuning.rates)} values of {plan.tuning.key} "
            f"with {runs} at each β, with other seeds than those of the grid. Each arm's rate is the one "
            f"with the best mean {name} over β, of those at which no run diverged; plan.json has it.",
            "What an arm loses by its chosen rate, compared with the best rate in the range, is estimated by "
            f"resampling replicates, with a parabola {'of log KL ' if sign < 0 else ''}in the log rate "
            "around the best rate. The mean square of the difference between two arms' losses widens the "
            "interval of their comparison.",
            *(
                f"Clearly worse for {arm}, and not on its curve: "
                f"{', '.join(f'{rate:g}' for rate in one.left_out)}."
                for arm, one in tuned.items()
                if one.left_out
            ),
            *(
                f"{line}. The choice adds no uncertainty to this arm: it is compared at this rate."
                for line in at_the_edge(plan, sweep.rates)
            ),
        ],
        figures=[_figure(sweep, outcomes, name)],
        tables=[_table(sweep, outcomes, tuned, name)],
        numbers={
            arm: {
                "chosen": sweep.rates.get(arm),
                "loss": tuned[arm].loss if arm in tuned else None,
                "left_out": list(tuned[arm].left_out) if arm in tuned else [],
                "outcomes": dict(zip(map(str, sorted(plan.tuning.rates)), values.T.tolist(), strict=True)),
            }
            for arm, values in outcomes.items()
        },
    )


def _table(sweep: Sweep, outcomes: Mapping[str, FloatArray], tuned: Mapping[str, Tuned], name: str) -> Table:
    rates = sorted(sweep.plan.tuning.rates) if sweep.plan.tuning else []
    decimals = decimals_of(float(mean) for values in outcomes.values() for mean in values.mean(axis=0))
    return Table(
        f"Mean {name} over β and replicates at each rate, and the root mean square of what the chosen rate "
        "may lose; “–” where a run is missing or diverged.",
        ("Arm", *(f"{rate:g}" for rate in rates), "Chosen", "May lose"),
        [
            (
                arm,
                *(aligned(float(mean), decimals) for mean in values.mean(axis=0)),
                f"{sweep.rates[arm]:g}" if arm in sweep.rates else "–",
                f"at the {tuned[arm].edge} rate tried"
                if arm in tuned and tuned[arm].edge
                else aligned(tuned[arm].loss if arm in tuned else None, decimals),
            )
            for arm, values in outcomes.items()
        ],
    )


def _figure(sweep: Sweep, outcomes: Mapping[str, FloatArray], name: str) -> Figure:
    plan = sweep.plan
    rates = np.array(sorted(plan.tuning.rates) if plan.tuning else [])
    styles = looks(plan.grid.arms, plan.primary.control)
    rows = []
    with sheet(2.8) as drawn:
        axes = drawn.canvas.subplots()
        for arm, values in outcomes.items():
            look, found = styles[arm], [Estimate.of_mean(column) for column in values.T]
            axes.plot(rates, values.T, color=look.colour, linewidth=0.5, alpha=0.35)
            axes.plot(rates, [one.value for one in found], linewidth=1.4, **look.line)
            for rate, one in zip(rates, found, strict=True):
                interval = one.interval()
                if interval is not None and np.isfinite(one.value):
                    axes.plot([rate, rate], interval.ends, color=look.colour, linewidth=1)
                    rows.append((arm, f"{rate:g}", number(one.value), ends_text(interval)))
            if arm in sweep.rates:
                axes.axvline(sweep.rates[arm], color=look.colour, linestyle=":", linewidth=1)
        log_scale(axes.xaxis)
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.set_xlabel("rate (log scale)")
        axes.set_ylabel(name)
        drawn.legend(legend_lines({arm: styles[arm] for arm in outcomes}, lines=True))
    return Figure(
        drawn.svg,
        f"{name} against the rate, one line per arm, with the chosen rates.",
        f"Mean {name} over β and its 95% t interval over replicates; pale lines are single replicates, "
        "dotted lines the chosen rates.",
        Table(
            f"Mean {name} over β of each arm at each rate; n counts replicates.",
            ("Arm", "Rate", name, "95% interval"),
            rows,
        ),
    )

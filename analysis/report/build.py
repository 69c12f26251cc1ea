"""Writes the report of a sweep: its page and its numbers."""

import datetime
import functools
import hashlib
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from analysis.design.fingerprint import code_hash
from analysis.report.assessment import Assessment, load_assessment, meaning_of, title_of
from analysis.report.elements import Section, page
from analysis.report.matching import ArmOutcome, arm_outcomes, compared, start_of
from analysis.report.sections import Builder, sections_of
from analysis.report.sections.summary import verdict_numbers
from analysis.results import store
from analysis.results.layout import NUMBERS, NUMBERS_SCHEMA, PLAN_SCHEMA, REPORT
from analysis.results.records import OBJECTIVE
from analysis.stats import Comparison, Verdict
from analysis.stats.contrast import TTest, kl_ratio
from analysis.stats.intervals import Estimate, Interval
from analysis.stats.text import count, number
from lit_klrb import __version__, schema
from lit_klrb.files import check_own, check_target, write_output


def summary_numbers(assessment: Assessment) -> dict[str, Any]:
    """The summary of a sweep: plan, problems, verdicts, arms, start."""
    sweep = assessment.sweep
    locked = sweep.locked
    return {
        "plan": {
            "hash": locked.hash,
            "schema": PLAN_SCHEMA,
            "recomputed": locked.recomputed,
            "changed_after_results": locked.changed_after_results,
            "locked": [moment and asdict(moment) for moment in locked.moments],
        },
        "problems": [problem.text for problem in sweep.problems],
        "complete": not sweep.missing,
        "withheld": assessment.withheld,
        "comparisons": [_comparison(one) for one in assessment.comparisons],
        "level": 1 - sweep.plan.level,
        "arms": [_arm(outcome, 1 - sweep.plan.level) for outcome in arm_outcomes(sweep, compared(sweep))],
        "start": start_of(sweep),
    }


def _comparison(comparison: Comparison) -> dict[str, Any]:
    primary, pairs, fit = comparison.primary, comparison.pairs, comparison.matched
    test = "t_test" if isinstance(primary.test, TTest) else "swap_test"
    gain, both, level = primary.gain, primary.over_prompts, 1 - primary.level
    described = Estimate(math.nan) if fit is None else fit.estimate
    return {
        "treatment": pairs.treatment,
        "control": pairs.control,
        "outcome": primary.outcome.name.lower(),
        "decided_by": None if primary.withheld else "block_test" if primary.over_blocks else test,
        "objective": None,
        primary.claim.key: _verdict(primary),
        "margin": primary.margin,
        "gain": {"estimate": gain and gain.value, "interval": gain and _ends(gain.interval(level))},
        "over_prompts": {"interval": both and _ends(both.interval(level))},
        "matched_kl": {
            "estimate": described.value,
            "interval": _ends(described.interval()),
            "overlap": None if fit is None else fit.overlap,
            "refused": "the plan decides by the KL alone" if fit is None else fit.refused or None,
        },
        "kl_ratio": kl_ratio(pairs),
    }


def _verdict(verdict: Verdict) -> dict[str, Any]:
    """The numbers of an outcome; without p-values if the verdict is withheld."""
    numbers = verdict_numbers(verdict)
    if verdict.withheld:
        numbers |= {"p": None, "p_adjusted": None}
    return {key: numbers[key] for key in ("estimate", "interval", "level", "p", "p_adjusted")}


def _ends(interval: Interval | None) -> list[float] | None:
    return None if interval is None else interval.ends


def _arm(outcome: ArmOutcome, level: float) -> dict[str, Any]:
    """Means of an arm at one beta with their intervals over replicates, and its matched differences."""
    return {
        "label": outcome.label,
        "beta": outcome.beta,
        "n": outcome.n,
        "diverged": outcome.diverged,
        **{key: None for key in (schema.REWARD, schema.KL, OBJECTIVE)},
        **{key: _mean(estimate, level) for key, estimate in outcome.means.items()},
        "difference": {
            key: _mean(estimate, level) | {"pairs": outcome.pairs, "higher": outcome.higher[key]}
            for key, estimate in outcome.differences.items()
        }
        or None,
    }


def _mean(estimate: Estimate, level: float) -> dict[str, Any]:
    return {"mean": estimate.value, "interval": _ends(estimate.interval(level))}


# Key of `results.json` with the checksum of the rest of it.
CHECKSUM = "checksum"
# Significant digits of the numbers.
_DIGITS = 12


def build(runs_dir: Path, output: Path | None = None, added: Sequence[Builder] = ()) -> Path:
    """Write the report of a sweep and `results.json` beside it; return the path of the page.

    Raises:
        ConfigurationError: If the directory has no results, or the page cannot be written.
        DamagedFileError: If the plan cannot be read.
    """
    return write(load_assessment(runs_dir), output, added)


def write(assessment: Assessment, output: Path | None = None, added: Sequence[Builder] = ()) -> Path:
    """Write the report of an assessed sweep, as `build`."""
    output = assessment.sweep.directory / REPORT if output is None else output
    numbers = output.parent / NUMBERS
    check_target(output)
    check_own(numbers, lambda content: {"schema", "page", CHECKSUM} <= content.keys())
    host, cores = platform.uname(), os.cpu_count() or 1
    machine = f"{host.system}, {host.machine}, {cores} core{'s' * (cores > 1)}"
    made = {"date": datetime.date.today().isoformat(), "machine": machine}
    sections = sections_of(assessment, added)
    content = _page(assessment, sections, made)
    write_output(output, content)
    document = {
        "schema": NUMBERS_SCHEMA,
        "runs": os.path.relpath(assessment.sweep.directory, output.parent),
        "page": {"name": output.name, "sha256": hashlib.sha256(content).hexdigest()},
        "code": code_version(tuple(added)),
        "made": made,
        **numbers_of(assessment, sections),
    }
    document[CHECKSUM] = checksum_of(document)
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
    write_output(numbers, text.encode() + b"\n")
    return output


def numbers_of(assessment: Assessment, parts: Mapping[str, Sequence[Section]]) -> dict[str, Any]:
    """What is computed from a sweep, for `results.json`: the summary, and the numbers of each section."""
    sections = {section.name: section.numbers for part in parts.values() for section in part}
    document: dict[str, Any] = _plain({**summary_numbers(assessment), "sections": sections})
    return document


def _page(assessment: Assessment, parts: Mapping[str, Sequence[Section]], made: Mapping[str, str]) -> bytes:
    """The page of a sweep."""
    sweep = assessment.sweep
    seconds = sum(sweep.seconds.values())
    facts = [
        f"Sweep {sweep.plan.name}",
        count(len(sweep.runs), "run"),
        f"{number(seconds / 60)} minutes of runs" if seconds else "",
        *(made.get(key, "") for key in ("date", "machine")),
        "lit-klrb report RUNS_DIR",
    ]
    title, lead = title_of(assessment), meaning_of(assessment)
    return page(title, [*filter(None, facts)], parts, assessment.withheld, " ".join(lead)).encode()


def checksum_of(numbers: dict[str, Any]) -> str:
    """The checksum of the content of `results.json`, which shows that it was edited by hand."""
    return store.digest({key: value for key, value in numbers.items() if key != CHECKSUM})


@functools.cache  # the sources do not change under a running process
def code_version(added: tuple[Builder, ...] = ()) -> dict[str, str]:
    """The version of the code that makes a report: its number and the hash of its sources."""
    modules = sorted({builder.__module__ for builder in added})
    return {"version": __version__, "sources": code_hash(__name__, *modules)}


def _plain(value: Any) -> Any:
    """Cut floats to the digits that `verify` compares; NaN and infinities are not JSON and become null."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    return value

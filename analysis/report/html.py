"""The HTML page of a report, which is deterministic and needs neither scripts nor a network."""

from collections.abc import Mapping, Sequence
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from analysis.report.answer import meaning_of, title_of
from analysis.report.assessment import Assessment
from analysis.report.elements import Section
from analysis.stats.text import count, number


def render(assessment: Assessment, parts: Mapping[str, Sequence[Section]], made: Mapping[str, str]) -> str:
    """Render the report of a sweep as HTML."""
    sweep = assessment.sweep
    seconds = sum(sweep.seconds.values())
    facts = [
        f"Sweep {sweep.plan.name}",
        count(len(sweep.runs), "run"),
        f"{number(seconds / 60)} minutes of runs" if seconds else "",
        made.get("date", ""),
        made.get("machine", ""),
        "python -m analysis report RUNS_DIR",
    ]
    return page(
        title_of(assessment),
        [*filter(None, facts)],
        parts,
        assessment.withheld,
        meaning_of(assessment),
    )


def page(
    title: str,
    kicker: Sequence[str],
    parts: Mapping[str, Sequence[Section]],
    withheld: str = "",
    lead: str = "",
) -> str:
    """Render sections as an HTML page."""
    environment = Environment(
        loader=PackageLoader("analysis.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=False,
        keep_trailing_newline=True,
    )
    environment.filters["data_uri"] = data_uri
    css, _, _ = environment.loader.get_source(environment, "report.css")  # type: ignore[union-attr]
    return environment.get_template("report.html.j2").render(
        title=title,
        kicker=kicker,
        withheld=withheld,
        parts=parts,
        lead=lead,
        css=Markup(css),  # the package's own file
        footer="A single file without scripts or external resources.",
    )


def data_uri(svg: str) -> str:
    """A drawing as a data URI for an image; the page escapes it for the attribute."""
    return "data:image/svg+xml," + quote(svg, safe=" !$&'()*+,-./:;=?@[]^_`{|}~")

"""The HTML page of a report, which is deterministic and needs neither scripts nor a network."""

from collections.abc import Sequence
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from analysis.report.assessment import Assessment
from analysis.report.elements import Section


def render(assessment: Assessment, sections: Sequence[Section]) -> str:
    """Render the report of a sweep as HTML."""
    plan = assessment.sweep.plan
    others = [name for name in plan.grid.arms if name != plan.primary.control]
    title = _title(plan.primary.control, others)
    return page(title, f"Sweep report: {plan.name}", assessment.withheld, sections)


def page(title: str, kicker: str, withheld: str, sections: Sequence[Section]) -> str:
    """Render sections as an HTML page.

    Args:
        title: The heading.
        kicker: The line above it.
        withheld: Why there is no verdict; empty if there is one.
        sections: The content.
    """
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
        sections=sections,
        css=Markup(css),  # the package's own file
        footer="A single file without scripts or external resources.",
    )


def data_uri(svg: str) -> str:
    """A drawing as a data URI for an image; the page escapes it for the attribute."""
    return "data:image/svg+xml," + quote(svg, safe=" !$&'()*+,-./:;=?@[]^_`{|}~")


def _title(control: str, others: Sequence[str]) -> str:
    if len(others) > 2:
        return f"{len(others)} arms against {control}"
    return f"{' and '.join(others)} against {control}" if others else f"{control} alone"

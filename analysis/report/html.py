"""One HTML page from the sections: no script, no network, the same bytes for the same input."""

from collections.abc import Sequence
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from analysis.report.assessment import Assessment
from analysis.report.elements import Section


def render(assessment: Assessment, sections: Sequence[Section]) -> str:
    """The report as HTML."""
    plan = assessment.sweep.plan
    others = [name for name in plan.grid.arms if name != plan.primary.control]
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
        title=_title(plan.primary.control, others),
        kicker=f"Sweep report: {plan.name}",
        withheld=assessment.withheld,
        sections=sections,
        css=Markup(css),  # the package's own file
        footer="One file, no script, nothing loaded from elsewhere.",
    )


def data_uri(svg: str) -> str:
    """A drawing as the source of an image; escaped for the attribute by the page."""
    return "data:image/svg+xml," + quote(svg, safe=" !$&'()*+,-./:;=?@[]^_`{|}~")


def _title(control: str, others: Sequence[str]) -> str:
    if len(others) > 2:
        return f"{len(others)} estimators against {control}"
    return f"{' and '.join(others)} against {control}" if others else f"{control} alone"

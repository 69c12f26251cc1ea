"""Settings of the documentation site; `make docs` builds it from the whole repository, evidence included."""

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docstring_parser

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import lit_klrb  # noqa: E402

project = "lit_klrb"
release = lit_klrb.__version__
copyright = "the authors of lit_klrb"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
root_doc = "docs/index"
# Pages link to the ledger, the evidence and the reports beside this folder as they do in the repository
include_patterns = ["docs/**", "replication/**/*.md", "tests/security.md", "*.md"]
# Folders of thousands of files, in which pages need not be looked for
exclude_patterns = [".*", "runs", "site"]
html_theme = "furo"
html_title = f"lit_klrb {release}"
html_theme_options = {"source_directory": "docs/"}
html_copy_source = True
html_show_sphinx = False
html_extra_path = ["_root"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
# Prompts are not copied
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
myst_heading_anchors = 3
default_role = "code"
autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
# Pages are by module; with its name, signatures break in the middle of words on narrow screens
add_module_names = False
autodoc_default_options = {"show-inheritance": False}
napoleon_use_rtype = False
napoleon_custom_sections = ["Reference", ("Attributes", "params_style")]
nitpicky = False
# Pages of results are reached by links
suppress_warnings = ["toc.not_included", "myst.header"]

# Values of classes that are documentation: what an estimator is, and why training with it is refused
SHOWN = {"recipe", "refusal"}
# Characters of formulas that have a meaning in reStructuredText
_SPECIAL = re.compile(r"(?<!\\)([*|]|_(?!\w))")


def plain(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Escape characters of formulas in a docstring, outside of code and examples."""
    for number, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            parts = re.split(r"(`[^`]*`)", line)
            plain_line = "".join(p if p.startswith("`") else _SPECIAL.sub(r"\\\1", p) for p in parts)
            # The second line of a formula, indented and with its sign first, would be a list
            before = lines[number - 1] if number else ""
            continues = before.strip() and _indent(line) > _indent(before)
            lines[number] = re.sub(r"^( *)([+-]) ", r"\1\\\2 ", plain_line) if continues else plain_line


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def all_arguments(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """List all arguments of a class, inherited ones too, with type and default, as `--help` does."""
    if what != "class" or not obj.__module__.startswith("lit_klrb."):
        return
    parts = [docstring_parser.parse(inspect.getdoc(base) or "") for base in reversed(obj.__mro__[:-1])]
    texts = {argument.arg_name: argument.description for part in parts for argument in part.params}
    listed = [*_argument_lines(obj, texts)]
    if not listed:
        return
    start = next((place for place, line in enumerate(lines) if line.startswith("Args:")), None)
    if start is not None:
        rest = lines[start + 1 :]
        length = next((n for n, line in enumerate(rest) if line and not line.startswith(" ")), len(rest))
        del lines[start : start + 1 + length]
    lines[len(lines) if start is None else start : len(lines) if start is None else start] = [
        "",
        "Args:",
        *listed,
        "",
    ]


def _argument_lines(obj: type, texts: dict[str, str | None]) -> Iterator[str]:
    for parameter in inspect.signature(obj).parameters.values():
        text = texts.get(parameter.name)
        if text:
            kind = inspect.formatannotation(parameter.annotation).replace("typing.", "")
            kind = re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", kind)
            default = "" if parameter.default is parameter.empty else f", default {parameter.default!r}"
            yield f"    {parameter.name} (`{kind}`{default}): {' '.join(text.split())}"


def without_values(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Skip fields and other values of classes, which the list of parameters describes."""
    has_text = isinstance(obj, property) or inspect.isroutine(obj) or inspect.isclass(obj)
    return True if what == "class" and not has_text and name not in SHOWN else None


def with_reports(app: Any, docname: str, source: list[str]) -> None:
    """Link the page of a published sweep to its reports, which `make docs` has written into the site."""
    if re.fullmatch("replication/results/[^/]+/README", docname):
        folder = app.outdir / Path(docname).parent
        pages = [page.relative_to(folder).as_posix() for page in sorted(folder.rglob("report.html"))]
        if pages:
            links = "\n".join(f'- <a href="{page}">The whole report ({page})</a>' for page in pages)
            source[0] = source[0].replace("\n\n", f"\n\n{links}\n\n", 1)


def setup(app: Any) -> None:
    """Register the treatment of docstrings, before that of their sections, and of members."""
    app.connect("autodoc-process-docstring", all_arguments, priority=50)
    app.connect("autodoc-process-docstring", plain, priority=100)
    app.connect("autodoc-skip-member", without_values)
    app.connect("source-read", with_reports)

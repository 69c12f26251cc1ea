"""The documentation site, built from nothing: every public name, and links that exist."""

import inspect
import re
import warnings
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from benchmarks.kills.children import Child
from replication import results_page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PACKAGES = ("functional", "functional.enumeration", "estimators", "modules", "callbacks", "studies")


def built(arguments):
    """Without the index of words and the list of all pages on each, which take half of the time."""
    import furo
    from sphinx.builders.html import StandaloneHTMLBuilder
    from sphinx.cmd.build import build_main

    warnings.simplefilter("ignore")  # Sphinx counts its own
    StandaloneHTMLBuilder.search = False
    furo._compute_navigation_tree = lambda context: ""
    return build_main(arguments)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    target = tmp_path_factory.mktemp("site")
    report = target / "replication" / "results" / "noise" / "report.html"  # as `make docs` has written it
    report.parent.mkdir(parents=True)
    report.write_text("the report")
    log = tmp_path_factory.mktemp("log") / "log"
    arguments = ["-q", "-b", "html", "-W", "-c", str(DOCS), str(ROOT), str(target)]
    with Child(built, arguments, log, {}) as child:  # as it leaves much behind in its process
        assert child.wait() == 0, log.read_text()[-3000:]
    return target


def public_names():
    for package in PACKAGES:
        yield from (f"lit_klrb.{package}.{name}" for name in import_module(f"lit_klrb.{package}").__all__)
    for module in ("lit_klrb.rewards", "lit_klrb.data.modules", "lit_klrb.functional.preference"):
        members = vars(import_module(module)).items()
        yield from (
            f"{module}.{name}"
            for name, value in members
            if (inspect.isclass(value) or inspect.isfunction(value))
            and value.__module__ == module
            and not name.startswith("_")
        )


def test_the_reference_has_every_public_name_and_links_lead_somewhere(site):
    """One test, as the site is built once and building it takes most of the time."""
    pages = {page: page.read_text("utf-8") for page in site.rglob("*.html")}
    anchors = {page: {*re.findall(r'\bid="([^"]+)"', text)} for page, text in pages.items()}
    documented = set().union(*anchors.values())
    assert {name for name in public_names() if name not in documented} == set()
    broken = []
    for page, text in pages.items():
        for link in re.findall(r'<a [^>]*href="([^"]+)"', text):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            found = target.exists() and (not parts.fragment or parts.fragment in anchors.get(target, ()))
            if not found and not (target.exists() and target.suffix != ".html"):
                broken.append(f"{page.relative_to(site)}: {link}")
    assert broken == []
    assert (site / "llms.txt").exists()
    linked = {
        page.parent.name
        for page in site.glob("replication/*/*/*.html")
        if 'href="report.html"' in pages[page]
    }
    assert linked == {"noise"}, "the page whose report is there, and no other"


def test_the_index_of_estimators_has_each_once():
    text = (DOCS / "api" / "estimators.md").read_text("utf-8")
    assert sorted(re.findall(r"^   (\w+)$", text, re.MULTILINE)) == sorted(
        import_module("lit_klrb.estimators").__all__
    )


def test_every_page_is_in_the_list_for_programs_or_on_the_front_page():
    listed = (DOCS / "_root" / "llms.txt").read_text("utf-8") + (DOCS / "index.md").read_text("utf-8")
    for page in DOCS.glob("*.md"):
        assert page.stem in listed, page.name
    for name in re.findall(r"\]\((\w+\.md)\)", (DOCS / "_root" / "llms.txt").read_text("utf-8")):
        assert (DOCS / name).exists()


def test_the_tables_of_results_have_the_published_numbers():
    page = results_page.PAGE.read_text("utf-8")
    assert page.count("<!-- table: ") == len(results_page.TABLES)
    assert results_page.written(page) == page


def test_the_defaults_of_other_software_are_those_of_the_whole_table():
    evidence = (DOCS.parent / "replication" / "evidence" / "released_losses.md").read_text("utf-8")
    software, expected = "", {}
    for line in evidence.splitlines():
        software = match[1] if (match := re.match(r"\| \*\*(.+?)\*\*", line)) else software
        if ", **default** |" in line:
            gradient = line.split(" | ")[3]
            name = re.match(r"(?:[\d.]+ x )?(\w+)", gradient)[1]
            expected.setdefault(name, set()).add(software)
    names = set().union(*expected.values())
    rows = re.findall(
        r"^\| `?(\w+)[^|]*\|[^|]*\|[^|]*\|([^|]*)\|$", (DOCS / "certify.md").read_text("utf-8"), re.M
    )
    found = {row: {name for name in names if name in cell} for row, cell in rows}
    assert {row: cell for row, cell in found.items() if cell} == expected

"""Publication of a sweep as plan, one file of results, and report."""

import gzip
import json
import lzma

import pytest
from reading import grid_results
from synthetic import diverge, fail, write_sweep

from analysis.checks import load_sweep
from analysis.cli import main
from analysis.results import layout
from replication.__main__ import main as replication

DESIGN = {"replicates": 2, "betas": {0: 0.1}}


@pytest.fixture
def runs(tmp_path):
    return write_sweep(tmp_path / "runs", edit=diverge(("RaoBlackwell", 0, 1)), **DESIGN)


def publish(runs, output):
    return replication(["publish", str(runs), "--output", str(output)])


@pytest.fixture
def published(runs, tmp_path, undrawn):
    """The published sweep, whose page has no drawings."""
    output = tmp_path / "published"
    assert publish(runs, output) == 0
    return output


def unpack(output):
    """Replace the archive of a published sweep by one that is not compressed, and return its path."""
    packed = output / "results.jsonl.xz"
    (output / "results.jsonl").write_bytes(lzma.decompress(packed.read_bytes()))
    packed.unlink()
    return output / "results.jsonl"


def test_a_published_sweep_has_the_runs_of_the_sweep_and_verifies(runs, tmp_path, capsys):
    output = tmp_path / "published"
    assert publish(runs, output) == 0
    assert {path.name for path in output.iterdir()} == {
        "plan.json.xz",
        "results.jsonl.xz",
        "results.json",
        "report.html",
    }
    ours, theirs = load_sweep(output), load_sweep(runs)
    assert [run.checksum for run in ours.runs] == [run.checksum for run in theirs.runs]
    assert not ours.problems
    assert publish(output, tmp_path / "again") == 0
    again = tmp_path / "again" / "results.jsonl.xz"
    assert again.read_bytes() == (output / "results.jsonl.xz").read_bytes()
    capsys.readouterr()
    assert main(["verify", str(output)]) == 0
    assert "6 results" in capsys.readouterr().out


def test_what_a_killed_publication_left_is_removed_by_the_next(runs, published):
    left = [published / f".{name}.0123456789abcdef.partial" for name in ("plan.json.xz", "results.jsonl.xz")]
    for path in left:
        path.write_bytes(b"half of a file")
    assert publish(runs, published) == 0
    assert not any(path.exists() for path in left)


def test_failures_are_published_too(runs, tmp_path, undrawn):
    name = grid_results(runs)["MonteCarlo", 0, 0]["id"]
    layout.result_path(runs, name).unlink()
    fail(runs, ("MonteCarlo", 0, 0))
    assert publish(runs, tmp_path / "published") == 0
    assert [failure.cell.id for failure in load_sweep(tmp_path / "published").failures] == [name]


def test_an_edited_line_and_a_repeated_one_are_problems(published):
    archive = unpack(published)
    lines = archive.read_text().splitlines()
    archive.write_text("\n".join([*lines, lines[0]]))
    assert "has two results of the cell" in load_sweep(published).problems[0].text
    archive.write_text("\n".join([lines[0].replace('"schema":1', '"schema": 1'), *lines[1:]]))
    (problem,) = (one.text for one in load_sweep(published).problems)
    assert problem == (
        "results.jsonl/line 1: does not match its checksum; it was changed after it was published"
    )


def test_an_incomplete_sweep_and_another_sweep_in_the_way_are_refused(published, tmp_path, capsys):
    other = write_sweep(tmp_path / "other", lift={"RaoBlackwell": 1.0}, **DESIGN)
    assert publish(other, published) == 2
    assert "contains another sweep; name a new directory" in capsys.readouterr().err
    layout.result_path(other, grid_results(other)["MonteCarlo", 0, 0]["id"]).unlink()
    assert publish(other, tmp_path / "new") == 2
    assert "have no result" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_cells_with_two_results_are_not_published(runs, tmp_path, capsys):
    (runs / "refused").mkdir()
    (runs / "refused" / "x.json").touch()
    assert publish(runs, tmp_path / "published") == 2
    assert "1 cell gave a second, different result: refused/" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "results.jsonl: has no results"), (b"\n\n", "line 1 is empty")],
)
def test_an_archive_without_results_is_one_line(tmp_path, capsys, content, message):
    archive = tmp_path / "results.jsonl"
    archive.write_bytes(content)
    assert main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("line", [b"[1, 2]", b"[", b'{"checksum": 3}'])
def test_a_line_of_another_shape_is_a_problem(published, line):
    with unpack(published).open("ab") as file:
        file.write(line)
    (problem,) = (one.text for one in load_sweep(published).problems)
    assert problem.startswith("results.jsonl/line 7: ")


def test_single_results_beside_an_archive_are_refused(published, capsys):
    (published / "results").mkdir()
    (published / "results" / "x.json").write_text(json.dumps({}))
    assert main(["report", str(published)]) == 2
    assert "has both results.jsonl.xz and results/" in capsys.readouterr().err


def test_every_command_reads_an_archive_compressed_or_not(published, runs, capsys):
    packed, numbers = (published / "results.jsonl.xz").read_bytes(), (published / "results.json").read_bytes()
    plain = unpack(published)
    assert main(["verify", str(published)]) == 0
    assert main(["compare", str(published), str(runs)]) == 0
    assert replication(["report", str(published)]) == 0
    assert (published / "results.json").read_bytes() == numbers
    assert publish(published, published) == 0
    assert (published / "results.jsonl.xz").read_bytes() == packed
    assert not plain.exists()
    assert main(["verify", str(published)]) == 0
    assert main(["compare", str(published), str(runs)]) == 0
    plain.write_bytes(b"")
    capsys.readouterr()
    assert main(["verify", str(published)]) == 2
    assert "has both results.jsonl and results.jsonl.xz; remove one" in capsys.readouterr().err


def test_files_packed_by_gzip_are_read(published, capsys):
    for name in ("plan.json", "results.jsonl"):
        content = lzma.decompress((published / f"{name}.xz").read_bytes())
        (published / f"{name}.xz").unlink()
        (published / f"{name}.gz").write_bytes(gzip.compress(content))
    assert main(["verify", str(published)]) == 0
    assert main(["report", str(published)]) == 0
    (published / "results.jsonl.gz").write_bytes(gzip.compress(content)[:-20])
    capsys.readouterr()
    assert main(["verify", str(published)]) == 2
    assert "results.jsonl.gz: cannot be unpacked (Compressed file ended" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not packed at all", "cannot be unpacked (Input format not supported"),
        (lzma.compress(b"x" * 1000)[:-9], "cannot be unpacked (Compressed data ended"),
        (lzma.compress(b"x" * 1000)[:15] + b"\xff" * 30, "cannot be unpacked"),
        (lzma.compress(b""), "has no results"),
    ],
    ids=["not packed", "cut", "damaged", "empty"],
)
def test_a_damaged_archive_is_one_line(tmp_path, capsys, content, message):
    (tmp_path / "results.jsonl.xz").write_bytes(content)
    assert main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path}/results.jsonl.xz: ")
    assert message in error
    assert error.count("\n") == 1

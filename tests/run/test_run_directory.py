"""Whose a directory is: only a run is renamed, one process writes, and a failed start leaves no trace."""

import fcntl
import json

import pytest

from lit_klrb import schema
from lit_klrb.errors import ConfigurationError
from lit_klrb.run.directory import RunDirectory, next_attempt, run_id


def files(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def made(root, *names):
    """A run that left some files."""
    with RunDirectory(root) as directory:
        directory.begin()
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(directory.run_id)
    return directory.run_id


def refused(root, *arguments):
    with RunDirectory(root) as directory, pytest.raises(ConfigurationError) as refusal:
        directory.begin(*arguments)
    message = str(refusal.value)
    assert message.startswith("trainer.default_root_dir: ")
    assert "\n" not in message
    return message


def test_each_earlier_run_keeps_a_place_of_its_own(tmp_path, capsys):
    root = tmp_path / "run"
    ids = [made(root, schema.CONFIG) for _ in range(3)]
    assert len({*ids}) == 3
    assert [run_id(tmp_path / name) for name in ("run.1", "run.2", "run")] == ids
    assert (tmp_path / "run.1" / schema.CONFIG).read_text() == ids[0]
    assert capsys.readouterr().out == "".join(f"kept the earlier run as {root}.{n}\n" for n in (1, 2))


@pytest.mark.parametrize("name", [schema.CONFIG, schema.CHECKPOINT, "metrics/x", schema.SUMMARY])
def test_what_is_no_run_is_neither_renamed_nor_written_to(tmp_path, name):
    root = tmp_path / "project"
    (root / name).parent.mkdir(parents=True)
    (root / name).write_text("mine")
    assert name.split("/")[0] in refused(root)
    assert [path.name for path in tmp_path.iterdir()] == ["project"]
    assert (root / name).read_text() == "mine"
    assert files(root) == sorted([".lock", name])


def test_a_run_that_was_killed_before_it_wrote_anything_is_not_kept(tmp_path):
    first = made(tmp_path / "run")
    (tmp_path / "run" / f".config.yaml.{'0' * 16}.partial").touch()
    assert made(tmp_path / "run") != first
    assert files(tmp_path) == ["run/.lock", f"run/{schema.RUN}"]


def test_other_files_may_be_there_and_stay(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with RunDirectory(tmp_path) as directory:
        directory.begin()
        assert files(tmp_path) == [".lock", "notes.txt", schema.RUN]
        for name in schema.OWN[1:]:  # as files or folders of the evaluation before the first step
            (tmp_path / name / "step_000000.csv").parent.mkdir()
            (tmp_path / name / "step_000000.csv").touch()
        directory.abandon()
    assert files(tmp_path) == ["notes.txt"]


def test_two_processes_cannot_write_to_one_directory(tmp_path):
    root = tmp_path / "run"
    with RunDirectory(root) as first:
        first.begin()
        assert "another run is writing to" in refused(root)
        assert "another run is writing to" in refused(root, first.run_id)
        assert files(tmp_path) == ["run/.lock", f"run/{schema.RUN}"]
    made(root)


@pytest.mark.parametrize("taken", [True, False])
def test_a_directory_that_another_process_moves_away_in_the_moment_of_locking_is_left(
    tmp_path, monkeypatch, taken
):
    root, lock = tmp_path / "run", fcntl.flock
    first = made(root)

    def move_away(descriptor, operation):
        monkeypatch.undo()
        root.rename(tmp_path / "run.1")
        if taken:
            made(root)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", move_away)
    assert "another run is writing to" in refused(root)
    assert run_id(tmp_path / "run.1") == first
    assert (run_id(root) is not None) == taken


def test_an_earlier_run_is_held_until_the_new_one_has_its_place(tmp_path):
    made(tmp_path / "run")
    with RunDirectory(tmp_path / "run") as new:
        new.begin()
        assert "another run is writing to" in refused(tmp_path / "run")


def test_a_failed_start_brings_the_earlier_run_back(tmp_path, capsys):
    root = tmp_path / "run"
    first = made(root, schema.CONFIG, schema.CHECKPOINT)
    before = files(root)
    with RunDirectory(root) as directory:
        directory.begin()
        (root / schema.CONFIG).write_text("new")
        directory.abandon()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert files(root) == before
    assert run_id(root) == first
    assert capsys.readouterr().out.endswith(f"the earlier run is back in {root}\n")


def test_a_failed_start_in_a_new_place_leaves_nothing(tmp_path):
    with RunDirectory(tmp_path / "run") as directory:
        directory.begin()
        directory.abandon()
    assert not (tmp_path / "run").exists()


def test_a_run_is_resumed_in_its_own_directory_or_a_new_one_and_in_no_other(tmp_path):
    first, other = (made(tmp_path / name, schema.CONFIG) for name in ("first", "other"))
    for root in (tmp_path / "first", tmp_path / "new"):
        with RunDirectory(root) as directory:
            directory.begin(first)
        assert run_id(root) == directory.run_id == first
    assert "belongs to another run than ckpt_path" in refused(tmp_path / "other", first)
    # A checkpoint without a run's id belongs to no run with a directory.
    assert "belongs to another run than ckpt_path" in refused(tmp_path / "other", "")
    assert run_id(tmp_path / "other") == other
    assert not (tmp_path / "other.1").exists()


def test_unfinished_files_of_a_killed_attempt_are_removed(tmp_path):
    ours = [f"checkpoints/.last.ckpt.{'1f' * 8}.partial", "checkpoints/.previous.ckpt.partial"]
    ours += ["checkpoints/.weight.a1_z.partial", f"metrics/attempt_0/.metrics.csv.{'2e' * 8}.partial"]
    ours += [f".summary.json.{'3d' * 8}.partial"]
    mine = [f".notes.{'4c' * 8}.partial", "checkpoints/.draft.partial", "thesis/.chapter.partial"]
    mine += [f"thesis/.chapter.{'5b' * 8}.partial", ".summary.json.partial"]
    first = made(tmp_path, *ours, *mine, schema.CHECKPOINT)
    with RunDirectory(tmp_path) as directory:
        directory.begin(first)
    assert files(tmp_path) == sorted([".lock", schema.CHECKPOINT, schema.RUN, *mine])


def test_a_link_in_place_of_the_lock_makes_no_file(tmp_path):
    root = tmp_path / "run"
    root.mkdir()
    (root / ".lock").symlink_to(tmp_path / "made")
    assert "cannot write to" in refused(root)
    assert not (tmp_path / "made").exists()


def sweep(folder):
    """A sweep with one published cell, and the link by which its stage is known."""
    cell = folder / schema.CELLS / "0123"
    made(cell, schema.CONFIG)
    (folder / schema.RESULTS).mkdir()
    (folder / schema.RESULTS / "0123.json").write_text("{}")
    (folder / "sft").symlink_to("cells/0123")
    return cell


def test_published_cells_are_read_only_links_to_them_included(tmp_path):
    cell = sweep(tmp_path)
    for root in (cell, tmp_path / "sft"):
        for arguments in ((), (run_id(cell),)):
            assert f"{cell} is a published cell of the sweep in {tmp_path}" in refused(root, *arguments)
    assert [path.name for path in cell.parent.iterdir()] == ["0123"]


def test_a_sweep_may_run_a_published_cell_again_once_it_has_emptied_it(tmp_path):
    cell = sweep(tmp_path)
    for name in (schema.RUN, schema.CONFIG, ".lock"):
        (cell / name).unlink()
    (cell / "log.txt").write_text("running")
    made(cell)


def test_the_directory_one_is_in_is_used_and_not_renamed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made(tmp_path, schema.CONFIG)
    for root in (".", str(tmp_path)):
        assert "is the current directory" in refused(root)
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert "is the current directory" in refused("..")
    monkeypatch.chdir(tmp_path)
    with RunDirectory(".") as directory:
        directory.begin(run_id(tmp_path))
        assert directory.resume_command == (
            "lit-klrb fit --config config.yaml --ckpt_path checkpoints/last.ckpt"
        )


def test_a_file_where_the_directory_should_be(tmp_path):
    (tmp_path / "file").touch()
    assert "cannot write to" in refused(tmp_path / "file")
    assert "cannot write to" in refused(tmp_path / "file" / "run")


@pytest.mark.parametrize("content", ["", "[", "[]", "{}", '{"run": 1}', "\xff"])
def test_a_damaged_mark_is_none(tmp_path, content):
    (tmp_path / schema.RUN).write_text(content, "latin-1")
    assert run_id(tmp_path) is None
    (tmp_path / schema.RUN).write_text(json.dumps({"run": "x"}))
    assert run_id(tmp_path) == "x"


def test_attempts_are_numbered_by_the_last_one(tmp_path):
    assert next_attempt(tmp_path) == 0
    for number in (0, 1, 7):
        (tmp_path / schema.METRICS_DIR / f"attempt_{number}").mkdir(parents=True)
        assert next_attempt(tmp_path) == number + 1
    (tmp_path / schema.METRICS_DIR / "attempt_x").mkdir()
    assert next_attempt(tmp_path) == 8

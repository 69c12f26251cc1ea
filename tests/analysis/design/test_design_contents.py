"""Models and data count by their content; the checkpoint of a run by its trained weights."""

import json
import os

import pytest

from analysis.design.fingerprint import content_hash


@pytest.fixture
def checkpoint(tmp_path):
    """Write a run with a checkpoint and, after it, its summary."""

    def write(name, content=b"weights and paths", **summary):
        path = tmp_path / name / "checkpoints" / "last.ckpt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        (tmp_path / name / "summary.json").write_text(json.dumps(summary))
        return path

    return write


def test_a_run_repeated_elsewhere_has_the_same_checkpoint(checkpoint):
    one = checkpoint("one", weights_sha256="ab" * 32)
    assert content_hash(checkpoint("two", b"other paths", weights_sha256="ab" * 32)) == content_hash(one)
    assert content_hash(checkpoint("three", weights_sha256="cd" * 32)) != content_hash(one)


def test_a_checkpoint_that_is_newer_than_its_summary_counts_by_its_bytes(checkpoint, tmp_path):
    path = checkpoint("run", weights_sha256="ab" * 32)
    before = content_hash(path)
    late = (tmp_path / "run" / "summary.json").stat().st_mtime_ns + 10**9
    os.utime(path, ns=(late, late))
    after = content_hash(path)
    (tmp_path / "alone").write_bytes(path.read_bytes())
    assert before != after == content_hash(tmp_path / "alone")


def test_without_the_hash_of_its_weights_a_checkpoint_counts_by_its_bytes(checkpoint):
    one, same, other = checkpoint("one"), checkpoint("two"), checkpoint("three", b"others")
    assert content_hash(one) == content_hash(same) != content_hash(other)


def test_a_folder_counts_by_the_names_and_contents_of_its_files(tmp_path):
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
    (tmp_path / "one" / "a").write_text("x")
    (tmp_path / "two" / "a").write_text("x")
    (tmp_path / "three" / "b").write_text("x")
    one, two, three = (content_hash(tmp_path / name) for name in ("one", "two", "three"))
    assert one == two != three
    (tmp_path / "two" / "a").write_text("longer")
    assert content_hash(tmp_path / "two") != one

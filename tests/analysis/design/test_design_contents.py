"""Models and data count by their content; a checkpoint by its tensors."""

import os
import zipfile

from analysis.design.fingerprint import content_hash


def write(path, weights=b"weights", rest="paths"):
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", rest)
        archive.writestr("archive/data/0", weights)
    return path


def test_a_checkpoint_counts_by_its_tensors(tmp_path):
    """A copy, or the run repeated elsewhere, is the same; another one is not, whatever the files' times."""
    one = write(tmp_path / "run" / "checkpoints" / "last.ckpt")
    before, times = content_hash(one), one.stat()
    assert content_hash(write(tmp_path / "copy.ckpt", rest="other paths")) == before
    write(one, b"others!")
    os.utime(one, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert content_hash(one) != before


def test_another_file_counts_by_its_bytes(tmp_path):
    for name, content in (("one", "rows"), ("copy", "rows"), ("other", "more rows")):
        (tmp_path / name).write_text(content)
    one, copy, other = (content_hash(tmp_path / name) for name in ("one", "copy", "other"))
    assert one == copy != other


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

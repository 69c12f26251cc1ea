"""Checkpoints count by their content: what they hold, not which run wrote them and where."""

import hashlib
import pickle
import resource
import struct
import zipfile
from collections import OrderedDict
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from analysis.design.contents import content_hash

CHECKPOINT = {
    "global_step": 3,
    "state_dict": OrderedDict(weight=torch.arange(6.0).view(2, 3), bias=torch.zeros(2)),
    "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(2), "step": torch.tensor(3.0)}}}],
    "callbacks": {"RunCheckpoint": {"dirpath": "/home/one/runs", "best_model_path": "/home/one/runs/a.ckpt"}},
    "run": {"id": "76bdef36eeced37c", "settings": {"ckpt_path": None}, "contents": {"reward": "4c19"}},
    "tokenizer_files": {"tokenizer.json": "{}"},
}


@pytest.fixture
def hashed(tmp_path):
    """The hash of a checkpoint after a change."""

    def compute(change=None, name="last.ckpt"):
        content = deepcopy(CHECKPOINT)
        if change is not None:
            change(content)
        torch.save(content, tmp_path / name)
        return content_hash(tmp_path / name)

    return compute


@pytest.fixture
def memory_limit():
    """At most 4 GB more of address space."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**32, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_run_repeated_elsewhere_has_the_same_checkpoint(hashed):
    def elsewhere(content):
        content["run"] = {"id": "other", "settings": {"ckpt_path": "last.ckpt"}, "contents": {}}
        content["callbacks"]["RunCheckpoint"]["dirpath"] = "/tmp"

    assert hashed(elsewhere, "elsewhere.ckpt") == hashed()


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["state_dict"]["weight"].add_(1),
        lambda content: content["state_dict"].update(weight=torch.arange(6.0).view(3, 2)),
        lambda content: content["state_dict"].update(bias=torch.zeros(2, dtype=torch.float16)),
        lambda content: content["state_dict"].update(bias=torch.zeros(2, dtype=torch.int32)),
        lambda content: content["state_dict"].update(bias=CHECKPOINT["state_dict"]["weight"][0, :2]),
        lambda content: content["state_dict"].update(more=torch.zeros(1)),
        lambda content: content.update(state_dict=OrderedDict(reversed(content["state_dict"].items()))),
        lambda content: content["tokenizer_files"].update({"tokenizer.json": "{ }"}),
        lambda content: content["optimizer_states"][0]["state"][0]["exp_avg"].mul_(2),
        lambda content: content.update(global_step=4),
        lambda content: content.update({"tokenizer_files": {}, "tokenizer.json": "{}"}),  # one level up
    ],
)
def test_everything_else_counts(hashed, change):
    assert hashed(change, "changed.ckpt") != hashed()


def test_lists_are_told_apart_by_their_nesting(hashed):
    nested = [[[1], 2], [[1, 2]], [[1, [2]]]]
    found = {hashed(lambda content, loops=loops: content.update(loops=loops)) for loops in nested}
    assert len(found) == len(nested)


def test_parts_of_one_storage_are_told_apart(hashed):
    whole = torch.arange(6.0)
    halves = [
        hashed(lambda content, part=part: content["state_dict"].update(part=part), f"{number}.ckpt")
        for number, part in enumerate([whole[:3], whole[3:]])
    ]
    assert halves[0] != halves[1]


@pytest.mark.parametrize("content", [b"", b"text", b"PK\3\4 truncated"])
def test_other_files_count_by_their_bytes(tmp_path, content):
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    first.write_bytes(content)
    second.write_bytes(content)
    third.write_bytes(content + b" ")
    assert content_hash(first) == content_hash(second) != content_hash(third)


def test_a_zip_archive_that_is_no_checkpoint_counts_by_its_bytes(tmp_path):
    torch.save({"run": 1}, tmp_path / "one.pt")
    torch.save({"run": 2}, tmp_path / "two.pt")
    assert content_hash(tmp_path / "one.pt") != content_hash(tmp_path / "two.pt")


class Harmful:
    """Creates a file if a pickle of it is loaded as usual."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def shared_without_end():
    """Small as a pickle; 2^60 objects if every reference is followed."""
    content = ["x"]
    for _ in range(60):
        content = [content, content]
    return content


def within_itself():
    content = []
    content.append(content)
    return content


@pytest.mark.parametrize(
    ("pickled", "read"),
    [
        (lambda: pickle.dumps({"state_dict": shared_without_end()}, protocol=2), False),
        (lambda: pickle.dumps({"state_dict": within_itself()}, protocol=2), False),
        (lambda: pickle.dumps({"state_dict": {1, 2}}, protocol=4), False),
        # An entry of the memo whose index would need 32 GB of the unpickler in C
        (lambda: b"\x80\x02}r" + struct.pack("<I", 2**32 - 1) + b"X\x0a\0\0\0state_dictK\x01s.", True),
    ],
)
def test_crafted_checkpoints_take_bounded_time_and_memory(tmp_path, pickled, read, memory_limit):
    with zipfile.ZipFile(tmp_path / "last.ckpt", "w") as archive:
        archive.writestr("archive/data.pkl", pickled())
    as_bytes = hashlib.sha256((tmp_path / "last.ckpt").read_bytes()).hexdigest()
    assert (content_hash(tmp_path / "last.ckpt") != as_bytes) == read


def test_an_archive_that_unpacks_to_more_than_its_size_is_not_unpacked(tmp_path):
    with zipfile.ZipFile(tmp_path / "last.ckpt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"state_dict": 1}, protocol=2))
        archive.writestr("archive/data/0", bytes(2**20))
    as_bytes = hashlib.sha256((tmp_path / "last.ckpt").read_bytes()).hexdigest()
    assert content_hash(tmp_path / "last.ckpt") == as_bytes


def test_hashing_calls_nothing_that_a_pickle_names(tmp_path):
    with zipfile.ZipFile(tmp_path / "last.ckpt", "w") as archive:
        pickled = pickle.dumps({"state_dict": Harmful(tmp_path / "made")}, protocol=2)
        archive.writestr("archive/data.pkl", pickled)
    as_bytes = hashlib.sha256((tmp_path / "last.ckpt").read_bytes()).hexdigest()
    assert content_hash(tmp_path / "last.ckpt") != as_bytes  # it was read as a checkpoint
    assert not (tmp_path / "made").exists()

"""Commands that are killed at random times and repeated end like undisturbed ones, with nothing left."""

import json
import os
import random
import shutil
import subprocess
import sys
import time

import pytest
import torch
from gguf_files import llama, write

from benchmarks.kills.children import Child
from lit_klrb.cli import main as lit_klrb
from lit_klrb.data.tokenizer import train_bpe
from replication import __main__ as replication

# Kills of each command; a table of more needs only another number here.
KILLS = int(os.environ.get("LIT_KLRB_KILLS", "2"))
TEXTS = ["It was a good film.", "It was a bad film, and a long one."]


def run_with_one_thread(argv):
    torch.set_num_threads(1)  # threads do not survive a fork
    return (replication if argv[0] == "study" else lit_klrb).main(argv)


def study(chain, place):
    pairs = [
        {
            "class_path": "CheckpointPair",
            "init_args": {
                "policy_path": chain.checkpoint(policy),
                "reference_path": chain.checkpoint(reference),
                "max_new_tokens": 8,
            },
        }
        for policy, reference in (("dpo", "sft"), ("rloo", "sft"))
    ]
    settings = {"pairs": pairs, "prompts": 4, "completions": 10, "group_sizes": [1, 5], "independent": 20}
    config = {"study": {"class_path": "PairEstimationStudy", "init_args": settings}}
    (place / "study.yaml").write_text(json.dumps(config))
    directory = ["--trainer.default_root_dir", str(place / "run")]
    return ["study", "--config", str(place / "study.yaml"), *directory]


def import_gguf(chain, place):
    tokenizer = train_bpe(TEXTS * 4, vocab_size=300)
    write(place / "tiny.gguf", llama(len(tokenizer)), tokenizer)
    return ["import-gguf", str(place / "tiny.gguf"), "--output_dir", str(place / "folder")]


def names(place):
    return {os.path.join(folder, name) for folder, _, files in os.walk(place) for name in files}


def contents(place):
    """The files of a folder, without measured seconds and the ids of runs; its folders have no content."""
    found = {}
    for path in sorted(place.rglob("*")):
        content = path.read_bytes().replace(bytes(place), b"PLACE") if path.is_file() else None
        if path.name == "estimation.json":
            content = json.loads(content)
            for snapshot in content["snapshots"]:
                del snapshot["seconds"]
        if path.name == "run.json":
            content = sorted(json.loads(content))
        found[path.relative_to(place).as_posix()] = content
    return found


@pytest.mark.parametrize("command", [study, import_gguf])
def test_a_command_that_is_killed_and_repeated(chain, tmp_path, command):
    draw, place = random.Random(command.__name__), tmp_path / "place"

    def child(argv):
        return Child(run_with_one_thread, argv, tmp_path / "log", {"TMPDIR": str(tmp_path)})

    def finished(argv):
        with child(argv) as whole:
            assert whole.wait() == 0, whole.last_line
        return whole

    def prepared():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        return command(chain, place)

    whole = finished(prepared())
    expected = contents(place)
    seconds, kills, partly = time.monotonic() - whole.began, 0, 0
    while kills < KILLS:
        argv = prepared()
        before, at_start = contents(place), names(place)
        with child(argv) as killed:
            if draw.random() < 0.5:  # anywhere
                killed.wait(draw.uniform(0, seconds))
            else:  # shortly after it has changed something
                while names(place) == at_start and killed.wait(0.001) is None:
                    pass
                killed.wait(draw.uniform(0, 0.01))
            code = killed.kill()
        assert code <= 0, killed.last_line
        if code < 0:
            kills += 1
            partly += contents(place) not in (before, expected)
            if command is import_gguf and (place / "folder").exists():  # which is complete
                with child(argv) as refused:
                    assert refused.wait() == 2
            else:
                finished(argv)
            assert contents(place) == expected
    print(f"{command.__name__}: {kills} kills in {seconds:.2f} s, {partly} with unfinished files")


def test_sigterm_while_a_command_imports_is_a_stop(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'analysis.results':\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    place = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    command = [sys.executable, "-m", "analysis", "report", "runs/none"]
    ended = subprocess.run(command, env={**os.environ, **place}, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (143, "stopped by SIGTERM\n")

"""A small project with a plan whose cells take milliseconds, run with the actual commands."""

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import yaml

import analysis.report.assessment  # noqa: F401 - a sweep ends with it, and would import it each time
from analysis.cli import main
from benchmarks.kills.children import Child, session

HERE = Path(__file__).parent


class Command(Child):
    """A command of `lit-klrb`."""

    def ended(self, seconds=60):
        """Wait for its end; return (exit code, output)."""
        assert self.wait(seconds) is not None, "timed out"
        os.close(self._told)
        return self.code, self.log.read_text()


class Project:
    """A folder with a plan and the configurations of its stages."""

    def __init__(self, directory):
        self.directory = directory
        paths = filter(None, (str(HERE), os.environ.get("PYTHONPATH")))
        self.environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}

    def write(
        self,
        name="plan",
        *,
        module="fake_job",
        rloo=None,
        sft=None,
        grid=None,
        dpo_threads=None,
        gpus=None,
        **keys,
    ):
        """Write the plan `name`, whose sweep has a directory of the same name. Returns the plan's path."""
        for stage, config in {"sft": sft, "dpo": None, "rloo": rloo}.items():
            (self.directory / f"{name}_{stage}.yaml").write_text(yaml.safe_dump(config or {"seconds": 0}))
        inputs = {"model.init_args.reference_path": "sft"}
        plan = {
            "name": name,
            "directory": str(self.directory / name),
            "module": module,
            "stages": {
                "sft": {"config": f"{name}_sft.yaml"},
                "dpo": {"config": f"{name}_dpo.yaml", "inputs": inputs, "threads": dpo_threads},
                "rloo": {
                    "config": f"{name}_rloo.yaml",
                    "gpus": gpus,
                    "inputs": {**inputs, "model.init_args.policy_path": "dpo"},
                },
            },
            "grid": {"arms": ["MonteCarlo", "RaoBlackwell"], "beta": {0: 0.1, 1: 0.2}, "replicates": 2}
            | (grid or {}),
            "primary": {"control": "MonteCarlo"},
        } | keys
        path = self.directory / f"{name}.yaml"
        path.write_text(yaml.safe_dump(plan, sort_keys=False))
        return path

    def start(self, *arguments, **environment):
        """Start a command in a new session, as a terminal does, forked from this process with its imports."""

        def command(argv):
            os.chdir(self.directory)
            sys.path.insert(0, str(self.directory))
            # The tests may run in the background of a shell, which makes its children ignore Ctrl-C.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            return main(argv)

        descriptor, log = tempfile.mkstemp(".out", dir=self.directory)
        os.close(descriptor)
        return Command(command, [*map(str, arguments)], Path(log), self.environment | environment)

    def run(self, *arguments, **environment):
        """Run a command; return (exit code, output)."""
        return self.start(*arguments, **environment).ended(120)

    def results(self, name="plan"):
        return {path.name: path.read_bytes() for path in (self.directory / name / "results").iterdir()}

    def ran(self, name="plan"):
        """Ids of the cells in the order of their starts, with repetitions."""
        path = self.directory / name / "ran.txt"
        return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []

    def gpus(self, name="plan"):
        """Stage -> the GPUs that each of its cells saw, with the number of these cells."""
        cells = json.loads((self.directory / name / "plan.json").read_text())["cells"]
        stages = {cell["id"]: cell["stage"] for cell in cells}
        lines = (self.directory / name / "gpus.txt").read_text().splitlines()
        found = {stage: Counter() for stage in stages.values()}
        for cell, _, gpus in (line.partition(" ") for line in lines):
            found[stages[cell]][gpus] += 1
        return found


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def kill_session(process):
    """Kill all processes of a command and wait until they have ended."""
    for pid in session(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    wait_until(lambda: not session(process.pid))

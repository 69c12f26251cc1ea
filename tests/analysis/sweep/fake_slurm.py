"""Stand-ins for commands of SLURM: a job is a process, whose number is its own.

Jobs that a test lists in `lost` beside them die without an exit code. All run on the node `two` if they may,
where they begin with the lines of `unfit`.
"""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

PLACE = Path(__file__).parent


def sbatch(*options):
    (output,) = (word.partition("=")[2] for word in options if word.startswith("--output="))
    with (PLACE / "submitted").open("a") as file:
        file.write(" ".join(options) + "\n")
    lost = PLACE / "lost"
    script = sys.stdin.read()
    if lost.exists():
        lost.unlink()
        script = "#!/bin/sh\necho started; echo slurmstepd: killed; exit 1\n"
    if "--exclude=two" not in options and (PLACE / "unfit").exists():
        script = (PLACE / "unfit").read_text() + script
    environment = os.environ | {"SLURM_NTASKS": "2", "SLURMD_NODENAME": "two", "OUTPUT": output}
    with open(output, "w") as out:
        job = subprocess.Popen(["/bin/sh", "-c", script], stdout=out, stderr=out, env=environment)
    print(f"{job.pid};cluster")


def squeue(*_):
    for process in Path("/proc").glob("[0-9]*"):
        print(process.name)


def scontrol(*_):
    print("JobId=1 NodeList=two")


def scancel(*words):
    options, jobs = ([word for word in words if (word[0] == "-") == option] for option in (True, False))
    if "--state=PENDING" in options:
        return
    for job in jobs:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(job), signal.SIGTERM if "--signal=TERM" in options else signal.SIGKILL)


if __name__ == "__main__":
    globals()[Path(sys.argv[0]).name](*sys.argv[1:])

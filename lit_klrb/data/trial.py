"""Trying what a stranger's program would do, in a process that is stopped if it does too much."""

import os
import resource
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

SECONDS, BYTES = 10, 2**30


def ends_in_time(work: Callable[[], object]) -> bool:
    """Whether a function of Python alone ends within ten seconds and a gigabyte, whatever its result."""
    memory, statm = None, Path("/proc/self/statm")
    if statm.exists():
        memory = int(statm.read_text().split()[0]) * resource.getpagesize() + BYTES
    before = os.environ.setdefault("TOKENIZERS_PARALLELISM", "")  # or their library warns of the fork
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads in the parent
        child = os.fork()
    if child == 0:  # it ends with 1 where memory is exhausted; what else is raised, the parent raises again
        try:
            if memory is not None:
                resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
            work()
        except MemoryError:
            os._exit(1)
        finally:
            os._exit(0)
    if not before:
        del os.environ["TOKENIZERS_PARALLELISM"]
    end = time.monotonic() + SECONDS
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
    return os.waitpid(child, 0)[1] == 0

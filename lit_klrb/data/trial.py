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
    pages = (
        int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else None
    )
    before = os.environ.setdefault("TOKENIZERS_PARALLELISM", "")  # or their library warns of the fork
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads in the parent
        child = os.fork()
    if child == 0:
        _try(work, None if pages is None else pages * resource.getpagesize() + BYTES)
    if not before:
        del os.environ["TOKENIZERS_PARALLELISM"]
    end = time.monotonic() + SECONDS
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
    return os.waitpid(child, 0)[1] == 0


def _try(work: Callable[[], object], memory: int | None) -> None:
    """The child: it ends with 1 where memory is exhausted."""
    code = 0
    try:
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        work()
    except MemoryError:
        code = 1
    except BaseException:  # which the parent raises again
        pass
    finally:
        os._exit(code)

"""Measurement of time and memory, and a description of the machine."""

import ctypes
import gc
import importlib.metadata
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import torch

from lit_klrb.functional.products import quick_products
from lit_klrb.run.machine import processor
from replication.studies.model_pairs import now

MINIMUM_ROUNDS = 3
# Where everything is measured
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
T = TypeVar("T")


def interleaved_times(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    seconds: float = math.inf,
    clock: Callable[[], float] = now,
) -> dict[str, list[float]]:
    """Times of all runs in all rounds; runs alternate, so that disturbances affect all of them.

    Args:
        runs: What to time, already warm.
        rounds: Rounds at most.
        seconds: No round begins after these, once there are three.
        clock: What is measured, in seconds; CPU time varies less on a machine with other work.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    begin = time.perf_counter()
    for done in range(rounds):
        if done >= MINIMUM_ROUNDS and time.perf_counter() - begin > seconds:
            break
        for name, run in runs.items():
            gc.collect()
            start = clock()
            run()
            times[name].append(clock() - start)
    return times


def in_own_process(function: Callable[..., T], *args: object) -> T:
    """The result of a call in a new process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def peak_megabytes(warm_up: Callable[[], object], run: Callable[[], object]) -> float:
    """Peak memory of `run` beyond that before the call, in MB (10^6 bytes): of the GPU, or else resident.

    The warm-up pays for libraries, threads and compilation; what the allocator kept of it is given back.
    """
    warm_up()
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - held) / 1e6
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
    run()
    return (_status_bytes("VmHWM") - before) / 1e6


def _status_bytes(key: str) -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"{key}:\s+(\d+) kB", status)
    assert found
    return int(found[1]) * 1024


def matrix_product_rate(dtype: torch.dtype, rounds: int = 20) -> float:
    """Operations per second of the fastest of some products of two square matrices: the machine's limit."""
    size = 2048 if DEVICE.type == "cpu" else 8192
    one, other = (torch.randn(size, size).to(DEVICE, dtype) for _ in range(2))
    with quick_products():
        (times,) = interleaved_times({"": lambda: one @ other}, rounds).values()
    return 2.0 * size**3 / min(times)


def machine(packages: list[str]) -> str:
    """One line with processor, threads, load and versions."""
    return (
        f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
        f"load {os.getloadavg()[0]:.1f} at the start; {software(packages)}"
    )


def software(packages: list[str]) -> str:
    """Versions of packages."""
    return ", ".join(f"{name} {_version(name)}" for name in packages)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"

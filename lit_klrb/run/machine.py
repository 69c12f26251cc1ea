"""Machine and software, on which the last digits of a run's numbers depend."""

import functools
import platform
import re
from importlib.metadata import version
from pathlib import Path

import torch

from lit_klrb import __version__, schema

# Packages whose version can change a run's results.
PACKAGES = ("torch", "lightning", "transformers", "tokenizers", "numpy")
CPU_INFO = Path("/proc/cpuinfo")
# Units that change which products are computed, and in which order they are added up.
UNITS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")


@functools.cache
def processor() -> str:
    """Processor with its vector units, and the GPU if there is one, such as "AMD EPYC avx2 avx512f"."""
    text = CPU_INFO.read_text("utf-8") if CPU_INFO.exists() else ""
    model = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    flags = {*text.split()}
    gpu = [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    name = model[1].strip() if model else platform.processor() or platform.machine()
    return " ".join([name, *(unit for unit in UNITS if unit in flags), *gpu])


def versions() -> dict[str, str]:
    """The versions of the software that a run's results depend on, and the processor."""
    packages = {name: version(name) for name in PACKAGES}
    own = {"lit_klrb": __version__, "python": platform.python_version()}
    return {**own, schema.PROCESSOR: processor(), **packages}

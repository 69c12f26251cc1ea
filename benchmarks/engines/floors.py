"""The lowest versions that pyproject.toml declares, a requirement a line, for `make lowest`."""

import re
import tomllib
from pathlib import Path

EXTRAS = ("peft", "gguf")


def floors(project: dict) -> list[str]:
    """Dependencies and extras, each at its lowest version."""
    extras = project["optional-dependencies"]
    every = [*project["dependencies"], *(line for name in EXTRAS for line in extras[name])]
    return [re.sub(r">=([\w.]+).*", r"==\1", line) for line in every]


if __name__ == "__main__":
    path = Path(__file__).parents[2] / "pyproject.toml"
    print("\n".join(floors(tomllib.loads(path.read_text("utf-8"))["project"])))

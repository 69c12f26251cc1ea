"""What pyproject.toml cannot say: the files of all folders of configs/, which `lit-klrb init` copies.

They are not inside the package, whose files are hashed into the ids of a sweep's cells.
"""

from pathlib import Path

from setuptools import setup

setup(
    data_files=[
        (f"share/lit-klrb/{folder}", [str(file) for file in sorted(folder.glob("*.yaml"))])
        for folder in sorted(Path("configs").iterdir())
    ]
)

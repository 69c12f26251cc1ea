"""The files of docs/other_trainers.md, as modules."""

import importlib.util
import re
import sys
import tempfile
from pathlib import Path
from types import ModuleType

PAGE = Path(__file__).parents[2] / "docs" / "other_trainers.md"


def write_hooks(folder: Path) -> list[str]:
    """Write the page's files, each of which starts with a comment of its name, and return their names."""
    blocks = re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    for name, text in blocks:
        (folder / f"{name}.py").write_text(text, "utf-8")
    return [name for name, _ in blocks]


def load_hook(name: str) -> ModuleType:
    """One of the files, imported."""
    with tempfile.TemporaryDirectory() as folder:
        write_hooks(Path(folder))
        specification = importlib.util.spec_from_file_location(name, Path(folder) / f"{name}.py")
        assert specification is not None
        assert specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        sys.modules[name] = module
        specification.loader.exec_module(module)
    return module


def install_plugin(folder: Path, group: str, name: str) -> None:
    """Make a file of the page an installed package with an entry point, in a folder put on the path."""
    write_hooks(folder)
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", "utf-8")
    (about / "entry_points.txt").write_text(f"[{group}]\n{name} = {name}\n", "utf-8")
    sys.path.insert(0, str(folder))

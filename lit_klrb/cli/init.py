"""`lit-klrb init DIR`: copies the configurations that come with the package."""

import shutil
import sysconfig
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

import lit_klrb
from lit_klrb.cli.arguments import Arguments
from lit_klrb.errors import ConfigurationError, refusing
from lit_klrb.files import local_path

CONFIGS = "configs"
# The folder of an installed package's configurations, below the prefix of the environment.
SHARED = Path("share", "lit-klrb", CONFIGS)


def shipped() -> Path:
    """The folder with the configurations: of the checkout, or of the installed package."""
    checkout = Path(lit_klrb.__file__).parents[1] / CONFIGS
    files = [file for distribution in distributions(name="lit-klrb") for file in distribution.files or []]
    installed = [Path(str(f.locate())).parents[1] for f in files if SHARED.parts == f.parts[-5:-2]]
    for folder in (checkout, *installed[:1], Path(sysconfig.get_path("data")) / SHARED):
        if (folder / "demo" / "sft.yaml").exists():
            return folder.resolve()
    raise ConfigurationError("this installation has no configurations; copy configs/ from the repository")


def main(argv: Sequence[str]) -> int:
    """Run `init DIR` and return the exit code."""
    parser = Arguments("init", __doc__)
    parser.add_argument("directory", type=local_path, metavar="DIR", help="the folder to write configs/ to")
    directory: Path = parser.parse_args(argv).directory
    target = directory / CONFIGS
    if target.exists():
        raise ConfigurationError(f"{target} exists; name another folder")
    with refusing(f"cannot write {target}", OSError):
        shutil.copytree(shipped(), target)
    print(f"wrote {target}; next, in {directory}: lit-klrb fit --config {CONFIGS}/demo/sft.yaml")
    return 0

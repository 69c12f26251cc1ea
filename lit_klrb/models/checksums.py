"""Checksums of the weights in an exported folder, in the format of `sha256sum`."""

import hashlib
import re
from pathlib import Path

from lit_klrb.errors import ConfigurationError
from lit_klrb.files import write_atomically

NAME = "SHA256SUMS"
# Maximum number of characters that are read; a model of a thousand files has 100,000.
MAX_CHARACTERS = 2**20


def write_checksums(folder: Path) -> None:
    """Write the checksums of a folder's weights, which `sha256sum --check SHA256SUMS` verifies, too."""
    write_atomically(folder / NAME, "".join(f"{_sha256(file)}  {file.name}\n" for file in _weights(folder)))


def check_checksums(folder: Path) -> None:
    """Check the weights of a folder that has checksums.

    Raises:
        ConfigurationError: If a file does not match, or has no checksum.
    """
    if not (folder / NAME).is_file():
        return
    with (folder / NAME).open(errors="replace") as file:
        lines = re.findall(r"([0-9a-f]{64})  (.+)", file.read(MAX_CHARACTERS))
    sums = {name: digest for digest, name in lines}
    for weights in _weights(folder):
        if sums.get(weights.name) != _sha256(weights):
            raise ConfigurationError(
                f"{weights.name} does not match its checksum in {NAME}: it is damaged, or was changed after "
                f"the export; then delete {NAME}"
            )


def _weights(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""Plans, runs and analyses sweeps over seeds; never imports torch or lightning."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from analysis.results.frames import Frames


def frames(directory: str | Path) -> "Frames":
    """A sweep as pandas data frames.

    Args:
        directory: The sweep's directory, such as runs/demo; imported sweeps are allowed.

    Returns:
        `runs`, one row per cell with its final metrics, and `curves`, one row per logged value.

    Raises:
        ConfigurationError: If the directory has no results.
    """
    from analysis.results.frames import read_frames  # imported here to keep the commands fast

    return read_frames(directory)

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
        `runs`, one row per cell: id, stage, arm, beta, beta_index, replicate, seed, state (done, diverged, or
        failed if it ended without a result), and the metrics of its final evaluation. `curves`, one row per
        logged value: id, arm, beta, replicate, metric, step and value; NaN where it was not finite.

    Raises:
        ConfigurationError: If the directory has no results.
    """
    from analysis.results.frames import read_frames  # imported here to keep the commands fast

    return read_frames(directory)

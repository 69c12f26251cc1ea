"""Plans, runs and analyses sweeps over seeds; never imports torch or lightning."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pandas as pd


class Frames(NamedTuple):
    """The numbers of a sweep, see `frames`."""

    runs: "pd.DataFrame"
    curves: "pd.DataFrame"


def frames(directory: str | Path) -> Frames:
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
    # Imported here to keep the commands fast
    import pandas as pd

    from analysis.checks import load_sweep
    from analysis.results import Cell, Point

    def where(cell: Cell) -> dict[str, Any]:
        point = cell.point._asdict() if cell.point else dict.fromkeys(Point._fields)
        return {"id": cell.id, "stage": cell.stage, **point, "seed": cell.seed}

    sweep = load_sweep(Path(directory))
    columns = ["id", "arm", "beta", "replicate", "metric", "step", "value"]
    runs: list[dict[str, Any]] = []
    curves: list[list[Any]] = []
    for run in sweep.runs:
        row = where(run.cell)
        runs.append({**row, "state": "diverged" if run.diverged else "done", **run.final})
        for metric, curve in run.curves.items():
            points = zip(curve.step.astype(int).tolist(), curve.value.tolist(), strict=True)
            curves += [[*(row[name] for name in columns[:4]), metric, *point] for point in points]
    runs += [{**where(failure.cell), "state": "failed"} for failure in sweep.failures]
    found = pd.DataFrame(runs), pd.DataFrame(curves, columns=columns)
    # Nullable integers, as pandas makes counts floats if one is missing
    counts = ("beta_index", "replicate", "seed", "step")
    return Frames(*(frame.astype({name: "Int64" for name in counts if name in frame}) for frame in found))

"""Figures as SVG, which are deterministic and readable without colour."""

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from matplotlib import style
from matplotlib.axis import XAxis, YAxis
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

Dashes = tuple[float, tuple[float, ...]]

# Okabe and Ito's palette without its yellow, which is too pale for thin marks on white.
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_MARKERS = ("s", "o", "^", "D", "v", "P", "X", "<", ">")
_DASHES: tuple[Dashes, ...] = ((0, (4, 1.5)), (0, ()), (0, (1, 1)), (0, (4, 1, 1, 1)), (0, (7, 2)))
INK = "#333333"
FAINT = "#B8B8B8"
# In inches; on a phone a point of text is about a pixel.
WIDTH = 5.2
# Most marks of an arm in a panel: more cannot be told apart, and take megabytes.
MOST = 1_000

_STYLE = {
    "svg.hashsalt": "lit_klrb",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # repeated in the SVG for every text
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.labelsize": 11,
    "legend.fontsize": 11,
    "xtick.labelsize": 10.5,
    "ytick.labelsize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "text.color": INK,
    "text.parse_math": False,  # names may contain dollar signs
    "xtick.major.size": 0,  # the grid is enough
    "ytick.major.size": 0,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.unicode_minus": True,
    "axes.formatter.useoffset": False,
}


@dataclass(frozen=True)
class Look:
    """Colour, marker shape and line dashes of one estimator."""

    colour: str
    marker: str
    dashes: Dashes

    @property
    def line(self) -> dict[str, Any]:
        """The options of a line."""
        return {"color": self.colour, "linestyle": self.dashes}


def looks(labels: Iterable[str], control: str) -> dict[str, Look]:
    """The look of each arm; that of the control is always the same."""
    ordered = [control, *(name for name in labels if name != control)]
    return {
        name: Look(_COLOURS[i % len(_COLOURS)], _MARKERS[i % len(_MARKERS)], _DASHES[i % len(_DASHES)])
        for i, name in enumerate(ordered)
    }


def thinned(items: Any, most: int = MOST) -> Any:
    """Every n-th item of a sequence, with the smallest n that leaves at most so many."""
    return items[:: -(-len(items) // most) or 1]


def thinning(count: int, most: int = MOST) -> str:
    """A sentence of a caption on how many runs of an arm in a panel are drawn; "" if all are."""
    if count <= most:
        return ""
    return f" Of {count:,} runs of an arm in a panel, {len(thinned(range(count), most)):,} are drawn."


def legend_lines(styles: dict[str, Look], *, lines: bool) -> list[Line2D]:
    """Legend entries of the estimators: their dashes if `lines`, else their markers."""
    marks: dict[str, Any] = {"linestyle": "none", "markersize": 6}
    return [
        Line2D([], [], label=name, **look.line)
        if lines
        else Line2D([], [], color=look.colour, label=name, marker=look.marker, **marks)
        for name, look in styles.items()
    ]


@dataclass
class Sheet:
    """A matplotlib canvas and, after the block of `sheet`, its SVG."""

    canvas: Canvas
    svg: str = ""

    def legend(self, handles: Sequence[Line2D] | None = None, columns: int = 1) -> None:
        """Add a legend above the axes: of the given entries, or of all that is labelled."""
        self.canvas.legend(handles=handles, loc="outside upper left", ncols=columns)


def log_scale(axis: XAxis | YAxis) -> None:
    """Give an axis a logarithmic scale with plain numbers; matplotlib's own labels are formulas."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


@contextmanager
def sheet(height: float) -> Iterator[Sheet]:
    """A canvas in the style of the report, with its width; the height is in inches."""
    with style.context(["default", _STYLE]):
        drawn = Sheet(Canvas(figsize=(WIDTH, height), layout="constrained"))
        yield drawn
        buffer = io.StringIO()
        quiet = {"Date": None, "Creator": None}
        drawn.canvas.savefig(buffer, format="svg", metadata=quiet)
        svg = buffer.getvalue()
        # Drop the XML prolog, indentation, ids of groups and rotations by nothing
        svg = svg[svg.index("<svg") :]
        svg = re.sub(r"\s*\n\s*|(?<=<g) id=\"[^\"]+\"| transform=\"rotate\(-0 [^\"]+\"", " ", svg)
        # Hundredths of a point cannot be seen, and further digits take two thirds of the bytes
        svg = re.sub(r"(?<= (?:d|x|y)=\")[^\"]+", lambda match: re.sub(r"(\.\d\d)\d+", r"\1", match[0]), svg)
        # Ids are hashes of coordinates with all of their digits: number them
        ids = dict.fromkeys(re.findall(r" id=\"([^\"]+)\"", svg))
        names = {name: f"i{index}" for index, name in enumerate(ids)}
        named = r"( id=\"|url\(#|href=\"#)([^\")]+)"
        drawn.svg = re.sub(named, lambda match: match[1] + names.get(match[2], match[2]), svg)

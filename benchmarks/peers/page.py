"""The table of replication/evidence/released_losses.md, from the kept verdicts."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .setting import HOOK

PAGE = Path(__file__).parents[2] / "replication" / "evidence" / "released_losses.md"
BEGIN, END = "<!-- peers: written by make peers -->", "<!-- end of peers -->"
TITLES = {
    "trl": "TRL", "verl": "verl", "openrlhf": "OpenRLHF", "skyrl": "SkyRL", "liger": "Liger",
    "swift": "ms-swift",
    "torchrl": "torchrl", "axolotl": "axolotl", "tinker": "tinker-cookbook", "llamafactory": "LLaMA-Factory",
    "nemo_rl": "NeMo-RL", "prime_rl": "prime-rl", "slime": "slime", "open_instruct": "open-instruct",
    "rlhf_book": "rlhf-book",
}  # fmt: skip
NORMALISATIONS = {
    "length": ", each completion divided by its length",
    "summed over the batch": "",
    "sum": "",
    "batch": "",
}


def table(verdicts: Mapping[str, Any]) -> str:
    """A table with a row per loss, in the order of `TITLES`, and what was stubbed."""
    header = (
        "software", "loss and setting", "called there", "gradient", "cosine", "bias", "spread at 16, 256",
    )  # fmt: skip
    lines = [f"| {' | '.join(header)} |", "|---|---|---|---|---|---|---|"]
    for software, title in TITLES.items():
        if software in verdicts:
            lines += [f"| {' | '.join(row)} |" for row in _rows(title, verdicts[software])]
    stubs = [
        f"{title} without {', '.join(verdicts[software]['stubs'])}"
        for software, title in TITLES.items()
        if software in verdicts and verdicts[software]["stubs"]
    ]
    return "\n".join(
        [*lines, "", f"Imported with stubs for what their losses do not use: {'; '.join(stubs)}."]
    )


def _rows(title: str, about: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    first = f"**{title}** {about['version']}" + (f", {about['date']}" if about["date"] else "")
    for name, loss in about["losses"].items():
        marked = f"`{name}`" + (", **default**" if loss["default"] and loss["called"] != HOOK else "")
        gradient = loss["gradient"].replace(", where nothing is clamped or left out", " (in part)")
        gradient += NORMALISATIONS[loss["normalisation"]]
        numbers = (_numbers(loss[key]) for key in ("cosine", "bias", "spread"))
        yield first, marked, loss["called"], gradient, *numbers
        first = ""


def _numbers(values: list[float | None]) -> str:
    return " ".join("–" if value is None else f"{value:.2f}" for value in values)


def write(verdicts: Mapping[str, Any], page: Path) -> None:
    """Replace the table of the page."""
    before, _, rest = page.read_text("utf-8").partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{table(verdicts)}\n{END}{rest.partition(END)[2]}", "utf-8")

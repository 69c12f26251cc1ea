"""The tables of docs/results.md, written from the numbers of published reports by `make claims`."""

import re
from pathlib import Path
from typing import Any, NamedTuple

from analysis.results.layout import NUMBERS
from analysis.results.store import read_json

PAGE = Path(__file__).parents[1] / "docs" / "results.md"
RESULTS = Path(__file__).parent / "results"
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


class Row(NamedTuple):
    """A comparison of one arm of a published sweep with another."""

    task: str  # what is trained on what
    folder: str  # below replication/results
    treatment: str
    control: str
    names: tuple[str, str]  # of treatment and control, in the words of the page


_RB, _CV, _MC, _PREFIX = "exact", "default", "sampled", "prefix"
_OWN = "own token", "the same, sampled"
_FORWARD = "forward KL", "own token"
TABLES = {
    "exact": (
        Row("SmolLM2, reviews", "smollm2_frontier", "rb", "mc", (_RB, _MC)),
        Row("the same, twice the rate", "smollm2_released", "rb", "mc", (_RB, _MC)),
        Row("SmolLM2, additions", "smollm2_sums", "rb", "mc", (_RB, _MC)),
        Row("", "smollm2_sums", "combination", "mc", (_CV, _MC)),
        Row("SmolLM2, reviews", "smollm2_reviews", "combination", "mc", (_CV, _MC)),
        Row("eight other starts", "smollm2_parts", "without-prefix", "mc", (_CV, _MC)),
        Row("small GPT-2, real reviews", "imdb_noise", "combination", "mc", (_CV, _MC)),
        Row("", "imdb_noise", "mc-x4", "mc", ("4 × samples", _MC)),
        Row("one rate for all arms", "imdb_small", "RaoBlackwellControlVariate", "MonteCarlo", (_CV, _MC)),
        Row("", "imdb_small", "RaoBlackwell", "MonteCarlo", (_RB, _MC)),
        Row("better models", "imdb_night", "combination", "mc", (_CV, _MC)),
        Row("", "imdb_night", "rb", "mc", (_RB, _MC)),
        Row("toy", "studies", "rb", "mc", (_RB, _MC)),
        Row("", "studies", "combination", "mc", (_CV, _MC)),
        Row("", "studies", "k3-in-loss", "mc", ("k3 in the loss", _MC)),
    ),
    "baseline": (
        Row("SmolLM2, reviews", "smollm2_rates", "prefix", "mc", (_PREFIX, _MC)),
        Row("eight other starts", "smollm2_starts", "prefix", "mc", (_PREFIX, _MC)),
        Row("eight others", "smollm2_samples", "prefix", "mc", (_PREFIX, _MC)),
        Row("", "smollm2_samples", "mc-32", "mc", ("4 × samples", _MC)),
        Row("a learned reward", "smollm2_learned", "prefix-four", "mc", ("prefix at 4 places", _MC)),
        Row("", "smollm2_learned", "mc-three", "mc", ("3 × samples", _MC)),
        Row("eight others", "smollm2_learned_default", "prefix-four", "default", ("prefix at 4 places", _CV)),
    ),
    "distillation": (
        Row("1M student, reviews", "imdb_distill", "discount-annealed", "future-exact", (_CV, "all later")),
        Row("", "imdb_distill", "own-exact", "future-exact", ("own token", "all later")),
        Row("", "imdb_distill", "own-sampled", "future-exact", ("own token, sampled", "all later")),
        Row("SmolLM2, a context", "smollm2_json", "own-exact", "own-sampled", _OWN),
        Row("two contexts, tuned rates", "smollm2_credit", "own-exact", "own-sampled", _OWN),
        Row("", "smollm2_credit", "discount-annealed", "own-sampled", (_CV, "own token, sampled")),
        Row("two layers of it missing", "smollm2_heal", "own-exact", "own-sampled", _OWN),
        Row("twelve layers left", "smollm2_length_24", "discount-annealed", "own-exact", (_CV, "own token")),
        Row("", "smollm2_length_24", "future-exact", "own-exact", ("all later", "own token")),
        Row("", "smollm2_length_24", "future-sampled", "own-exact", ("all later, sampled", "own token")),
        Row("", "smollm2_length_24", "weighted-sampled", "own-exact", ("IW-OPD", "own token")),
        Row("eight contexts, 96", "smollm2_length_96", "discount-annealed", "own-exact", (_CV, "own token")),
        Row("", "smollm2_length_96", "future-exact", "own-exact", ("all later", "own token")),
        Row("", "smollm2_length_96", "future-sampled", "own-exact", ("all later, sampled", "own token")),
        Row("two contexts", "smollm2_future", "future-exact", "own-exact", ("all later", "own token")),
        Row("", "smollm2_forward", "forward", "own-exact", _FORWARD),
        Row("three rates per arm", "smollm2_directions", "forward", "own-exact", _FORWARD),
        Row("two other contexts", "smollm2_contexts", "forward", "own-exact", _FORWARD),
        Row("two layers of it missing", "smollm2_heal_forward", "forward", "own-exact", _FORWARD),
    ),
}  # fmt: skip


def write(page: Path = PAGE) -> None:
    """Write the tables of the page, between their comments."""
    page.write_text(written(page.read_text("utf-8")), "utf-8")


def written(text: str) -> str:
    """The text of the page with its tables as the published numbers give them."""
    return _BLOCK.sub(lambda block: f"{block[1]}{table(block[2])}\n{block[3]}", text)


def table(name: str) -> str:
    """One table, as Markdown."""
    head = "| task | arms | start → end | difference | verdict |"
    return "\n".join([head, "|---|---|---|---|---|", *map(_line, TABLES[name])])


def _line(row: Row) -> str:
    numbers = read_json(RESULTS / row.folder / NUMBERS)
    key = "objective" if any(one["objective"] for one in numbers["comparisons"]) else "kl"
    ends = [_mean(numbers, label, key) for label in (row.treatment, row.control)]
    start = numbers["start"][key]
    outcome, estimate, (low, high) = _comparison(numbers, row, key)
    task = f"[{row.task}](../replication/results/{row.folder}/README.md)" if row.task else ""
    cells = (
        task,
        " / ".join(row.names),
        f"{start:.2f} → {ends[0]:.2f} / {ends[1]:.2f}",
        f"{estimate:+.2f} ({low:.2f} to {high:.2f})".replace("-", "−"),
        outcome.replace("_", " "),
    )
    return f"| {' | '.join(cells)} |"


def _mean(numbers: dict[str, Any], label: str, key: str) -> float:
    """The mean of an arm over betas, each counting the same."""
    values = [arm[key]["mean"] for arm in numbers["arms"] if arm["label"] == label]
    return float(sum(values) / len(values))


def _comparison(numbers: dict[str, Any], row: Row, key: str) -> tuple[str, float, list[float]]:
    """Outcome, difference, and interval; of a plan whose control is the other arm, turned round."""
    for one in numbers["comparisons"]:
        numbers_of = one[key]
        if (one["treatment"], one["control"]) == (row.treatment, row.control):
            return one["outcome"], numbers_of["estimate"], numbers_of["interval"]
        if (one["control"], one["treatment"]) == (row.treatment, row.control):
            turned = {"better": "worse", "worse": "better"}.get(one["outcome"], one["outcome"])
            ends = [-end for end in reversed(numbers_of["interval"])]
            return turned, -numbers_of["estimate"], ends
    raise KeyError(f"{row.folder}: {row.treatment} against {row.control}")

"""Bias and variance of distillation's gradient by head, k and number of completions."""

import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from analysis.report.figures import legend_lines, log_scale, looks, sheet
from lit_klrb.estimators import (
    CoarsenedTopK,
    MonteCarloRewardToGo,
    RaoBlackwell,
    RaoBlackwellTopK,
)
from lit_klrb.estimators.composed import DiscountedEstimator
from lit_klrb.estimators.recipe import per_token
from lit_klrb.functional import TokenStats, TopK, token_stats
from replication.topk_rivals import TopKHeadOnly

from .table import markdown, number

FIGURE = Path(__file__).parents[1] / "replication" / "evidence" / "heads.svg"
HEADS, COMPLETIONS, GROUP = (16, 64, 256), (16, 64, 256), 4
# Distances of the teacher from the student, in logits
DISTANCES = {"near": 0.1, "far": 1.0}
DISCOUNTS = {1.0: "all later KLs", 0.0: "own KL"}
# The arms without a head, and what their rows are called
WHOLE: dict[str, type[DiscountedEstimator]] = {"exact": RaoBlackwell, "log ratio": MonteCarloRewardToGo}

TEXT = """`python -m benchmarks heads`. Completions of {length} tokens, of {vocabulary:,} with Zipf's
frequencies; a token depends on the one before it through {rank} numbers, and so does the teacher's distance
from the student. The gradient is that in the student's {parameters:,} parameters, in groups of {group}
completions with a leave-one-out baseline. Its bias is exact, over all completions by recursion; its variance
is that of {groups} groups. Both are relative to the norm of the objective's gradient: of KL(student ‖
teacher), and for "forward KL" of the sum over the tokens of KL(teacher ‖ student). "Error" is
√(bias² + variance / n), with n completions. "Own KL" is discount 0, as other software has it."""


class World(NamedTuple):
    """Two Markov models: the student's logits are rows @ columns.T + frequencies.

    Args:
        rows: Of the previous token, shape [V, D].
        columns: Of the next token, shape [V, D].
        frequencies: Shape [V].
        teacher: The teacher's logits, shape [V, V].
        length: Tokens of a completion, T.
    """

    rows: Tensor
    columns: Tensor
    frequencies: Tensor
    teacher: Tensor
    length: int

    @classmethod
    def random(cls, distance: float, vocabulary: int = 1000, rank: int = 16, length: int = 8) -> "World":
        """A student, and a teacher at a distance that differs from token to token."""
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=generator)

        rows, columns = normal(vocabulary, rank), 0.3 * normal(vocabulary, rank) / rank**0.5
        frequencies = -torch.arange(1.0, vocabulary + 1, dtype=torch.float64).log()
        distances = distance * (0.5 * normal(vocabulary, 1)).exp()
        teacher = rows @ columns.T + frequencies + distances * normal(vocabulary, vocabulary)
        return cls(rows.requires_grad_(), columns.requires_grad_(), frequencies, teacher, length)

    @property
    def logits(self) -> Tensor:
        """The student's, shape [V, V]."""
        return self.rows @ self.columns.T + self.frequencies

    @torch.no_grad()
    def sample(self, count: int) -> Tensor:
        """Completions after token 0, with that token before them, shape [count, T + 1]."""
        generator = torch.Generator().manual_seed(1)
        tokens, probabilities = [torch.zeros(count, dtype=torch.long)], self.logits.softmax(-1)
        for _ in range(self.length):
            drawn = torch.multinomial(probabilities[tokens[-1]], 1, generator=generator)
            tokens.append(drawn[:, 0])
        return torch.stack(tokens, 1)

    def gradient(self, scalar: Tensor) -> Tensor:
        """That of a scalar in the parameters, flat."""
        parts = torch.autograd.grad(scalar, (self.rows, self.columns), retain_graph=True)
        return torch.cat([part.flatten() for part in parts])

    def gradients(self, of_logits: Tensor, tokens: Tensor, size: int) -> Tensor:
        """Gradients in the parameters of each group of `size` completions, from those in their logits."""
        hidden, found = self.rows.detach()[tokens], []
        parts = (torch.split(values, size) for values in (of_logits, hidden, tokens))
        for some, inputs, before in zip(*parts, strict=True):
            columns = torch.einsum("btv,btd->vd", some, inputs)
            rows = torch.zeros_like(self.rows).index_add_(
                0, before.flatten(), (some @ self.columns.detach()).flatten(0, 1)
            )
            found.append(torch.cat([rows.flatten(), columns.flatten()]))
        return torch.stack(found)


def expected_gradient(world: World, values: Tensor, discount: float) -> Tensor:
    """The gradient of E[sum_t K(y_t-1)] with the credit for later values discounted, by recursion.

    Args:
        world: The models.
        values: K after each token, as a function of the parameters, shape [V].
        discount: Factor of a later value per token of distance.
    """
    transitions = world.logits.softmax(-1)
    with torch.no_grad():
        to_come = [torch.zeros_like(values)]
        for _ in range(world.length):
            to_come.append(values + discount * transitions @ to_come[-1])
        reached = torch.zeros_like(values)
        reached[0] = 1
    total = values.new_zeros(())
    for later in to_come[-2::-1]:
        total = total + reached @ (values + discount * transitions @ later)
        reached = reached @ transitions.detach()
    return world.gradient(total)


def arms(sizes: tuple[int, ...], discount: float) -> dict[str, DiscountedEstimator]:
    """The estimators by what their rows are called."""
    settings: dict[str, Any] = {"discount": discount, "allow_biased": True}
    found = {label: kind(**settings) for label, kind in WHOLE.items()}
    for k in sizes:
        own = {"k": k, **settings}
        teachers = {**own, "support": "reference"}
        found[f"teacher's k, nothing else, {k}"] = TopKHeadOnly(**teachers)
        found[f"teacher's k, tail bucket, {k}"] = CoarsenedTopK(**teachers)
        found[f"teacher's k, sampled tail, {k}"] = RaoBlackwellTopK(**teachers)
        found[f"student's k, tail bucket, {k}"] = CoarsenedTopK(**own)
        found[f"student's k, sampled tail, {k}"] = RaoBlackwellTopK(**own)
        found[f"forward KL, sampled tail, {k}"] = RaoBlackwellTopK(**teachers, divergence="forward")
    return found


def expected_values(estimator: DiscountedEstimator, stats: TokenStats) -> Tensor:
    """The mean over the sampled token of an estimator's value at one position, shape [V]."""
    recipe = estimator.applied_recipe.value
    if recipe is not None and isinstance(estimator, CoarsenedTopK | TopKHeadOnly):
        return per_token(recipe).of(stats)[:, 0]
    exact = stats.forward_kl if recipe == "forward_topk" else stats.kl  # all others are unbiased
    assert exact is not None
    return exact[:, 0]


class Measured(NamedTuple):
    """An estimator's bias and the variance with one completion, relative to the gradient's norm, squared."""

    bias: float
    variance: float

    def error(self, completions: int) -> float:
        """The root mean squared error."""
        return float((self.bias**2 + self.variance / completions) ** 0.5)


def measure(
    world: World, sizes: tuple[int, ...], groups: int
) -> tuple[float, dict[float, dict[str, Measured]]]:
    """The KL of a completion; and by discount and row what is measured."""
    with_prompt = world.sample(groups * GROUP)
    before, tokens = with_prompt[:, :-1], with_prompt[:, 1:]
    mask, first = torch.ones_like(tokens, dtype=torch.bool), torch.zeros(len(world.rows), 1, dtype=torch.long)
    found: dict[float, dict[str, Measured]] = {discount: {} for discount in DISCOUNTS}
    heads: dict[TopK | None, list[tuple[float, str, DiscountedEstimator]]] = {}
    for discount in DISCOUNTS:
        for label, estimator in arms(sizes, discount).items():
            heads.setdefault(estimator.topk, []).append((discount, label, estimator))
    leaf = world.logits[before].detach().requires_grad_()
    truths: dict[str, Tensor] = {}
    for topk, members in heads.items():
        every = token_stats(world.logits[:, None], world.teacher[:, None], first, topk=topk)
        if not truths:
            for name in ("kl", "forward_kl"):
                truths[name] = expected_gradient(world, getattr(every, name)[:, 0], 1.0)
        sampled = token_stats(leaf, world.teacher[before], tokens, topk=topk)
        for discount, label, estimator in members:
            truth = truths["forward_kl" if label.startswith("forward") else "kl"]
            expected = expected_gradient(world, expected_values(estimator, every), discount)
            loss = estimator.surrogate(sampled, mask, group_size=GROUP)
            (of_logits,) = torch.autograd.grad(loss * groups, leaf, retain_graph=True)
            gradients = world.gradients(of_logits, before, GROUP)
            variance = (gradients - gradients.mean(0)).square().sum() / (groups - 1) * GROUP
            bias = (expected - truth).norm() / truth.norm()
            found[discount][label] = Measured(bias.item(), (variance / truth.norm() ** 2).item())
        print(f"heads: {topk}", file=sys.stderr, flush=True)
    kl = RaoBlackwell().value(sampled.detach(), mask).mean().item()
    return kl, found


def table(by_distance: list[dict[float, dict[str, Measured]]], kls: list[float]) -> str:
    """Bias and errors of every row."""
    header = ["estimator", "credit"]
    for name, kl in zip(DISTANCES, kls, strict=True):
        header += [f"{name} (KL {number(kl, 2)}): bias", *(f"error, n = {n}" for n in COMPLETIONS)]
    rows = []
    for label in by_distance[0][1.0]:
        for discount, credit in DISCOUNTS.items():
            row = [label, credit]
            for found in by_distance:
                one = found[discount][label]
                row.append("0" if one.bias < 1e-9 else number(one.bias, 2))
                row += [number(one.error(n), 2) for n in COMPLETIONS]
            rows.append(row)
    return markdown(header, rows)


def crossings(by_distance: list[dict[float, dict[str, Measured]]], sizes: tuple[int, ...]) -> str:
    """From how many completions on the sampled tail's error is below the tail bucket's, with full credit."""
    parts = []
    for name, found in zip(DISTANCES, by_distance, strict=True):
        for k in sizes:
            bucket, sampled = (
                found[1.0][f"teacher's k, {rest}, {k}"] for rest in ("tail bucket", "sampled tail")
            )
            crossing = (sampled.variance - bucket.variance) / bucket.bias**2
            parts.append(f"{round(crossing, -2):,.0f} ({name}, k = {k})")
    return (
        "With credit for all later KLs the sampled tail's error is below the tail bucket's from so many "
        f"completions on, at the teacher's k: {', '.join(parts)}."
    )


def draw(by_distance: list[dict[float, dict[str, Measured]]], kls: list[float], k: int) -> str:
    """The error of each estimator over the number of completions, as SVG."""
    shown = [label for label in by_distance[0][1.0] if not label[-1].isdigit() or label.endswith(f", {k}")]
    names = {label: label.removesuffix(f", {k}") for label in shown}
    styles = looks(names.values(), "exact")
    with sheet(5.6) as drawn:
        every = drawn.canvas.subplots(len(DISCOUNTS), len(DISTANCES), sharex=True, sharey=True)
        for column, (name, kl) in enumerate(zip(DISTANCES, kls, strict=True)):
            for row, (discount, credit) in enumerate(DISCOUNTS.items()):
                axes = every[row][column]
                for label in shown:
                    one, look = by_distance[column][discount][label], styles[names[label]]
                    errors = [one.error(n) for n in COMPLETIONS]
                    axes.plot(COMPLETIONS, errors, marker=look.marker, color=look.colour)
                log_scale(axes.yaxis)
                axes.set_xscale("log")
                axes.set_xticks(COMPLETIONS, [str(n) for n in COMPLETIONS])
                axes.minorticks_off()
                axes.set_title(f"{name} ({number(kl, 2)} nats), credit: {credit}")
                if row:
                    axes.set_xlabel(f"completions, k = {k}")
                if not column:
                    axes.set_ylabel("error of the gradient")
        drawn.canvas.legend(handles=legend_lines(styles, lines=False), loc="outside upper center", ncols=2)
    return drawn.svg


def report(quick: bool) -> str:
    """The part; its figure is drawn beside it."""
    torch.set_num_threads(1)
    sizes, groups = (HEADS, 128) if not quick else ((4,), 4)
    worlds = [World.random(d) if not quick else World.random(d, 8, 2, 3) for d in DISTANCES.values()]
    kls, by_distance = [], []
    for world in worlds:
        kl, found = measure(world, sizes, groups)
        kls.append(kl)
        by_distance.append(found)
    figure = draw(by_distance, kls, sizes[len(sizes) // 2])
    if not quick:
        FIGURE.write_text(figure + "\n", "utf-8")
    world = worlds[0]
    vocabulary, rank = world.rows.shape
    text = textwrap.fill(
        TEXT.format(
            length=world.length,
            vocabulary=vocabulary,
            rank=rank,
            parameters=2 * vocabulary * rank,
            group=GROUP,
            groups=groups,
        ),
        118,
        break_on_hyphens=False,
    )
    crossed = textwrap.fill(crossings(by_distance, sizes), 118, break_on_hyphens=False)
    title = "## Bias and variance by head, k and completions"
    image = "![Error of the gradient over completions, by head and credit](heads.svg)"
    return f"{title}\n\n{text}\n\n{image}\n\n{table(by_distance, kls)}\n\n{crossed}"

"""`python -m lit_klrb explain`: what each KL estimator computes and what its gradient really optimises."""

import argparse
import difflib
import json
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch

from lit_klrb import estimators
from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import KLEstimator, LossWeights, MonteCarlo, RaoBlackwell
from lit_klrb.functional import TokenStats, token_stats
from lit_klrb.functional.enumeration import TabularLM, exact_kl, exact_kl_gradient

KL_LEVELS = (0.01, 0.3, 3.0)


class Measurement(NamedTuple):
    """An estimator at one distance between policy and reference, by enumeration.

    Args:
        kl: The exact KL(policy || reference), in nats per sequence.
        mean_value: The expectation of the estimator's value, in nats per sequence.
        cosine: Between the expected gradient and the true one; None if the former vanishes.
        norm_ratio: Length of the expected gradient over that of the true one.
    """

    kl: float
    mean_value: float
    cosine: float | None
    norm_ratio: float


def estimator_classes() -> dict[str, type[KLEstimator]]:
    """Every estimator by name: the right ones first, then those refused for training."""
    found = {
        name: value
        for name, value in vars(estimators).items()
        if isinstance(value, type) and issubclass(value, KLEstimator) and hasattr(value, "explanation")
    }
    return dict(sorted(found.items(), key=lambda item: item[1].explanation.refusal is not None))


def find_estimator(name: str) -> type[KLEstimator]:
    """The class called `name`.

    Raises:
        ConfigurationError: If there is none, with the nearest name and the list of all.
    """
    classes = estimator_classes()
    if name in classes:
        return classes[name]
    folded = {known.lower(): known for known in classes}
    nearest = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.5)
    hint = f"; did you mean {folded[nearest[0]]}?" if nearest else ";"
    raise ConfigurationError(f"estimator is {name!r}{hint} one of {', '.join(classes)} expected")


def measure(estimator: type[KLEstimator]) -> list[Measurement]:
    """Value and gradient of one completion without a baseline, in expectation, at `KL_LEVELS`.

    The models are Markov chains over three tokens and EOS, of at most four tokens: parameters are shared
    between prefixes, so that early tokens change later KLs.
    """
    generator = torch.Generator().manual_seed(0)
    table, direction = torch.randn(2, 3, 4, dtype=torch.float64, generator=generator)
    reference = TabularLM(table, max_length=4)
    policies = (_at_distance(reference, direction, level) for level in KL_LEVELS)
    return [_measure_at(estimator(baseline=None), policy, reference) for policy in policies]


def _at_distance(reference: TabularLM, direction: torch.Tensor, kl: float) -> TabularLM:
    """The policy at the given KL from the reference along a line of logits, by bisection."""
    low, high = 0.0, 20.0
    for _ in range(50):
        middle = (low + high) / 2
        policy = TabularLM(reference.logits + middle * direction, reference.max_length)
        low, high = (middle, high) if exact_kl(policy, reference) < kl else (low, middle)
    return policy


def _measure_at(estimator: KLEstimator, policy: TabularLM, reference: TabularLM) -> Measurement:
    tokens, mask = policy.sequences()
    probabilities = policy.logprobs(tokens, mask).exp()
    logits = policy.token_logits(tokens).requires_grad_()
    stats = token_stats(logits, reference.token_logits(tokens), tokens)
    alone = [slice(n, n + 1) for n in range(len(tokens))]
    weights = LossWeights(
        *map(
            torch.cat,
            zip(*(estimator.weights(_rows(stats.detach(), n), mask[n]) for n in alone), strict=True),
        )
    )
    # The loss averages over completions that all occur once: put each one's probability in place of 1 / N.
    loss = estimator.loss(stats, mask, weights) * len(tokens)
    gradient = torch.zeros_like(logits)
    if loss.requires_grad:
        (gradient,) = torch.autograd.grad(loss, logits)
    gradient = gradient * probabilities[:, None, None]
    leaf = policy.logits.clone().requires_grad_()
    per_token = TabularLM(leaf, policy.max_length).token_logits(tokens)
    (expected,) = torch.autograd.grad(per_token, leaf, gradient)

    true = exact_kl_gradient(policy, reference)
    ratio = (expected.norm() / true.norm()).item()
    vanishes = ratio < 1e-9
    return Measurement(
        kl=exact_kl(policy, reference).item(),
        mean_value=(probabilities @ estimator.value(stats.detach(), mask)).item(),
        cosine=None if vanishes else (expected * true).sum().item() / (expected.norm() * true.norm()).item(),
        norm_ratio=0.0 if vanishes else ratio,
    )


def _rows(stats: TokenStats, rows: slice) -> TokenStats:
    return TokenStats(*(field[rows] for field in stats if field is not None))


class Counterexample(NamedTuple):
    """Two models for which Rao-Blackwellisation adds variance to the KL of a sequence.

    Args:
        sequences: The completions.
        probabilities: Under the policy.
        monte_carlo: The value of `MonteCarlo` for each.
        rao_blackwell: The value of `RaoBlackwell` for each.
        variances: Of the two values, in this order.
    """

    sequences: list[str]
    probabilities: list[float]
    monte_carlo: list[float]
    rao_blackwell: list[float]
    variances: tuple[float, float]


def counterexample() -> Counterexample:
    """Tokens a (ends the sequence) and b: the KLs of later tokens undo the log ratio of the first.

    p(a) = p(b) = 1/2 and q(a) = 0.3, q(b) = 0.7; after b the policy is certain of a second b, to which the
    reference gives 3/7. The log ratio is log(5/3) for both sequences.
    """
    rows = torch.tensor([[[0.5, 0.5], [0.0, 1.0]], [[0.3, 0.7], [4 / 7, 3 / 7]]], dtype=torch.float64)
    policy, reference = (TabularLM(table.log(), max_length=2) for table in rows)
    tokens, mask = policy.sequences()
    stats = token_stats(policy.token_logits(tokens), reference.token_logits(tokens), tokens)
    probabilities = policy.logprobs(tokens, mask).exp()
    produced = probabilities > 0
    values = [kind().value(stats, mask)[produced] for kind in (MonteCarlo, RaoBlackwell)]
    probabilities = probabilities[produced]
    variances = [probabilities @ (value - probabilities @ value) ** 2 for value in values]
    return Counterexample(
        sequences=[
            "".join("ab"[token] for token in row[keep])
            for row, keep in zip(tokens[produced], mask[produced], strict=True)
        ],
        probabilities=probabilities.tolist(),
        monte_carlo=values[0].tolist(),
        rao_blackwell=values[1].tolist(),
        variances=(variances[0].item(), variances[1].item()),
    )


def _describe(name: str, estimator: type[KLEstimator]) -> dict[str, object]:
    return {"name": name, **estimator.explanation._asdict()}


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Boxed and wrapped in a terminal, one tab-separated line per row in a pipe."""
    if not sys.stdout.isatty():
        for row in (header, *rows):
            print("\t".join(row))
        return
    from rich.console import Console

    from lit_klrb.run.tables import text_table

    Console().print(text_table(header, rows))


def _print_overview() -> None:
    rows = []
    for name, estimator in estimator_classes().items():
        about = estimator.explanation
        training = "yes" if about.refusal is None else f"refused: {about.refusal}"
        rows.append((name, about.formula, about.optimises, about.cost, about.used_by, training))
    _print_table(("estimator", "computes", "its gradient optimises", "cost", "used by", "training"), rows)


def _print_page(name: str, estimator: type[KLEstimator]) -> None:
    about = estimator.explanation
    lines = {
        "computes": about.formula,
        "optimises": about.optimises,
        "cost": about.cost,
        "used by": about.used_by,
        "caution": about.caution,
        "refused for training": about.refusal,
    }
    print(f"{name}: {(estimator.__doc__ or '').strip().splitlines()[0]}\n")
    for key, text in lines.items():
        if text is not None:
            print(f"{key}: {text}")
    print("\nIts expectation for an enumerated model, against the exact KL and its gradient:")
    _print_table(
        ("KL", "mean value", "cosine of gradients", "ratio of norms"),
        [
            (
                f"{m.kl:.4g}",
                f"{m.mean_value:.4g}",
                "-" if m.cosine is None else f"{m.cosine:.3f}",
                f"{m.norm_ratio:.3f}",
            )
            for m in measure(estimator)
        ],
    )
    if estimator is RaoBlackwell:
        _print_counterexample()


def _print_counterexample() -> None:
    example = counterexample()
    columns = (example.probabilities, example.monte_carlo, example.rao_blackwell)
    rows = [
        (sequence, *(f"{number:.3f}" for number in numbers))
        for sequence, *numbers in zip(example.sequences, *columns, strict=True)
    ]
    rows.append(("variance", "", *(f"{variance:.3f}" for variance in example.variances)))
    print("\nTwo models for which its value varies more than MonteCarlo's:")
    _print_table(("sequence", "probability", "MonteCarlo", "RaoBlackwell"), rows)


def main(argv: Sequence[str]) -> int:
    """Run `explain [ESTIMATOR] [--json]` and return the exit code.

    Args:
        argv: The command line after `explain`.

    Raises:
        ConfigurationError: If there is no such estimator.
    """
    parser = argparse.ArgumentParser("python -m lit_klrb explain", description=__doc__)
    parser.add_argument(
        "estimator", nargs="?", metavar="ESTIMATOR", help="a class name; none for the table of all"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    if arguments.estimator is None:
        if arguments.json:
            print(json.dumps([_describe(*item) for item in estimator_classes().items()], indent=2))
        else:
            _print_overview()
        return 0
    estimator = find_estimator(arguments.estimator)
    if not arguments.json:
        _print_page(arguments.estimator, estimator)
        return 0
    page = _describe(arguments.estimator, estimator)
    page["measured"] = [measurement._asdict() for measurement in measure(estimator)]
    if estimator is RaoBlackwell:
        page["counterexample"] = counterexample()._asdict()
    print(json.dumps(page, indent=2))
    return 0

"""Which gradient a loss or an estimator has, in a sentence and a table."""

from collections.abc import Sequence
from typing import Any

from lit_klrb.estimators.enumerated_loss import KL_LEVELS, KNOWN
from lit_klrb.estimators.identity import TOLERANCE, ZERO, GradientIdentity, Level
from lit_klrb.terminal import print_lines, print_table

MEANING = {
    "kl": "KL(policy || reference)",
    "kl_own_token": "each token's KL(policy || reference) given its prefix, without its effect on later ones",
    "reverse": "KL(reference || policy), the other direction",
    "reverse_own_token": "each token's KL(reference || policy) given its prefix: the other direction, "
    "without its effect on later ones",
    "jsd_own_token": "4 times each token's Jensen-Shannon divergence given its prefix",
    "chi2_own_token": "half of each token's chi-squared divergence(policy || reference) given its prefix",
}
LEGEND = """cosine: of its expected gradient{divided} with that of KL(policy || reference)
bias: distance between the two over the latter's length; norm: the former's length over the latter's"""


def describe(gradient: GradientIdentity) -> str:
    """Which gradient it is, by its name.

    Example:
        >>> from lit_klrb.estimators import K3Reward
        >>> from lit_klrb.estimators.certificate import certify_estimator
        >>> describe(certify_estimator(K3Reward()).gradient)
        'a sum, +1 x kl -1 x reverse_own_token'
    """
    named = gradient.name or gradient.unclamped
    partly = gradient.agrees_at and len(gradient.agrees_at) < len(gradient.levels)
    clamped = ", where nothing is clamped or left out" if partly else ""
    if named == ZERO:
        divided = ", but for the division by lengths" if gradient.normalisation == "length" else ""
        return f"zero in expectation{divided}{clamped}"
    if named is not None:
        name, _, condition = named.partition(" (")
        times = "" if abs(gradient.scale - 1) <= TOLERANCE else f"{gradient.scale:.4g} x "
        sign = ", with the WRONG SIGN" if gradient.scale < 0 else ""
        prefixes = ", on prefixes of the policy that generated" if condition else ""
        return f"{times}{name}{prefixes}{sign}{clamped}"
    if gradient.mixture:
        parts = [f"{weight:+.4g} x {name}" for name, weight in gradient.mixture.items()]
        return f"a sum, {' '.join(parts)}{clamped}"
    name = nearest(gradient)
    cosines = [level.cosines[name] or 0.0 for level in gradient.levels]
    return f"another; nearest to {name}, with cosines of {min(cosines):.2f} to {max(cosines):.2f}"


def explain_names(gradient: GradientIdentity) -> list[str]:
    """One line for each name in the description."""
    names = gradient.mixture or [gradient.name or gradient.unclamped or nearest(gradient)]
    shown = [name.partition(" (")[0] for name in names]
    return [f"  {name}: {MEANING[name]}" for name in shown if name in MEANING]


def conclude(gradient: GradientIdentity) -> str:
    """In one sentence, whether it is the gradient of the KL, and how far from it if not."""
    if gradient.name == "kl" and gradient.scale > 0 and gradient.normalisation != "length":
        return "the gradient of the KL, exactly"
    if gradient.name == ZERO and gradient.normalisation != "length":
        return "not the gradient of the KL: it trains nothing"
    smallest = []
    for kl in KL_LEVELS:
        cosines = [level.cosines["kl"] or 0.0 for level in gradient.levels if abs(level.kl - kl) < 1e-6]
        smallest.append(f"{min(cosines):.3f} at {kl:g}")
    return f"not the gradient of the KL: cosines with it down to {', '.join(smallest)} nats"


def nearest(gradient: GradientIdentity) -> str:
    """The known gradient whose cosine with this one is the largest on average."""
    return max(KNOWN, key=lambda name: sum(level.cosines[name] or 0.0 for level in gradient.levels))


def size(level: Level) -> str:
    """The size of a pair of models and its KL."""
    return f"{level.tokens} tokens, {level.positions} positions, KL {level.kl:.3g}"


def print_levels(gradient: GradientIdentity, mean_values: Sequence[float] | None = None) -> None:
    """Print how far the gradient is from that of the KL, one row per pair of models.

    Args:
        gradient: The gradient.
        mean_values: An estimator's mean value with each pair, for a column of its own.
    """
    header = ["tokens", "positions", "KL", "cosine", "bias", "norm"]
    rows = [
        [str(level.tokens), str(level.positions), f"{level.kl:.3g}", *_distance(level)]
        for level in gradient.levels
    ]
    if mean_values is not None:
        header.insert(3, "mean value")
        for row, value in zip(rows, mean_values, strict=True):
            row.insert(3, f"{value:.3g}")
    print_table(header, rows)
    if (one := gradient.small_batch) is not None:
        cosine, bias, norm = _distance(one)
        print_lines(f"in batches of one completion, {size(one)}: cosine {cosine}, bias {bias}, norm {norm}")
    scale = abs(gradient.scale)
    divided = "" if scale == 0 or abs(scale - 1) <= TOLERANCE else f" divided by {scale:.4g}"
    print_lines(LEGEND.format(divided=divided))


def as_json(gradient: GradientIdentity | None) -> dict[str, Any] | None:
    """The gradient as values that JSON has."""
    if gradient is None:
        return None
    one = gradient.small_batch
    levels = {"levels": [level._asdict() for level in gradient.levels], "small_batch": one and one._asdict()}
    return gradient._asdict() | levels | {"description": describe(gradient)}


def _distance(level: Level) -> tuple[str, str, str]:
    cosine = level.cosines["kl"]
    return "-" if cosine is None else f"{cosine:.3f}", f"{level.bias:.3f}", f"{level.norm_ratio:.3f}"

"""`lit-klrb explain`: what each KL estimator computes, and what its gradient optimises."""

import inspect
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from lit_klrb import estimators
from lit_klrb.cli.arguments import Arguments
from lit_klrb.cli.gradients import as_json, conclude, describe, explain_names, print_levels
from lit_klrb.cli.suggestions import suggestion
from lit_klrb.errors import ConfigurationError, concerning
from lit_klrb.estimators import (
    EstimatorMemory,
    KLEstimator,
    RaoBlackwell,
    RaoBlackwellControlVariate,
    TiltedRaoBlackwell,
)
from lit_klrb.estimators.advice import ADVICE, DEFAULT
from lit_klrb.estimators.certificate import TOP_K, certify_estimator
from lit_klrb.estimators.recipe import NOTATION
from lit_klrb.estimators.unbiased import Divergence
from lit_klrb.reward_functions import import_member
from lit_klrb.terminal import print_lines, print_table

# What is not measured with one completion of one prompt, by estimator
FITTED = {
    RaoBlackwellControlVariate: "Its coefficients are fitted on other prompts. With one completion they are "
    "0, and the gradients are MonteCarlo's",
    TiltedRaoBlackwell: "Its token values are fitted to earlier rollouts. Without them, the gradients are "
    "RaoBlackwell's",
}


# How statements about gradients begin, which a table leaves out
GRADIENT = "the gradient of "

# What is printed of an estimator, in order
LABELS = {"use": "use it for", "refusal": "refused for training", "optimises": "optimises"}
LABELS |= {"caution": "caution", "used_by": "used by", "cost": "cost", "formula": "computes"}


def estimator_classes() -> dict[str, type[KLEstimator]]:
    """This package's estimators by name; those refused for training come last."""
    classes = {
        name: value
        for name, value in vars(estimators).items()
        if isinstance(value, type) and issubclass(value, KLEstimator) and not inspect.isabstract(value)
    }
    return dict(sorted(classes.items(), key=lambda item: (item[1].refusal is not None, item[0])))


def find_estimator(name: str) -> KLEstimator:
    """The estimator with the given name, with default settings."""
    module, _, member = name.rpartition(".")
    classes = estimator_classes()
    if not module and name not in classes:
        known = f"{', '.join(classes)}, or package.module.Class for one of your own"
        raise ConfigurationError(f"unknown estimator {name!r}{suggestion(name, classes)}; known: {known}")
    estimator = import_member(name, module, member) if module else classes[name]
    if not isinstance(estimator, type) or not issubclass(estimator, KLEstimator):
        raise ConfigurationError(f"{name} is not a subclass of lit_klrb.estimators.KLEstimator")
    with concerning(f"{name} cannot be instantiated without arguments", TypeError):
        return estimator()


def _describe(name: str, estimator: KLEstimator) -> dict[str, str | None]:
    about = estimator.explanation
    return {
        "name": name,
        "formula": estimator.formula,
        "optimises": EstimatorMemory(estimator).statement(),
        "cost": estimator.cost,
        "used_by": about and about.used_by,
        "refusal": estimator.refusal,
        "caution": about and about.caution,
        "use": "; ".join(a.situation for a in ADVICE if a.estimator is type(estimator)) or None,
    }


def _divergences(estimator: KLEstimator) -> list[KLEstimator]:
    """The estimator with its other divergences."""
    if not isinstance(estimator, RaoBlackwell):
        return []
    others = (name for name in get_args(Divergence) if name != estimator.divergence)
    return [replace(estimator, divergence=name) for name in others]


def _overview() -> list[dict[str, str | None]]:
    return [_describe(name, kind()) for name, kind in estimator_classes().items()]


def _print_overview() -> None:
    print(f"Which to use; the default of fit is {DEFAULT.__name__}:")
    print_table(
        ("situation", "estimator", "because"),
        [(advice.situation, advice.estimator.__name__, advice.reason) for advice in ADVICE],
    )
    print("\nAll estimators, and the gradient that each has:")
    rows = []
    for about in _overview():
        training = "yes" if about["refusal"] is None else "refused"
        rows.append((about["name"] or "", (about["optimises"] or "").removeprefix(GRADIENT), training))
    print_table(("estimator", "the gradient of", "training"), rows)
    print("\nFormula, cost, bias and where it is used: lit-klrb explain NAME")


def _print_page(name: str, estimator: KLEstimator) -> None:
    about = _describe(name, estimator)
    documentation = (type(estimator).__doc__ or "").strip()
    print_lines(f"{name}: {documentation.splitlines()[0]}\n" if documentation else f"{name}\n")
    certificate = certify_estimator(estimator)
    print_lines(f"in short: {conclude(certificate.gradient)}")
    for key, label in LABELS.items():
        if about[key] is not None:
            print_lines(f"{label}: {about[key]}")
    for other in _divergences(estimator):
        print_lines(f"{other.label} optimises {other.optimises}")
    print_lines(f"where {NOTATION}; g = sum_t [c_t grad log p(y_t) + grad l_t]")
    head = "" if estimator.topk is None else f", k = {TOP_K}"
    gradient = describe(certificate.gradient)
    print_lines(f"\nexpected gradient with six pairs of enumerated models{head}: {gradient}")
    print_lines(*explain_names(certificate.gradient))
    print_levels(certificate.gradient, certificate.mean_values)
    if note := FITTED.get(type(estimator)):
        print_lines(f"{note}; docs/variance.md measures it with many prompts.")


def main(argv: Sequence[str]) -> int:
    """Run `explain [ESTIMATOR] [--json]` and return the exit code."""
    parser = Arguments("explain", __doc__)
    parser.add_argument(
        "estimator",
        nargs="?",
        metavar="ESTIMATOR",
        help="a class name, or package.module.Class for your own; without it, a table of all is printed",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    name = arguments.estimator
    estimator = None if name is None else find_estimator(name)
    if arguments.json and estimator is not None:
        certificate = certify_estimator(estimator)
        values = {"mean_values": certificate.mean_values, "gradient": as_json(certificate.gradient)}
        print(json.dumps(_describe(name, estimator) | values, indent=2))
    elif arguments.json:
        print(json.dumps(_overview(), indent=2))
    elif estimator is not None:
        _print_page(name, estimator)
    else:
        _print_overview()
    return 0

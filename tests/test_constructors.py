"""Constructors name and document all arguments; classes are abstract or final."""

import importlib
import inspect
import pkgutil

import jsonargparse
import pytest

import lit_klrb
from lit_klrb import callbacks, modules, studies
from lit_klrb.data import modules as data_modules
from lit_klrb.data.base import CorpusDataModule
from lit_klrb.estimators import KLEstimator

ROOMS = ("estimators", "data", "models", "modules", "studies", "callbacks")
# Hooks of Lightning that a base class implements and subclasses extend with super().
EXTENDED = {
    "RegularisedModule.configure_model",
    "SFTModule.configure_model",
    "DPOModule.on_save_checkpoint",
    "OnPolicyModule.setup",
    "OnPolicyModule.configure_model",
    "OnPolicyModule.on_save_checkpoint",
    "OnPolicyModule.on_load_checkpoint",
    "DistillModule.setup",
    "DistillModule.load_pair",
    "DistillModule.on_validation_batch_start",
    "DistillModule.rollout_metrics",
    "RaoBlackwell.loss_recipes",  # its own term is a mean of two
}
# Properties that describe an estimator, which have a default.
DESCRIPTIONS = {
    *("formula", "cost", "bias", "topk", "reads_prefix_rewards"),
    *("is_fusable", "credits_own_kl_in_loss", "applied_recipe", "direction_names"),
}
# Replicates code that is not the recipe it belongs to.
REPLICATED = {"ReleasedEstimator.centred", "ReleasedEstimator.loss"}


def public_classes():
    found = [c for room in (modules, callbacks, studies) for c in vars(room).values() if inspect.isclass(c)]
    found += [
        c for c in vars(data_modules).values() if inspect.isclass(c) and issubclass(c, CorpusDataModule)
    ]
    # Lightning's checkpoint callback and progress bar pass all arguments on to their base classes.
    return [
        c
        for c in found
        if not issubclass(c, Exception) and c.__name__ not in ("RunCheckpoint", "RunProgressBar")
    ]


def undocumented(kind):
    """Arguments of a class without help text."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, "x", fail_untyped=False)
    return [a.dest for a in parser._actions if a.dest.startswith("x.") and not (a.help or "").strip("% ")]


@pytest.mark.parametrize("kind", public_classes(), ids=lambda kind: kind.__name__)
def test_every_argument_has_a_name_and_an_explanation(kind):
    parameters = inspect.signature(kind).parameters.values()
    assert not [p for p in parameters if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    assert all(p.annotation is not p.empty for p in parameters)
    assert undocumented(kind) == []


def test_an_argument_without_a_word_would_be_found():
    class Bad:
        """Bad.

        Args:
            told: What it is.
        """

        def __init__(self, told: int = 1, silent: int = 2) -> None: ...

    assert undocumented(Bad) == ["x.silent"]


def own_classes():
    for module in pkgutil.walk_packages(lit_klrb.__path__, "lit_klrb."):
        if module.name.split(".")[1] in ROOMS:
            yield from (
                c
                for c in vars(importlib.import_module(module.name)).values()
                if inspect.isclass(c) and c.__module__ == module.name
            )


def ancestors(kind):
    return [base for base in kind.__mro__[1:] if base.__module__.startswith("lit_klrb.")]


def function_of(member):
    member = member.fget if isinstance(member, property) else member
    return member if inspect.isfunction(member) else None


def test_a_class_that_is_inherited_from_is_abstract_and_one_that_inherits_is_abstract_or_final():
    inherited = {base for kind in own_classes() for base in ancestors(kind)}
    assert {"TrainedModule", "CorpusDataModule", "PolicyStudy"} <= {kind.__name__ for kind in inherited}
    assert [kind for kind in inherited if not inspect.isabstract(kind)] == []
    leaves = [kind for kind in own_classes() if ancestors(kind) and not inspect.isabstract(kind)]
    assert [kind for kind in leaves if not getattr(kind, "__final__", False)] == []


def test_no_concrete_method_is_overridden_but_extended_hooks_and_descriptions():
    overridden = set()
    for kind in own_classes():
        for name, member in vars(kind).items():
            if name.startswith("__") or function_of(member) is None:
                continue
            if issubclass(kind, KLEstimator) and isinstance(member, property) and name in DESCRIPTIONS:
                continue
            inherited = [vars(base)[name] for base in ancestors(kind) if name in vars(base)]
            if any(not getattr(function_of(m), "__isabstractmethod__", False) for m in inherited):
                overridden.add(f"{kind.__name__}.{name}")
    assert overridden == EXTENDED | REPLICATED

"""open-instruct: the command line of its GRPO scripts.

Options, defaults and formulas as in open-instruct at commit e6c3044aa6201c8bfa4573c1b03142af599e730d
(20 August 2026): open_instruct/{grpo_utils,grpo_fast,model_utils}.py.
"""

from lit_klrb.cli.foreign.reading import Settings
from lit_klrb.cli.foreign.terms import LOSSES, Finding, Gradient, KLTerm, Note, gradient_of
from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import K1Loss, K2Loss

FRAMEWORK = "open-instruct (defaults of commit e6c3044, 2026-08-20)"
NOISE = f"plus the gradient of {K1Loss.__name__} times the ratio, which is noise of mean zero"
# By --kl_estimator
ESTIMATES = ("k1", "k2", "k3", "ratio times k1")
GRADIENTS = {
    "0": LOSSES["k1"],
    "1": LOSSES["k2"],
    "2": LOSSES["k3"],
    "3": Gradient(K2Loss, remark=NOISE),
}


def matches(settings: Settings) -> bool:
    """Whether these are settings of open-instruct."""
    return any("open_instruct" in word for word in settings.words)


def explain(settings: Settings) -> Finding:
    """The KL term of open-instruct's GRPO."""
    if not any("open_instruct/grpo" in word or "open_instruct.grpo" in word for word in settings.words):
        raise ConfigurationError("of open-instruct, only GRPO is known here", key="config")
    kind = settings.text("kl_estimator", "2")
    gradient = gradient_of(GRADIENTS, kind, "kl_estimator")
    term = KLTerm(
        "loss",
        ESTIMATES[int(kind)],
        f"--kl_estimator {kind}",
        settings.number("beta", 0.05),
        "--beta",
        gradient.or_remark(Note.FIRST_STEP),
        "token" if kind == "3" else "none",
    )
    constant = "the loss is a sum over tokens, divided by --loss_denominator"
    note = Note.PER_TOKEN if settings.text("loss_denominator", "token") == "token" else constant
    return Finding(FRAMEWORK, "GRPO", (term,), (note,))

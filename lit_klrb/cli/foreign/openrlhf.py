"""OpenRLHF: the command line of its scripts, with today's option names and the earlier ones.

Options, defaults and formulas as in OpenRLHF at commit
d3d1920349588f3ee419ef6883efd8e09a77360c (pull request 1309, August 2026): openrlhf/cli/train_ppo_ray.py,
openrlhf/models/utils.py, openrlhf/trainer/ppo_utils/experience_maker.py, openrlhf/trainer/ray/ppo_actor.py.
"""

from lit_klrb.cli.foreign.reading import Settings
from lit_klrb.cli.foreign.terms import LOSSES, TO_GO, Finding, Gradient, KLTerm, Note, gradient_of
from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import K2Loss

FRAMEWORK = "OpenRLHF (defaults of commit d3d1920, August 2026)"
# Today's options, and their names until 2025.
OPTIONS = {
    "algo.kl.init_coef": "init_kl_coef",
    "algo.kl.estimator": "kl_estimator",
    "algo.kl.use_loss": "use_kl_loss",
    "algo.kl.target": "kl_target",
    "algo.advantage.estimator": "advantage_estimator",
}
# The value of the estimate, with the gradient of k2 times the token's ratio, which is clamped to 10.
UNBIASED = "algo.kl.unbiased_gradient"
WHITENING = {"gae", "reinforce", "reinforce_baseline"}


def matches(settings: Settings) -> bool:
    """Whether these are settings of OpenRLHF."""
    return any("openrlhf" in word for word in settings.words) or any(
        key in OPTIONS for key in settings.values
    )


def explain(settings: Settings) -> Finding:
    """The KL term of OpenRLHF's PPO, of which there is one: in the loss or in the reward."""
    scripts = [word for word in settings.words if "openrlhf.cli." in word or "openrlhf/cli/" in word]
    if scripts and not any("train_ppo" in word for word in scripts):
        raise ConfigurationError(f"of OpenRLHF, only train_ppo is known here, got {scripts[0]}", key="config")
    now = {new: new if new in settings.values else old for new, old in OPTIONS.items()}
    kind = settings.text(now["algo.kl.estimator"], "k1")
    in_loss = settings.flag(now["algo.kl.use_loss"])
    gradient = gradient_of(LOSSES if in_loss else TO_GO, kind, now["algo.kl.estimator"])
    unbiased = in_loss and settings.flag(UNBIASED)
    if unbiased:
        gradient = Gradient(K2Loss, remark="the token's ratio is clamped to 10")
    term = KLTerm(
        "loss" if in_loss else "reward",
        kind,
        f"--{now['algo.kl.estimator']} {kind}"
        + (f" --{now['algo.kl.use_loss']}" if in_loss else "")
        + (f" --{UNBIASED}" if unbiased else ""),
        settings.number(now["algo.kl.init_coef"], 0.01),
        f"--{now['algo.kl.init_coef']}",
        gradient.or_remark(Note.FIRST_STEP) if in_loss else gradient,
        "token" if unbiased else "none",
    )
    advantage = settings.text(now["algo.advantage.estimator"], "gae")
    notes = ["per-token values are clamped to -10 ... 10"]
    if not in_loss:
        notes.append("the baseline is subtracted from the reward before the KL, which has none")
    if advantage in WHITENING and not settings.flag("algo.advantage.no_std_norm"):
        notes.append(Note.WHITENED)
    elif advantage == "group_norm":
        notes.append(Note.DIVIDED)
    if now["algo.kl.target"] in settings.values:
        notes.append(f"the coefficient adapts to --{now['algo.kl.target']}")
    return Finding(FRAMEWORK, f"advantage estimator {advantage}", (term,), tuple(notes))

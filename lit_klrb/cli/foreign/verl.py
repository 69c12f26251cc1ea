"""verl: YAML configurations and the Hydra command lines of its scripts.

Keys, defaults and formulas as in verl at commit b178a3cd56f58b2d502255daba591e92833930a7 (January 2026):
verl/trainer/config/{ppo_trainer,actor/actor}.yaml, verl/trainer/ppo/{core_algos,ray_trainer}.py.
"""

from lit_klrb.cli.foreign.reading import Settings
from lit_klrb.cli.foreign.terms import (
    DIVIDED,
    FIRST_STEP,
    LOSSES,
    PER_LENGTH,
    PER_TOKEN,
    SUMMED,
    TO_GO,
    WHITENED,
    WHOLE,
    Finding,
    Gradient,
    Term,
)
from lit_klrb.estimators import K2Loss

FRAMEWORK = "verl (defaults of commit b178a3c)"
ACTOR = "actor_rollout_ref.actor."
KINDS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3", "abs": "abs"}
# Advantage estimators that credit a token's KL to the tokens before it; the others sum over the completion.
CREDIT_TO_GO = {"gae", "reinforce_plus_plus", "remax"}
DIVIDE_BY_STD = {"grpo", "grpo_passk"}
WHITENING = {"gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"}
AGGREGATION = {
    "token-mean": PER_TOKEN,
    "seq-mean-token-mean": PER_LENGTH,
    "seq-mean-token-sum": SUMMED,
    "seq-mean-token-sum-norm": "the loss is a sum over tokens, divided by a constant",
}


def matches(settings: Settings) -> bool:
    """Whether these are settings of verl."""
    return (
        settings.has("actor_rollout_ref.")
        or "algorithm.adv_estimator" in settings.values
        or any("verl.trainer" in word for word in settings.words)
    )


def explain(settings: Settings) -> Finding:
    """The KL terms of verl's actor."""
    advantage = settings.text("algorithm.adv_estimator", "gae")
    terms = [_in_loss(settings)] if settings.flag(f"{ACTOR}use_kl_loss") else []
    if settings.flag("algorithm.use_kl_in_reward"):
        terms.append(_in_reward(settings, advantage))
    notes = [AGGREGATION.get(settings.text(f"{ACTOR}loss_agg_mode", "token-mean"), "")]
    if advantage in DIVIDE_BY_STD and settings.flag("algorithm.norm_adv_by_std_in_grpo", True):
        divided_alike = "reward less its KL is divided by its group's standard deviation"
        notes.append(divided_alike if terms and terms[0].place == "reward" else DIVIDED)
    if advantage in WHITENING:
        notes.append(WHITENED)
    if settings.text("algorithm.kl_ctrl.type", "fixed") == "adaptive":
        notes.append("the coefficient in the reward adapts to algorithm.kl_ctrl.target_kl (per token)")
    return Finding(FRAMEWORK, f"adv_estimator={advantage}", tuple(terms), tuple(filter(None, notes)))


def _in_loss(settings: Settings) -> Term:
    kind = settings.text(f"{ACTOR}kl_loss_type", "low_var_kl")
    plain = kind.removesuffix("+")
    gradient = LOSSES.get(KINDS.get(plain, ""), Gradient(None, remark="verl does not implement it"))
    if kind.endswith("+") and plain in KINDS:  # the value of one estimate, the gradient of k2
        gradient = Gradient(K2Loss, remark="verl at this commit raises NotImplementedError for names with +")
    return Term(
        "loss",
        KINDS.get(plain, kind) + ("+" if kind.endswith("+") else ""),
        f"{ACTOR}kl_loss_type={kind}",
        settings.number(f"{ACTOR}kl_loss_coef", 0.001),
        f"{ACTOR}kl_loss_coef",
        gradient.estimator,
        relation=gradient.relation,
        remark=gradient.remark or FIRST_STEP,
    )


def _in_reward(settings: Settings, advantage: str) -> Term:
    kind = settings.text("algorithm.kl_penalty", "kl")
    table = TO_GO if advantage in CREDIT_TO_GO else WHOLE
    gradient = table.get(KINDS.get(kind, ""), Gradient(None, remark="verl does not implement it"))
    return Term(
        "reward",
        KINDS.get(kind, kind),
        f"algorithm.kl_penalty={kind}",
        settings.number("algorithm.kl_ctrl.kl_coef", 0.001),
        "algorithm.kl_ctrl.kl_coef",
        gradient.estimator,
        relation=gradient.relation,
        remark=gradient.remark,
    )

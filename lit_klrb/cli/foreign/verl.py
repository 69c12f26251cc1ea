"""verl: YAML configurations and the Hydra command lines of its scripts.

Keys, defaults and formulas as in verl at commit 1dda039b9c6311889a9c9a26040677e1254814f9 (22 August 2026):
verl/trainer/config/{ppo_trainer,actor/actor,distillation/distillation}.yaml,
verl/trainer/distillation/losses.py, verl/trainer/ppo/{core_algos,ray_trainer}.py.
"""

from lit_klrb.cli.foreign.reading import Settings
from lit_klrb.cli.foreign.terms import ADVANTAGE, LOSSES, OWN, TO_GO, WHOLE, Finding, Gradient, KLTerm, Note
from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import K2Loss

FRAMEWORK = "verl (defaults of commit 1dda039, 2026-08-22)"
ACTOR = "actor_rollout_ref.actor."
DISTILLATION = "distillation.distillation_loss."
# Names that end with + have the value of the estimate and the gradient of k2
KINDS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3", "abs": "abs"}
# Advantage estimators that credit a token's KL to the tokens before it; the others sum over the completion.
CREDIT_TO_GO = {"gae", "reinforce_plus_plus", "remax"}
DIVIDE_BY_STD = {"grpo", "grpo_passk"}
WHITENING = {"gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"}
AGGREGATION = {
    "token-mean": Note.PER_TOKEN,
    "seq-mean-token-mean": Note.PER_LENGTH,
    "seq-mean-token-sum": Note.SUMMED,
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
    distils = settings.flag("distillation.enabled")
    terms = [_distillation(settings)] if distils else []
    has_rewards = not distils or settings.flag(f"{DISTILLATION}use_task_rewards", True)
    if has_rewards and settings.flag(f"{ACTOR}use_kl_loss"):
        terms.append(_in_loss(settings))
    if has_rewards and settings.flag("algorithm.use_kl_in_reward"):
        terms.append(_in_reward(settings, advantage))
    notes = [AGGREGATION.get(settings.text(f"{ACTOR}loss_agg_mode", "token-mean"), "")]
    if distils:
        notes.append(Note.TEACHER)
    if not has_rewards:
        return Finding(FRAMEWORK, "distillation", tuple(terms), tuple(filter(None, notes)))
    if advantage in DIVIDE_BY_STD and settings.flag("algorithm.norm_adv_by_std_in_grpo", True):
        divided_alike = "reward less its KL is divided by its group's standard deviation"
        notes.append(divided_alike if terms and terms[0].place == "reward" else Note.DIVIDED)
    if advantage in WHITENING:
        notes.append(Note.WHITENED)
    if settings.text("algorithm.kl_ctrl.type", "fixed") == "adaptive":
        notes.append("the coefficient in the reward adapts to algorithm.kl_ctrl.target_kl (per token)")
    trainer = f"adv_estimator={advantage}" + (" and distillation" if distils else "")
    return Finding(FRAMEWORK, trainer, tuple(terms), tuple(filter(None, notes)))


def _kind(name: str, key: str) -> str:
    """k1, k2, k3 or abs."""
    if name not in KINDS:
        raise ConfigurationError(f"{name} is not known here; {', '.join(KINDS)} are, also with +", key=key)
    return KINDS[name]


def _distillation(settings: Settings) -> KLTerm:
    key = f"{DISTILLATION}loss_mode"
    mode = settings.text(key, "k3")
    as_advantage = settings.flag(f"{DISTILLATION}use_policy_gradient")
    if mode == "forward_kl_topk":
        kind = "KL(teacher || student) over the teacher's likeliest tokens"
        gradient = Gradient(
            None,
            remark=OWN.format("this KL of its position")
            if as_advantage
            else "optimises that part of each token's KL(teacher || student) given its prefix, where it is "
            "positive: the other direction",
        )
    else:
        kind = _kind(mode, key)
        gradient = (ADVANTAGE if as_advantage else LOSSES)[kind]
    if kind == "k1" and not as_advantage:
        raise ConfigurationError("verl refuses k1 without use_policy_gradient: it has no gradient", key=key)
    weighted = settings.flag(f"{DISTILLATION}use_task_rewards", True)
    remark = "within PPO's clipping; values are clamped" if as_advantage else Note.FIRST_STEP
    return KLTerm(
        "advantage" if as_advantage else "loss",
        kind,
        f"{key}={mode} {DISTILLATION}use_policy_gradient={as_advantage}",
        settings.number(f"{DISTILLATION}distillation_loss_coef", 1.0) if weighted else 1.0,
        f"{DISTILLATION}distillation_loss_coef",
        gradient.or_remark(remark),
        "token" if as_advantage and gradient.estimator else "none",
    )


def _in_loss(settings: Settings) -> KLTerm:
    key = f"{ACTOR}kl_loss_type"
    name = settings.text(key, "low_var_kl")
    kind = _kind(name.removesuffix("+"), key)
    gradient = Gradient(K2Loss) if name.endswith("+") else LOSSES[kind]
    return KLTerm(
        "loss",
        kind + "+" * name.endswith("+"),
        f"{key}={name}",
        settings.number(f"{ACTOR}kl_loss_coef", 0.001),
        f"{ACTOR}kl_loss_coef",
        gradient.or_remark(Note.FIRST_STEP),
    )


def _in_reward(settings: Settings, advantage: str) -> KLTerm:
    name = settings.text("algorithm.kl_penalty", "kl")
    kind = _kind(name.removesuffix("+"), "algorithm.kl_penalty")  # + changes the gradient of the value only
    gradient = (TO_GO if advantage in CREDIT_TO_GO else WHOLE)[kind]
    return KLTerm(
        "reward",
        kind,
        f"algorithm.kl_penalty={name}",
        settings.number("algorithm.kl_ctrl.kl_coef", 0.001),
        "algorithm.kl_ctrl.kl_coef",
        gradient,
    )

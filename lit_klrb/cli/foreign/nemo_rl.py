"""NeMo-RL: YAML configurations, with the file that `defaults` names if it lies beside them.

Keys, defaults and formulas as in NeMo-RL at commit 7ea279abfbeb698b092856d0dab61e7cf39bc909 (August 2026):
nemo_rl/algorithms/loss/loss_functions.py (ClippedPGLossFn), advantage_estimator.py, utils.py (calculate_kl).
"""

from lit_klrb.cli.foreign.reading import Settings
from lit_klrb.cli.foreign.terms import DIVIDED, OWN, PER_LENGTH, TO_GO, WHITENED, Finding, Gradient, Term
from lit_klrb.estimators import K1Loss, K2Loss

FRAMEWORK = "NeMo-RL (defaults of commit 7ea279a)"
COEFFICIENT, KIND = "loss_fn.reference_policy_kl_penalty", "loss_fn.reference_policy_kl_type"
# The loss multiplies the KL by the token's ratio, whose value is 1 on-policy and whose gradient is not 0.
LOSSES = {
    "k1": Gradient(K2Loss, remark=f"plus the gradient of {K1Loss.__name__}, which is noise of mean zero"),
    "k2": Gradient(None, remark="optimises half the second moment of each token's log ratio"),
    "k3": Gradient(K2Loss),
}
OWN_TOKEN = {
    "k1": Gradient(K2Loss, remark="each token is charged with its own log ratio only"),
    **{kind: Gradient(None, remark=OWN.format(f"its own {kind}")) for kind in ("k2", "k3")},
}


def matches(settings: Settings) -> bool:
    """Whether these are settings of NeMo-RL."""
    return settings.has("loss_fn.")


def explain(settings: Settings) -> Finding:
    """The KL term of NeMo-RL's policy loss, or of its reward."""
    kind = settings.text(KIND, "k3")
    section = "ppo" if settings.has("ppo.") else "grpo"
    advantage = settings.text(f"{section}.adv_estimator.name", "gae" if section == "ppo" else "grpo")
    coefficient = settings.number(COEFFICIENT, 0.01)
    notes = [*settings.notes]
    if settings.flag("loss_fn.use_kl_in_reward"):
        terms = _in_reward(kind, coefficient, advantage)
        if not terms:
            notes.append(
                "loss_fn.use_kl_in_reward takes the KL out of the loss, but "
                f"adv_estimator={advantage} does not put it into the reward"
            )
    else:
        corrected = settings.flag("loss_fn.use_on_policy_kl_approximation")
        gradient = LOSSES.get(kind, Gradient(None, remark="NeMo-RL does not know it"))
        terms = (
            Term(
                "loss",
                f"ratio times {kind}",
                f"{KIND}={kind}",
                coefficient,
                COEFFICIENT,
                gradient.estimator,
                "token" if corrected else "none",
                gradient.relation,
                gradient.remark,
            ),
        )
    if settings.flag("loss_fn.token_level_loss", True):
        notes.append(
            "the loss is a mean over the tokens of the batch: reward and KL have the same weight per token"
        )
    else:
        notes.append(PER_LENGTH)
    if advantage in ("grpo", "gdpo") and _divides(settings):
        notes.append(DIVIDED)
    if advantage == "reinforce_plus_plus":
        notes.append(WHITENED)
    return Finding(FRAMEWORK, f"{section}, adv_estimator={advantage}", terms, tuple(notes))


def _divides(settings: Settings) -> bool:
    """Whether rewards are divided by their group's standard deviation; examples refer to another key."""
    key = "grpo.adv_estimator.normalize_rewards"
    refers = settings.text(key, "true") == "${grpo.normalize_rewards}"
    return settings.flag("grpo.normalize_rewards" if refers else key, True)


def _in_reward(kind: str, coefficient: float | str, advantage: str) -> tuple[Term, ...]:
    table = {"reinforce_plus_plus": OWN_TOKEN, "gae": TO_GO}.get(advantage)
    if table is None:
        return ()
    gradient = table.get(kind, Gradient(None, remark="NeMo-RL does not know it"))
    setting = f"{KIND}={kind} loss_fn.use_kl_in_reward=true"
    return (
        Term("reward", kind, setting, coefficient, COEFFICIENT, gradient.estimator, "none", *gradient[1:]),
    )

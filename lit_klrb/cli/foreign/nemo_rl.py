"""NeMo-RL: YAML configurations, with the file that `defaults` names if it lies beside them.

Keys, defaults and formulas as in NeMo-RL at commit 7ea279abfbeb698b092856d0dab61e7cf39bc909 (22 August 2026):
nemo_rl/algorithms/loss/loss_functions.py (ClippedPGLossFn, DistillationLossFn),
advantage_estimator.py, utils.py (calculate_kl).
"""

from lit_klrb.cli.foreign.reading import Settings
from lit_klrb.cli.foreign.terms import ADVANTAGE, TO_GO, Finding, Gradient, KLTerm, Note, gradient_of, known
from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import K1Loss, K2Loss

FRAMEWORK = "NeMo-RL (defaults of commit 7ea279a, 2026-08-22)"
ADVANTAGES = ("grpo", "gdpo", "opd", "reinforce_plus_plus", "gae", "raw_reward")
COEFFICIENT, KIND = "loss_fn.reference_policy_kl_penalty", "loss_fn.reference_policy_kl_type"
# The loss multiplies the KL by the token's ratio, whose value is 1 on-policy and whose gradient is not 0.
LOSSES = {
    "k1": Gradient(K2Loss, remark=f"plus the gradient of {K1Loss.__name__}, which is noise of mean zero"),
    "k2": Gradient(None, remark="optimises half the second moment of each token's log ratio"),
    "k3": Gradient(K2Loss),
}
OWN_TOKEN = {
    "k1": Gradient(K2Loss, remark="each token is charged with its own log ratio only"),
    **{kind: ADVANTAGE[kind] for kind in ("k2", "k3")},
}


DIRECTIONS = {
    "forward": "KL(teacher || student) over the teacher's likeliest tokens",
    "reverse": "KL(student || teacher) over the teacher's likeliest tokens",
    "mixed": "a mixture of both directions of the KL over the teacher's likeliest tokens",
}
CORRECTED = Gradient(K2Loss, remark="up to the corrections that loss_fn.* sets for importance weights")
OPD = KLTerm("advantage", "k1", "grpo.adv_estimator.name=opd", 1.0, "", CORRECTED, "token")


def matches(settings: Settings) -> bool:
    """Whether these are settings of NeMo-RL."""
    return settings.has("loss_fn.")


def explain(settings: Settings) -> Finding:
    """The KL term of NeMo-RL's policy loss, or of its reward."""
    if settings.has("distillation."):
        return _distillation(settings)
    kind = settings.text(KIND, "k3")
    section = "ppo" if settings.has("ppo.") else "grpo"
    key = f"{section}.adv_estimator.name"
    advantage = known(settings.text(key, "gae" if section == "ppo" else "grpo"), ADVANTAGES, key)
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
        value, setting = f"ratio times {kind}", f"{KIND}={kind}"
        term = KLTerm("loss", value, setting, coefficient, COEFFICIENT, gradient_of(LOSSES, kind, KIND))
        terms = (term._replace(off_policy="token" if corrected else "none"),)
    if advantage == "opd":
        terms = (OPD, *terms)
        notes.append(Note.TEACHER)
    per_token = settings.flag("loss_fn.token_level_loss", True)
    notes.append(Note.PER_TOKEN if per_token else Note.PER_LENGTH)
    if advantage in ("grpo", "gdpo") and _divides(settings):
        notes.append(Note.DIVIDED)
    if advantage == "reinforce_plus_plus":
        notes.append(Note.WHITENED)
    return Finding(FRAMEWORK, f"{section}, adv_estimator={advantage}", terms, tuple(notes))


def _distillation(settings: Settings) -> Finding:
    """The KL of student and teacher, each renormalised over the teacher's likeliest tokens."""
    direction = settings.text("loss_fn.kl_type", "mixed")
    if settings.has("loss_fn.gold_loss") or direction not in DIRECTIONS:
        known = f"with one vocabulary and a kl_type of {', '.join(DIRECTIONS)}"
        raise ConfigurationError(f"of NeMo-RL's distillations, that {known} is known here", key="config")
    tail = settings.flag("loss_fn.zero_outside_topk") and direction != "forward"
    setting = f"loss_fn.kl_type={direction} distillation.topk_logits_k"
    term = KLTerm(
        "loss",
        DIRECTIONS[direction] + (", and what the student puts outside them" if tail else ""),
        f"{setting}={settings.text('distillation.topk_logits_k', '64')}",
        1.0,
        "",
        Gradient(
            None,
            remark="optimises this KL of each token given its prefix, without the effect of a token on later "
            "ones" + ("" if tail else ", and nothing outside these tokens"),
        ),
    )
    notes = (*settings.notes, Note.TEACHER, Note.PER_TOKEN)
    return Finding(FRAMEWORK, "distillation", (term,), notes)


def _divides(settings: Settings) -> bool:
    """Whether rewards are divided by their group's standard deviation; examples refer to another key."""
    key = "grpo.adv_estimator.normalize_rewards"
    refers = settings.text(key, "true") == "${grpo.normalize_rewards}"
    return settings.flag("grpo.normalize_rewards" if refers else key, True)


def _in_reward(kind: str, coefficient: float | str, advantage: str) -> tuple[KLTerm, ...]:
    table = {"reinforce_plus_plus": OWN_TOKEN, "gae": TO_GO}.get(advantage)
    if table is None:
        return ()
    setting = f"{KIND}={kind} loss_fn.use_kl_in_reward=true"
    return (KLTerm("reward", kind, setting, coefficient, COEFFICIENT, gradient_of(table, kind, KIND)),)

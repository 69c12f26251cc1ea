"""TRL: Python scripts, YAML files of its command line, and shell scripts that call it.

Keys, defaults and formulas as in TRL 1.16 (trl/trainer/{grpo,rloo,distillation}_{config,trainer}.py), for PPO
as in 0.16 (trl/trainer/ppo_{config,trainer}.py).
"""

from lit_klrb.cli.foreign.reading import Settings
from lit_klrb.cli.foreign.terms import TO_GO, Finding, Gradient, KLTerm, Note, gradient_of
from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import K2Loss, K3Loss, MonteCarlo, RaoBlackwellLoss

FRAMEWORK = "TRL (defaults of 1.16, 2026-10-15)"
ONLY = {
    "ppo": {"kl_coef", "kl_estimator", "cliprange", "vf_coef", "num_ppo_epochs"},
    "grpo": {"loss_type", "scale_rewards", "use_bias_correction_kl", "importance_sampling_level", "delta"},
    "rloo": {"normalize_advantages", "reward_clip_range"},
    "distillation": {"teacher_model_name_or_path", "teacher_model_init_kwargs"},
}
SHARED = {"beta", "num_generations", "max_completion_length", "epsilon", "reward_funcs"}
NORMALISATION = {
    **dict.fromkeys(("dapo", "bnpo", "cispo", "vespo"), Note.PER_TOKEN),
    **dict.fromkeys(("grpo", "sapo"), Note.PER_LENGTH),
    "dr_grpo": "the loss is a sum over tokens, divided by max_completion_length",
    "luspo": Note.SUMMED,
}

# What DistillationConfig.beta other than 1 stands for, and for beta = 0
OTHER_BETA = (
    (
        "a divergence between both directions",
        "each token's generalised Jensen-Shannon divergence given its prefix",
    ),
    ("KL(teacher || student)", "each token's KL(teacher || student) given its prefix: the other direction"),
)


def trainer_of(settings: Settings) -> str | None:
    """The name of the trainer: grpo, rloo or ppo; None if these are no settings of TRL."""
    for name in ONLY:
        if {f"{_class(name)}Config", f"{_class(name)}Trainer"} & settings.words:
            return name
    if settings.words:
        commands = {word.rpartition("/")[2].removesuffix(".py").partition("_")[0] for word in settings.words}
        called = [name for name in ONLY if name in commands]
        return called[0] if called and ("trl" in settings.words or SHARED & settings.values.keys()) else None
    for name, keys in ONLY.items():
        if keys & settings.values.keys():
            return name
    if not SHARED & settings.values.keys():
        return None
    named = [name for name in ONLY if name in settings.name]
    if not named:
        raise ConfigurationError(
            "these settings fit TRL's GRPO and its RLOO; rename the file so that it contains grpo or rloo",
            key="config",
        )
    return named[0]


def _class(trainer: str) -> str:
    """How its classes' names start."""
    return trainer.title() if trainer == "distillation" else trainer.upper()


def explain(settings: Settings, trainer: str) -> Finding:
    """The KL term of a trainer."""
    called = settings.calls.get(f"{_class(trainer)}Config")
    own = settings if called is None else settings._replace(values=called)
    explained = {"grpo": _grpo, "rloo": _rloo, "ppo": _ppo, "distillation": _distillation}
    finding = explained[trainer](own)
    if settings.words and called is None and not settings.values:
        note = "the script takes its settings from the command line: defaults are shown"
        finding = finding._replace(notes=(*finding.notes, note))
    return finding


def _grpo(settings: Settings) -> Finding:
    term = KLTerm(
        "loss", "k3", "use_bias_correction_kl=False", settings.number("beta", 0.0), "beta",
        Gradient(K3Loss, remark=Note.FIRST_STEP),
    )  # fmt: skip
    if settings.flag("use_bias_correction_kl", True):
        term = term._replace(setting="use_bias_correction_kl=True", value="ratio times k3")
        if settings.text("importance_sampling_level", "token") == "token":
            remark = "the default since pull request 6503 of July 2026; earlier versions train with K3Loss"
            term = term._replace(gradient=Gradient(K2Loss, remark=remark), off_policy="token")
        else:
            remark = (
                "the ratio is the geometric mean of the completion's: no estimator here has this gradient"
            )
            term = term._replace(gradient=Gradient(None, remark=remark))
    notes = [NORMALISATION.get(settings.text("loss_type", "dapo"), "")]
    scale = settings.text("scale_rewards", "group")
    if scale.lower() not in ("false", "none"):
        notes.append(Note.DIVIDED)
    return Finding(FRAMEWORK, "GRPOTrainer", (term,), tuple(filter(None, notes)))


def _rloo(settings: Settings) -> Finding:
    term = KLTerm("reward", "k1", "RLOOTrainer", settings.number("beta", 0.05), "beta", Gradient(MonteCarlo))
    notes = [Note.SUMMED]
    if settings.flag("normalize_advantages"):
        notes.append("advantages, KL included, are divided by their standard deviation over the batch")
    return Finding(FRAMEWORK, "RLOOTrainer", (term,), tuple(notes))


def _ppo(settings: Settings) -> Finding:
    kind = settings.text("kl_estimator", "k1")
    gradient, weight = gradient_of(TO_GO, kind, "kl_estimator"), settings.number("kl_coef", 0.05)
    term = KLTerm("reward", kind, f"kl_estimator={kind}", weight, "kl_coef", gradient)
    notes = ["credit is discounted by lam per token (generalised advantages with a critic)"]
    return Finding("TRL (defaults of 0.16, 2025-03-22)", "PPOTrainer", (term,), tuple(notes))


def _distillation(settings: Settings) -> Finding:
    """The generalised Jensen-Shannon divergence, at whose ends are the two directions of the KL."""
    beta = settings.number("beta", 1.0)
    gradient = Gradient(RaoBlackwellLoss)
    term = KLTerm("loss", "the KL of each token, exact", f"beta={beta}", 1.0, "", gradient)
    if beta != 1:
        value, optimises = OTHER_BETA[beta == 0]
        term = term._replace(value=value, gradient=Gradient(None, remark=f"optimises {optimises}"))
    return Finding(FRAMEWORK, "DistillationTrainer", (term,), (Note.TEACHER, Note.PER_TOKEN))

"""`explain --config`: recognise the software of a configuration, and say what it trains with."""

from typing import Any

from lit_klrb.cli.foreign import nemo_rl, open_instruct, openrlhf, trl, verl
from lit_klrb.cli.foreign.reading import read_settings
from lit_klrb.cli.foreign.terms import Finding, KLTerm, Note
from lit_klrb.errors import ConfigurationError, printable

NO_KL = "there is no KL term"


def explain_config(path: str) -> Finding:
    """What a configuration trains with.

    Args:
        path: A YAML file, a shell script or a Python script.

    Raises:
        ConfigurationError: If it cannot be read, is of other software, or sets something that is not known.
    """
    settings = read_settings(path)
    for software in (openrlhf, verl, nemo_rl, open_instruct):
        if software.matches(settings):
            return software.explain(settings)
    if trainer := trl.trainer_of(settings):
        return trl.explain(settings, trainer)
    raise ConfigurationError(
        f"{path} has no settings of a trainer of TRL (GRPO, RLOO, PPO, distillation), verl, OpenRLHF, "
        "NeMo-RL or open-instruct",
        key="config",
    )


def as_json(finding: Finding) -> dict[str, Any]:
    """The finding as plain values."""
    return {
        "framework": finding.framework,
        "trainer": finding.trainer,
        "kl_terms": [_term_as_json(term) for term in finding.terms],
        "both_coefficients_set": _both(finding),
        "notes": list(finding.notes),
    }


def _term_as_json(term: KLTerm) -> dict[str, Any]:
    estimator, relation, remark = term.gradient
    about = None if estimator is None else estimator().explanation
    return {
        "place": term.place,
        "value": term.value,
        "setting": term.setting,
        "coefficient": term.coefficient,
        "coefficient_key": term.coefficient_key,
        "equals": term.equals,
        "relation": term.equals and relation.format(term.equals),
        "optimises": about and about.optimises,
        "refusal": None if estimator is None else estimator.refusal,
        "remark": remark or None,
    }


def text(finding: Finding) -> str:
    """The finding as text for a terminal."""
    lines = [f"{finding.framework}: {finding.trainer}"]
    active = [term for term in finding.terms if not term.is_off]
    lines += [line for term in active for line in _lines(_term_as_json(term))]
    for term in finding.terms:
        if term.is_off:
            lines.append(f"KL in the {term.place} ({term.setting}): off, as {term.coefficient_key} is 0")
    if not active:
        lines.append(f"{NO_KL}: nothing keeps the policy near the reference")
    if _both(finding):
        keys = " and ".join(f"{term.coefficient_key}={term.coefficient}" for term in active)
        lines.append(f"two coefficients are set, {keys}: the KL is penalised twice")
    lines += [f"note: {note}" for note in finding.notes]
    return printable("\n".join(lines), keep="\n")


def _lines(term: dict[str, Any]) -> list[str]:
    key = term["coefficient_key"]
    weight = f"{key}={term['coefficient']}" if key else f"{term['coefficient']:g}"
    lines = [f"KL in the {term['place']}: {term['value']} ({term['setting']}), weight {weight}"]
    for label in ("relation", "optimises", "refusal", "remark"):
        if term[label]:
            prefix = {"relation": "", "refusal": "refused for training here: ", "remark": ""}
            lines.append(f"  {prefix.get(label, f'{label}: ')}{term[label]}")
    return lines


def _both(finding: Finding) -> bool:
    """Whether the KL to the same model has two terms; a teacher's is another one."""
    return len([term for term in finding.terms if not term.is_off]) > 1 and Note.TEACHER not in finding.notes

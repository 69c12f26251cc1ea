"""What the data of a run become, before any weights are loaded: for `check`."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from lit_klrb.data.base import CorpusDataModule
from lit_klrb.files import local_path
from lit_klrb.models.checkpoints import END_TOKENS_KEY
from lit_klrb.models.loading import (
    CLASSIFIER,
    GRAMMAR,
    ITSELF,
    POLICY,
    is_checkpoint,
    load_tokenizer,
    read_checkpoint,
    reading,
)
from lit_klrb.models.roles import Role
from lit_klrb.models.served import is_address

# Arguments that can name the model that is trained, the first that is given.
TRAINED = (
    *(("policy_path", POLICY), ("classifier_path", CLASSIFIER)),
    *(("backbone_path", POLICY), ("reference_path", POLICY)),
)


def preview(data: Any, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Numbers of the training rows, and the first one as the model reads it; None for other data modules.

    Args:
        data: The data module.
        settings: The arguments of the module. Where its tokenizer is not at hand, as one that the run
            trains or that of a checkpoint to come, rows are only counted.
    """
    if not isinstance(data, CorpusDataModule):
        return None
    found = _tokenizer_and_config(settings)
    if found is None:
        return {"kind": data.contents[0], "rows": len(data.load("train"))}
    tokenizer, config, ends = found
    trained = SimpleNamespace(config=config, generation_config=SimpleNamespace(eos_token_id=ends))
    new = settings.get("max_new_tokens", 1)
    return data.preview(SimpleNamespace(tokenizer=tokenizer, trained=trained, max_new_tokens=new))


def _tokenizer_and_config(settings: dict[str, Any]) -> tuple[PreTrainedTokenizerBase, Any, Any] | None:
    """The tokenizer of the model that is trained, its configuration and the tokens that end a completion."""
    for key, role in TRAINED:
        path = settings.get(key)
        if isinstance(path, str) and path not in (GRAMMAR, ITSELF) and not is_address(path):
            return _of_model(key, path, role)
    if settings.get("vocab_size") is not None or "tokenizer_path" not in settings:
        return None
    tokenizer = load_tokenizer("tokenizer_path", settings["tokenizer_path"])
    new = settings.get("policy_config") or settings.get("classifier_config") or {}
    return tokenizer, AutoConfig.for_model(**new) if "model_type" in new else None, tokenizer.eos_token_id


def _of_model(key: str, path: str, role: Role) -> tuple[PreTrainedTokenizerBase, Any, Any] | None:
    with reading(key, path) as place:
        if not is_checkpoint(path):
            if Path(path).suffix == ".gguf":
                return None
            config = AutoConfig.from_pretrained(place, trust_remote_code=False)
            try:
                ends = GenerationConfig.from_pretrained(place).eos_token_id
            except OSError:  # it has none
                ends = getattr(config, "eos_token_id", None)
            return load_tokenizer(key, path, role), config, ends
        if not local_path(path).stat().st_size:  # a plan's stage will write it
            return None
        checkpoint = read_checkpoint(place, role)
        config = AutoConfig.for_model(**checkpoint[role.config_key])
        return load_tokenizer(key, path, role), config, checkpoint.get(END_TOKENS_KEY)


def lines(shown: dict[str, Any]) -> list[str]:
    """The rows, for a reader."""
    if "first" not in shown:
        return [f"rows: {shown['rows']} {shown['kind']}; the tokenizer is not at hand, so none is shown"]
    left_out = sum(shown["left_out"].values())
    why = ", ".join(f"{count} {reason}" for reason, count in shown["left_out"].items())
    found = f"rows: {shown['rows']} {shown['kind']}, {left_out} left out" + (f" ({why})" if why else "")
    if shown["cut"]:
        found += f", {shown['cut']} cut"
    if shown["longest_tokens"]:
        found += f"; tokens: median {shown['median_tokens']:g}, longest {shown['longest_tokens']}"
    first = shown["first"].replace("\n", "\\n")
    return [found, f"first row: {first}"]

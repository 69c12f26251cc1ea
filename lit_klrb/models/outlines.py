"""What is known of a model before its weights are loaded."""

from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoConfig

from lit_klrb.errors import ConfigurationError
from lit_klrb.models.limits import size_of_folder
from lit_klrb.models.loading import is_checkpoint, load_tokenizer, read_checkpoint, reading
from lit_klrb.models.roles import Role


class Outline(NamedTuple):
    """A model's configuration and tokenizer.

    Args:
        type: The architecture, such as "gpt2".
        vocabulary: The number of its logits.
        words: The ids of its tokenizer's tokens.
    """

    type: str
    vocabulary: int | None
    words: dict[str, int]

    def shown(self) -> dict[str, Any]:
        """The parts that `check` prints."""
        return {"type": self.type, "vocabulary": self.vocabulary}


def outline(key: str, path: str, role: Role) -> Outline:
    """Read a model's configuration and tokenizer, without the weights of a folder.

    Raises:
        ConfigurationError: If one is missing or damaged, or is not of a model for the role.
    """
    with reading(key, path) as place:
        if is_checkpoint(path):
            config = read_checkpoint(place, role)[role.config_key]
        else:
            config = AutoConfig.from_pretrained(place, trust_remote_code=False).to_dict()
            if Path(place).is_dir() and not size_of_folder(Path(place)).bytes:
                raise ConfigurationError("it has no weights")
        kind = config.get("model_type")
        if kind not in role.architectures:
            raise ConfigurationError(f"{kind} is not the architecture of a {role.name}")
    words = load_tokenizer(key, path, role).get_vocab()
    return Outline(kind, config.get("vocab_size"), words)

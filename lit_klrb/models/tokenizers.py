"""Tokenizers from folders and from checkpoints, and the comparison of two vocabularies."""

import json
import math
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from lit_klrb.errors import ConfigurationError, refusing
from lit_klrb.files import read_regular

# The files a tokenizer in a checkpoint may consist of. Files with other names are never written to disk.
FILES = frozenset(
    {
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
        *("vocab.json", "merges.txt", "vocab.txt", "chat_template.jinja"),
    }
)
# Those that are read before transformers reads them.
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.json")


def tokenizer_from_folder(path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or a hub id, without running code that comes with it."""
    with refusing("its tokenizer cannot be loaded"):
        _check_names_no_files(path)
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        tokenizer("")  # compares settings that are not looked at before
    # Do not save the name of that code and the way it was loaded this time along with the tokenizer
    for name in ("auto_map", "is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(name, None)
    return tokenizer


def tokenizer_files(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """The text files that make up the tokenizer, by name.

    Raises:
        ConfigurationError: If it needs files other than `FILES`, such as a binary SentencePiece model.
    """
    if tokenizer.is_fast:  # would save the truncation and padding of its last call
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder, save_jinja_files=False)
        files = sorted(Path(folder).iterdir())
        for file in files:
            _check_name(file.name)
        return {file.name: file.read_text("utf-8") for file in files}


def tokenizer_from_files(files: Any) -> PreTrainedTokenizerBase:
    """The inverse of `tokenizer_files`, safe for untrusted files: runs no code and writes no other file."""
    if not isinstance(files, dict):
        raise ConfigurationError(
            f"the tokenizer must be a dictionary from file names to text, got {type(files).__name__}"
        )
    for name, text in files.items():
        _check_name(name)
        if not isinstance(text, str):
            raise ConfigurationError(f"{name} of the tokenizer must be text, got {type(text).__name__}")
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            (Path(folder) / name).write_text(text, "utf-8", errors="surrogatepass")
        return tokenizer_from_folder(folder)


def check_rows(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that each token has a row of the embedding and of the head; these may have more rows."""
    layers: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    rows: float = min((len(layer.weight) for layer in layers if hasattr(layer, "weight")), default=math.inf)
    outside = {index: token for token, index in tokenizer.get_vocab().items() if index >= rows}
    if outside:
        first = min(outside)
        raise ConfigurationError(
            f"its tokenizer has {len(outside)} tokens more than its embedding has rows, {rows}, such as "
            f"{outside[first]!r} with the id {first}: call resize_token_embeddings of transformers, train "
            "the new rows, and save it again"
        )


def common_vocabulary(
    key: str, path: str, own: tuple[dict[str, int], int], other: tuple[dict[str, int], int]
) -> tuple[int, str | None]:
    """The rows that the heads of two models have in common, and what is left out of both distributions.

    The embeddings of models with one tokenizer may be padded to different sizes. Ids in only one of the
    vocabularies are allowed among the common rows: padding, or extra special tokens. The first id with
    another meaning, or in none of the common rows, is refused.

    Args:
        key: The argument that names the second model, for the error message.
        path: Path of the second model.
        own: The policy's tokens, `get_vocab()`, and the number of rows of its head.
        other: The same of the second model.

    Returns:
        The number of common rows, and a line about the others; None if there are none.

    Example:
        >>> words = {"good": 0, "bad": 1}
        >>> common_vocabulary("reference_path", "gpt2", (words, 4), (words, 3))
        (3, "1 row of the policy's head that gpt2 does not have is left out of both distributions")
        >>> common_vocabulary("reference_path", "gpt2", (words, 2), ({"bad": 0, "good": 1}, 2))
        Traceback (most recent call last):
        lit_klrb.errors.ConfigurationError: reference_path: gpt2 has another vocabulary than the policy: id 0
        is 'bad' there and 'good' in the policy; a KL between them needs the same vocabulary
    """
    (ids, size), (other_ids, other_size) = own, other
    tokens, others = ({index: token for token, index in each.items()} for each in (ids, other_ids))
    rows = min(size, other_size)
    differ = [index for index in tokens.keys() & others.keys() if tokens[index] != others[index]]
    if size != other_size:
        differ += [index for index in tokens.keys() | others.keys() if index >= rows]
    if differ:
        first = min(differ)
        there, here = (repr(each[first]) if first in each else "no token" for each in (others, tokens))
        problem = f"{path} has another vocabulary than the policy: id {first} is {there} there and {here}"
        why = "a KL between them needs the same vocabulary"
        raise ConfigurationError(f"{problem} in the policy; {why}", key=key)
    if size == other_size:
        return rows, None
    larger, smaller = ("the policy", path) if size > other_size else (path, "the policy")
    count = abs(size - other_size)
    number, verb = ("row", "is") if count == 1 else ("rows", "are")
    which = f"{count} {number} of {larger}'s head that {smaller} does not have"
    return rows, f"{which} {verb} left out of both distributions"


def _check_names_no_files(path: str) -> None:
    """Check that a tokenizer's settings name no files: its class would read any, even endless ones."""
    for name in SETTINGS:
        content = _json_of(path, name)
        if name == "tokenizer.json":  # of which one part may be a path in place of the content
            model = content.get("model")
            content = {key: model[key] for key in ("vocab", "merges") if key in model} if model else {}
            content = {key: value for key, value in content.items() if isinstance(value, str)}
        for text in _texts(content):
            if os.path.lexists(text) and not os.path.isdir(text):
                raise ConfigurationError(f"its {name} names the file {text}: only its own are read")
        # What it adds to the settings is not looked at by transformers
        if name == "special_tokens_map.json" and (odd := [key for key in content if "_token" not in key]):
            raise ConfigurationError(f"its {name} has {odd[0]}, which is no token")
        templates = content.get("chat_template")
        named = [t.get("name") for t in templates] if isinstance(templates, list) else templates
        for template in named if isinstance(named, (list, dict)) else ():
            if not re.fullmatch(r"[\w-]+", str(template)):
                raise ConfigurationError(f"its {name} has a chat template named {template!r}")


def _json_of(path: str, name: str) -> dict[str, Any]:
    """A JSON file of a folder or of a hub id; empty if there is none."""
    file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    content = {} if file is None else json.loads(read_regular(Path(file)))
    if not isinstance(content, dict):
        raise ConfigurationError(f"its {name} is not a mapping")
    return content


def _texts(content: Any) -> Iterator[str]:
    """All texts of a JSON document, except keys."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, (dict, list)):
        for part in content.values() if isinstance(content, dict) else content:
            yield from _texts(part)


def _check_name(name: Any) -> None:
    if name not in FILES:
        problem = f"{name!r} is not a file that a tokenizer in a checkpoint may consist of"
        raise ConfigurationError(f"{problem}; allowed: {', '.join(sorted(FILES))}")

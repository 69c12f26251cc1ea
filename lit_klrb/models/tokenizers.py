"""Tokenizers as files: from a folder, from the texts a checkpoint carries, and compared with each other."""

import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lit_klrb.errors import ConfigurationError, brief

# All that a tokenizer in a checkpoint can consist of. A name outside this list is never written to disk.
FILES = frozenset(
    {
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
        *("vocab.json", "merges.txt", "vocab.txt", "chat_template.jinja"),
    }
)
# Characters in one file; the largest vocabularies in use take about 35 million.
LARGEST_FILE = 2**27


def tokenizer_from_folder(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or a hub id; code that comes with it is not run.

    Raises:
        ConfigurationError: If there is none.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # a damaged file raises whatever the tokenizer's class makes of it
        reason = brief(error).replace(path, "its folder")
        raise ConfigurationError(f"its tokenizer cannot be loaded: {reason}") from error
    # What would be saved with the tokenizer: the name of that code, and how it was loaded this time.
    for name in ("auto_map", "is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(name, None)
    return tokenizer


def tokenizer_files(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """The text files that make up the tokenizer, by name.

    Raises:
        ConfigurationError: If it needs others than `FILES`, such as a binary SentencePiece model.
    """
    if tokenizer.is_fast:  # it keeps how it cut and padded the last texts, and would save that
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder, save_jinja_files=False)
        files = sorted(Path(folder).iterdir())
        for file in files:
            _check_name(file.name)
        return {file.name: file.read_text("utf-8") for file in files}


def tokenizer_from_files(files: Any) -> PreTrainedTokenizerBase:
    """The inverse of `tokenizer_files`, for files of unknown origin: nothing else is written, no code is run.

    Raises:
        ConfigurationError: If a name is not one of `FILES`, a content is not text of at most `LARGEST_FILE`
            characters, or together they are not a tokenizer.
    """
    if not isinstance(files, dict):
        raise ConfigurationError(f"the tokenizer is {type(files).__name__}; files by name expected")
    for name, text in files.items():
        _check_name(name)
        if not isinstance(text, str):
            raise ConfigurationError(f"{name} of the tokenizer is {type(text).__name__}; text expected")
        if len(text) > LARGEST_FILE:
            raise ConfigurationError(
                f"{name} of the tokenizer has {len(text)} characters; at most {LARGEST_FILE} are read"
            )
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            (Path(folder) / name).write_text(text, "utf-8", errors="surrogatepass")
        return tokenizer_from_folder(folder)


def check_same_vocabulary(key: str, path: str, ids: dict[str, int], others: dict[str, int]) -> None:
    """Refuse two models whose token ids mean different tokens: a KL between them compares unlike words.

    Ids that only one of the two knows are no conflict: padding of the embedding, or extra special tokens.

    Args:
        key: The argument that named the second model, for the error message.
        path: Where the second model comes from.
        ids: Ids of the policy's tokens, `get_vocab()`.
        others: Ids of the second model's tokens.

    Raises:
        ConfigurationError: Naming the first id with two meanings.

    Example:
        >>> check_same_vocabulary("reference_path", "gpt2", {"good": 0, "bad": 1}, {"bad": 0, "good": 1})
        Traceback (most recent call last):
        lit_klrb.errors.ConfigurationError: reference_path: gpt2 reads other tokens than the policy: id 0 is
        'bad' there and 'good' in the policy; a KL between them needs one vocabulary
    """
    mine = {index: token for token, index in ids.items()}
    theirs = {index: token for token, index in others.items()}
    conflicts = [index for index in mine.keys() & theirs.keys() if mine[index] != theirs[index]]
    if conflicts:
        first = min(conflicts)
        raise ConfigurationError(
            f"{path} reads other tokens than the policy: id {first} is {theirs[first]!r} there and "
            f"{mine[first]!r} in the policy; a KL between them needs one vocabulary",
            key=key,
        )


def _check_name(name: Any) -> None:
    if name not in FILES:
        raise ConfigurationError(
            f"{name!r} is not a file that a tokenizer in a checkpoint may consist of; "
            f"allowed: {', '.join(sorted(FILES))}"
        )

"""Models from GGUF files, the format of llama.cpp, converted once to an ordinary folder.

The settings of the file must make a model with exactly the values that it has: what transformers would leave
out is refused. Nothing beside the file is read, and nothing but the folder is written.
"""

import contextlib
import io
import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

from lit_klrb.errors import ConfigurationError, printable, refusing
from lit_klrb.files import local_path, new_folder, sha256
from lit_klrb.models.folders import check_weights, write_checksums
from lit_klrb.models.roles import POLICY, model_from_config, without_code
from lit_klrb.models.tokenizers import tokenizer_files, tokenizer_from_folder
from lit_klrb.run.cache import cached_folder, default_folder
from lit_klrb.run.card import imported_card

SUFFIX = ".gguf"
# To be increased whenever the same file would give another folder.
FORMAT = 2
# Types of settings that the libraries do not check themselves.
TYPES: dict[str, type] = {
    **dict.fromkeys(("general.architecture", "general.name", "tokenizer.chat_template"), str),
    **dict.fromkeys(("tokenizer.ggml.model", "tokenizer.ggml.pre"), str),
    **dict.fromkeys(("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type"), list),
}
EOS = "tokenizer.ggml.eos_token_id"
# Tokens that end a turn; generation stops at these, too.
TURN_ENDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))


class GGUFHeader(NamedTuple):
    """Settings of a file by name, and its tensors, entries of `gguf.GGUFReader`."""

    settings: dict[str, Any]
    tensors: list[Any]


def gguf_file(path: str | Path) -> Path | None:
    """The GGUF file that a path names, itself or as the only one in a folder without a model."""
    local = local_path(str(path))
    if local.suffix == SUFFIX:
        return local
    if not local.is_dir() or (local / "config.json").exists():
        return None
    files = sorted(file for file in local.iterdir() if file.suffix == SUFFIX and file.is_file())
    if len(files) > 1:
        raise ConfigurationError(f"it holds {len(files)} GGUF files; name one, such as {files[0].name}")
    return files[0] if files else None


def as_folder(file: Path) -> str:
    """The converted folder of a GGUF file in the cache; converted again only if the file's content is new."""
    about = file.stat()
    version = about.st_ino, about.st_size, about.st_mtime_ns
    return _as_folder(file.resolve(), (*version, str(default_folder())))


@lru_cache(maxsize=8)
def _as_folder(file: Path, version: tuple[int | str, ...]) -> str:
    """`as_folder`, computed once per process for each version of the file."""
    folder = cached_folder("gguf", [FORMAT, sha256(file)])
    try:
        check_weights(folder)
        complete = (folder / "config.json").is_file()
    except ConfigurationError:  # damaged
        complete = False
    if not complete:
        shutil.rmtree(folder, ignore_errors=True)
        import_gguf(file, folder)
    return str(folder)


def import_gguf(file: Path, folder: Path) -> None:
    """Convert a GGUF file to a folder with weights in float32, tokenizer, checksums and a model card.

    The folder appears when it is complete. What a killed import left behind is removed by the next one.
    """
    header = _checked_header(file)
    size = f"{file.stat().st_size / 1e6:.0f} MB"
    print(f"importing {printable(file.name)} ({size}) into {printable(str(folder))}", file=sys.stderr)
    # On a terminal, the libraries show their progress there
    quiet = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
    with quiet, _only(file) as (alone, name):
        model = _model(alone, name, header)
        with refusing("its vocabulary needs merges or scores", KeyError, key="tokenizer.ggml.merges"):
            tokenizer = AutoTokenizer.from_pretrained(alone, gguf_file=name, trust_remote_code=False)
    if model.generation_config is not None:
        ends = [header.settings[name] for name in TURN_ENDS if name in header.settings]
        model.generation_config.eos_token_id = ends[0] if len({*ends}) == 1 else list(dict.fromkeys(ends))
    texts = _tokenizer_texts(tokenizer, len(header.settings.get("tokenizer.ggml.tokens", [])))
    with refusing(f"cannot write {folder}", OSError), new_folder(folder) as partial:
        model.save_pretrained(partial)
        for text_name, text in texts.items():
            (partial / text_name).write_text(text, "utf-8", errors="surrogatepass")
        if len(tokenizer_from_folder(str(partial))) > model.config.vocab_size:
            raise ConfigurationError("its tokenizer has more tokens than the model")
        card = imported_card(_facts(file, header, model), header.settings.get("general.license"))
        (partial / "README.md").write_text(card, "utf-8")
        write_checksums(partial)


def _checked_header(file: Path) -> GGUFHeader:
    """The header, with settings that do not mislead the libraries."""
    if find_spec("gguf") is None or find_spec("accelerate") is None:
        raise ConfigurationError("GGUF files need the extra gguf: pip install 'lit-klrb[gguf]'")
    from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    header = _read_header(file)
    settings = header.settings
    for name, expected in TYPES.items():
        if name in settings and type(settings[name]) is not expected:
            raise ConfigurationError(f"must be of the type {expected.__name__}", key=name)
    known = {*GGUF_CONFIG_ARCHS, *GGUF_SUPPORTED_ARCHITECTURES}
    if (architecture := settings.get("general.architecture")) not in known:
        problem = f"{architecture!r} is not an architecture that transformers reads from GGUF files"
        reads = f"it reads {', '.join(sorted(known))}"
        raise ConfigurationError(f"{problem}; {reads}", key="general.architecture")
    if settings.get("split.count", 1) != 1:
        raise ConfigurationError("is part of a split model; merge it with llama-gguf-split --merge first")
    tokens = settings.get("tokenizer.ggml.tokens", [])
    if tokens and EOS not in settings:
        raise ConfigurationError("the file does not say which token ends a text", key=EOS)
    for name, value in settings.items():
        if name.endswith("_token_id") and not (type(value) is int and 0 <= value < len(tokens)):
            raise ConfigurationError(f"{value!r} is not the id of one of its {len(tokens)} tokens", key=name)
        scaling = (".rope.scaling.type", ".rope.scaling.factor", ".rope.scale_linear")
        if name.endswith(scaling) and value not in ("none", 0, 1):
            problem = "transformers does not read this from GGUF files and would make another model of it"
            raise ConfigurationError(f"{value!r}: {problem}", key=name)
    return header


def _read_header(file: Path) -> GGUFHeader:
    from gguf import GGUFReader

    with refusing("not a GGUF file that can be read"):  # damaged ones raise all kinds of exceptions
        reader = GGUFReader(file)
        return GGUFHeader({name: field.contents() for name, field in reader.fields.items()}, reader.tensors)


@contextlib.contextmanager
def _only(file: Path) -> Iterator[tuple[str, str]]:
    """A folder and the name of the file in it: nothing that lies beside the file is read."""
    with tempfile.TemporaryDirectory() as folder:
        name = f"model{SUFFIX}"
        (Path(folder) / name).symlink_to(file.resolve())
        yield folder, name


def _model(folder: str, file: str, header: GGUFHeader) -> PreTrainedModel:
    """The model with dequantised weights, which transformers can save."""
    config = AutoConfig.from_pretrained(folder, gguf_file=file, trust_remote_code=False)
    with torch.device("meta"):
        model = model_from_config(without_code(json.loads(config.to_json_string(use_diff=False))))
    stored = model.state_dict(keep_vars=True)
    needed = sum(weight.numel() for weight in {id(weight): weight for weight in stored.values()}.values())
    stored_count = sum(int(tensor.n_elements) for tensor in header.tensors)
    if needed != stored_count:
        raise ConfigurationError(
            f"its tensors have {stored_count} values, and the model of its settings has {needed}: "
            "transformers cannot read it completely"
        )
    plain = GgufConfig(dequantize=True)  # otherwise it might fetch a kernel
    settings = {"dtype": torch.float32, "trust_remote_code": False, "output_loading_info": True}
    load = POLICY.auto_class.from_pretrained
    loaded, info = load(folder, gguf_file=file, quantization_config=plain, **settings)
    if missing := sorted(info["missing_keys"]):
        raise ConfigurationError(f"not a policy: it has no weights for {', '.join(missing[:3])}")
    weights = loaded.state_dict()
    if odd := [name for name, weight in weights.items() if not weight.isfinite().all()]:
        raise ConfigurationError(f"the weight {odd[0]} has values that are not finite")
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    model.config.name_or_path = ""  # what the file calls itself, which the card has
    return model


def _tokenizer_texts(tokenizer: PreTrainedTokenizerBase, size: int) -> dict[str, str]:
    """The tokenizer's files, with the file's tokens only.

    Transformers adds the defaults of its own tokenizers, such as <|endoftext|>, where a file has no such
    token; the model has no embedding of it.
    """
    for setting in ("gguf_file", "is_local", "local_files_only"):  # how it was loaded this time
        tokenizer.init_kwargs.pop(setting, None)
    texts = tokenizer_files(tokenizer)
    content = json.loads(texts["tokenizer.json"])
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < size]
    return {**texts, "tokenizer.json": json.dumps(content, ensure_ascii=False)}


def _unused(header: GGUFHeader) -> list[str]:
    """Settings of the architecture that transformers does not read."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    architecture = header.settings["general.architecture"]
    mappings: dict[str, Any] = GGUF_CONFIG_MAPPING
    read = mappings.get(architecture)
    own = [name for name in header.settings if name.startswith(f"{architecture}.")]
    return [name for name in own if read and read.get(name.partition(".")[2]) is None]


def _facts(file: Path, header: GGUFHeader, model: PreTrainedModel) -> dict[str, Any]:
    """The facts on the model card."""
    labels = {"name": "name", "author": "author", "organisation": "organization", "licence": "license"}
    labels["address"] = "source.url"
    metadata = {label: header.settings.get(f"general.{key}") for label, key in labels.items()}
    values: Counter[str] = Counter()
    for tensor in header.tensors:
        values[tensor.tensor_type.name] += int(tensor.n_elements)
    kinds = ", ".join(f"{name} ({count / values.total():.1%})" for name, count in values.most_common())
    return {
        "file": file.name,
        "SHA-256 of the file": sha256(file),
        "architecture": model.config.model_type,
        "parameters": values.total(),
        "types of the file's values": kinds,
        "type here": "float32",
        "settings of the file that this model does not have": ", ".join(_unused(header)) or None,
        **{f"{label}, as the file says": value for label, value in metadata.items()},
    }

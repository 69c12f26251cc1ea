"""GGUF files as models: the weights are those of the file, and damaged files end in one line."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gguf_files import llama, write
from transformers import AutoModelForCausalLM, AutoTokenizer
from written import save

from lit_klrb.cli.main import main
from lit_klrb.data.tokenizer import train_bpe
from lit_klrb.errors import ConfigurationError
from lit_klrb.models import gguf, loading
from lit_klrb.models.folders import sha256
from lit_klrb.models.tokenizers import tokenizer_files

TEXTS = ["It was a good film.", "It was a bad film, and a long one."]
TOKENS = "tokenizer.ggml.tokens"


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(TEXTS * 4, vocab_size=300)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, tokenizer):
    """A GGUF file, and an ordinary folder of the same rounded weights."""
    folder = tmp_path_factory.mktemp("tiny")
    model = llama(len(tokenizer))
    file = write(folder / "tiny.gguf", model, tokenizer)
    ordinary = save(folder / "ordinary", model, tokenizer)
    return SimpleNamespace(file=file, model=model, ordinary=ordinary, content=file.read_bytes())


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LIT_KLRB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def logprobs(model, tokens):
    with torch.no_grad():
        return model.eval()(tokens).logits.log_softmax(-1)


def some_tokens(model):
    return torch.randint(model.config.vocab_size, (4, 16), generator=torch.Generator().manual_seed(3))


def load(path):
    return loading.load_model("policy_path", str(path))


@pytest.mark.parametrize(
    ("kind", "tied"),
    [(kind, True) for kind in ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1")] + [("F32", False)],
)
def test_log_probabilities_are_those_of_the_file(kind, tied, tokenizer, tmp_path):
    model = llama(len(tokenizer), tied)
    file = write(tmp_path / "model.gguf", model, tokenizer, kind)
    imported, tokens = load(file), some_tokens(model)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    assert imported.dtype == torch.float32
    torch.testing.assert_close(logprobs(imported, tokens), logprobs(theirs, tokens), rtol=0, atol=0)
    torch.testing.assert_close(logprobs(imported, tokens), logprobs(model, tokens), rtol=0, atol=0)


def test_the_tokenizer_is_that_of_the_file(tiny, tokenizer):
    imported = loading.load_tokenizer("policy_path", str(tiny.file))
    theirs = AutoTokenizer.from_pretrained(tiny.file.parent, gguf_file=tiny.file.name)
    for text in (*TEXTS, "naïve 2026 \N{SMILING FACE WITH SMILING EYES}\n<|eos|>"):
        assert imported(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert imported(text)["input_ids"] == theirs(text)["input_ids"]
    turns = [{"role": "user", "content": "Hello"}]
    rendered = imported.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert rendered == "<s>user\nHello</s><s>"
    assert imported.eos_token == tokenizer.eos_token
    assert tokenizer_files(imported)  # checkpoints can have it


def test_the_command_writes_an_ordinary_folder(tiny, tmp_path, capsys):
    folder = tmp_path / "new" / "folder"
    assert main(["import-gguf", str(tiny.file), "--output_dir", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}\n"
    assert {file.name for file in folder.iterdir()} == {
        *("README.md", "SHA256SUMS", "config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    }
    card = (folder / "README.md").read_text("utf-8")
    for fact in ("tiny.gguf", sha256(tiny.file), "Q4_1", "Nobody", "license: mit", "not the original model"):
        assert fact in card.replace("\nnot", " not").replace("is\n", "is ")
    settings = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in settings
    assert not (tmp_path / "cache").exists()
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    tokens = some_tokens(theirs)
    assert torch.equal(logprobs(theirs, tokens), logprobs(tiny.model, tokens))
    assert [path.name for path in folder.parent.iterdir()] == ["folder"]
    changed = bytearray((folder / "model.safetensors").read_bytes())
    changed[-1] ^= 1
    (folder / "model.safetensors").write_bytes(changed)
    with pytest.raises(ConfigurationError, match="does not match its checksum"):
        load(folder)


def test_a_second_use_does_not_convert_again(tiny, cache, monkeypatch):
    first = load(tiny.file)
    gguf._as_folder.cache_clear()
    monkeypatch.setattr(gguf, "import_gguf", lambda *_: pytest.fail("converted again"))
    assert torch.equal(load(tiny.file).lm_head.weight, first.lm_head.weight)
    assert [path.name for path in tiny.file.parent.iterdir() if path.suffix == ".gguf"] == ["tiny.gguf"]
    assert len(list(cache.iterdir())) == 1


def test_a_changed_file_and_a_damaged_folder_are_converted_again(tokenizer, tmp_path, cache):
    file = write(tmp_path / "model.gguf", llama(len(tokenizer), seed=1), tokenizer)
    first = load(file).lm_head.weight
    (weights,) = cache.glob("*/model.safetensors")
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    gguf._as_folder.cache_clear()
    assert torch.equal(load(file).lm_head.weight, first)
    write(file, llama(len(tokenizer), seed=2), tokenizer)
    assert not torch.equal(load(file).lm_head.weight, first)
    assert len(list(cache.iterdir())) == 2


def test_a_folder_with_one_file(tiny, tmp_path):
    shutil.copy(tiny.file, tmp_path / "model.gguf")
    assert torch.equal(load(tmp_path).lm_head.weight, tiny.model.lm_head.weight)
    (tmp_path / "other.gguf").touch()
    with pytest.raises(ConfigurationError, match=r"holds 2 GGUF files; name one, such as model\.gguf"):
        load(tmp_path)


def test_nothing_beside_the_file_is_read(tiny, tmp_path):
    (tmp_path / "model.gguf").symlink_to(tiny.file)
    for name in ("tokenizer", "tokenizer_config", "special_tokens_map", "generation_config"):
        (tmp_path / f"{name}.json").write_text("not JSON")
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["evil.T", null]}}')
    assert loading.load_tokenizer("policy_path", str(tmp_path / "model.gguf")).eos_token_id == 1


def test_the_extra_is_named(tiny, monkeypatch):
    monkeypatch.setattr(gguf, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    with pytest.raises(ConfigurationError, match=r"pip install 'lit-klrb\[gguf\]'"):
        load(tiny.file)


# Damaged files, and settings of other models


@pytest.mark.parametrize("change", [lambda c: b"", lambda c: b"GGML" + c[4:], lambda c: c[:1000]])
def test_a_damaged_file_ends_in_one_line(change, tiny, tmp_path, cache, capsys):
    (tmp_path / "damaged.gguf").write_bytes(change(tiny.content))
    refused(tmp_path / "damaged.gguf", "not a GGUF file that can be read")
    assert main(["import-gguf", str(tmp_path / "damaged.gguf"), "--output_dir", str(tmp_path / "new")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1].startswith("error: file: ")
    assert not (tmp_path / "new").exists()
    assert not list(cache.glob("*"))


@pytest.fixture
def crafted(tokenizer, tmp_path):
    """Writes a small model with other settings or tensors."""
    return lambda **changes: write(tmp_path / "a.gguf", llama(len(tokenizer)), tokenizer, **changes)


def refused(file, reason):
    with pytest.raises(ConfigurationError, match=reason) as caught:
        load(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"general.architecture": "unheard"}, "'unheard' is not an architecture that transformers reads"),
        ({"general.architecture": "t5"}, "model_type|t5"),
        ({"llama.block_count": 3}, "transformers cannot read it completely"),
        ({"llama.attention.head_count_kv": 3}, "its tensors have"),
        ({"llama.rope.scaling.type": "linear"}, "would make another model of it"),
        ({"tokenizer.chat_template": 7}, "chat_template: must be of the type str"),
        ({"tokenizer.ggml.eos_token_id": 2**31}, "is not the id of one of its 282 tokens"),
        ({TOKENS: None}, "0 tokens"),
        ({"tokenizer.ggml.model": "unheard"}, "tokenizer"),
        ({"tokenizer.ggml.merges": ["no such"] * 3}, "Token `no` out of vocabulary"),
        ({"tokenizer.ggml.merges": None}, "merges: its vocabulary needs merges or scores: no entry 'scores'"),
        ({"split.count": 3}, "llama-gguf-split"),
        ({"llama.rope.scaling.factor": 4.0}, "llama.rope.scaling.factor: 4.0: transformers does not read"),
        ({"tokenizer.ggml.eos_token_id": None}, "does not say which token ends a text"),
    ],
)
def test_settings_that_are_not_the_models(settings, reason, crafted, tmp_path):
    refused(crafted(settings=settings), reason)
    assert not list(tmp_path.glob("cache/*"))


def test_ends_of_turns_reach_the_generation_settings(crafted):
    file = crafted(settings={"tokenizer.ggml.eot_token_id": 5})
    assert load(file).generation_config.eos_token_id == [1, 5]


def test_tensors_that_transformers_would_leave_out(crafted):
    """The rope factors of Llama 3.1, without which it is another model."""
    factors = {"rope_freqs.weight": np.ones(8, np.float32)}
    refused(crafted(tensors=factors), "cannot read it completely")
    swapped = {"unheard.weight": np.ones(64, np.float32)}
    file = crafted(leave_out=["model.norm.weight"], tensors=swapped)
    refused(file, r"no weights for model\.norm\.weight")


def test_weights_that_are_not_finite(tokenizer, tmp_path):
    model = llama(len(tokenizer))
    with torch.no_grad():
        model.model.norm.weight[3] = torch.inf
    refused(write(tmp_path / "a.gguf", model, tokenizer), "norm.weight has values that are not finite")


def test_a_template_is_text(crafted, tmp_path):
    hostile = "{{ cycler.__init__.__globals__.os.system('touch " + str(tmp_path / "ran") + "') }}"
    file = crafted(settings={"tokenizer.chat_template": hostile, "general.name": "a|b\n<script>"})
    load(file)
    loaded = loading.load_tokenizer("policy_path", str(file))
    assert loaded.chat_template == hostile
    with pytest.raises(Exception, match=r"unsafe|undefined"):
        loaded.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert not (tmp_path / "ran").exists()
    (card,) = Path(tmp_path).glob("cache/*/README.md")
    assert "a\\|b \\<script>" in card.read_text("utf-8")


# Commands


@pytest.mark.parametrize("command", ["fit", "check"])
def test_a_missing_folder_names_the_commands_that_make_it(command, chain, tmp_path, capsys):
    argv = chain.commands.argv("fit", "rloo", run=tmp_path)[1:]
    assert main([command, *argv, "--model.policy_path", "runs/models/none"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "policy_path: runs/models/none does not exist; make it with" in line
    assert "lit-klrb import-gguf FILE --output_dir runs/models/none" in line

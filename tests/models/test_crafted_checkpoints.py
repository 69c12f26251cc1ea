"""Malicious checkpoints: no code is run, no file is written, and the error is one line."""

import builtins
import json
import os
import sys
import tempfile

import pytest
import torch
from pickles import Touch
from runs import equal

from lit_klrb.cli.export import export_checkpoint
from lit_klrb.data.tokenizer import grammar_tokenizer
from lit_klrb.errors import ConfigurationError
from lit_klrb.models import checkpoints, loading
from lit_klrb.modules import SFTModule

TINY = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 16}
EMBEDDING = "policy.transformer.wte.weight"


@pytest.fixture(scope="module")
def content():
    tokenizer = grammar_tokenizer()
    model = loading.fresh_model(TINY, tokenizer, seed=1)
    return {
        loading.POLICY.config_key: loading.config_dict(model),
        "state_dict": {f"policy.{key}": value for key, value in model.state_dict().items()},
        loading.TOKENIZER_KEY: loading.tokenizer_files(tokenizer),
        "hyper_parameters": {"policy_config": TINY},
        "pytorch-lightning_version": "2.6.6",
    }


@pytest.fixture(autouse=True)
def never_asked(monkeypatch):
    """Fail if transformers asks whether to run untrusted code."""
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("asked whether to run code"))


def written(content, path, **changes):
    torch.save({**content, **changes}, path)
    return str(path)


def error_of(path, tmp_path):
    """The error of both readers of a checkpoint; checks that neither writes a file."""
    before = set(tmp_path.rglob("*"))
    with pytest.raises(ConfigurationError) as refused:
        export_checkpoint(path, str(tmp_path / "out"))
    with pytest.raises(ConfigurationError, match=r"^policy_path: "):
        loading.load_model("policy_path", path), loading.load_tokenizer("policy_path", path)
    assert set(tmp_path.rglob("*")) == before
    message = str(refused.value)
    assert message.startswith(f"ckpt_path: {path}: ")
    assert message.isprintable()
    return message.removeprefix(f"ckpt_path: {path}: ")


NAMES = ["/abs/evil.py", "../evil.py", "..", ".", "", "a/tokenizer.json", "./vocab.txt", "evil.py", "x\0y", 3]


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_a_tokenizer_writes_files_of_known_names_only(content, tmp_path, monkeypatch, name):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if isinstance(name, str) and name.startswith("/"):
        name = str(tmp_path / "evil.py")
    files = {**content[loading.TOKENIZER_KEY], name: "print('run')"}
    path = written(content, tmp_path / "a.ckpt", **{loading.TOKENIZER_KEY: files})
    assert error_of(path, tmp_path).startswith(f"{name!r} is not a file that a tokenizer in a checkpoint may")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "the tokenizer must be a dictionary from file names to text, got NoneType"),
        (["tokenizer.json"], "the tokenizer must be a dictionary from file names to text, got list"),
        ({"vocab.txt": 3}, "vocab.txt of the tokenizer must be text, got int"),
        ({"tokenizer.json": "{"}, "its tokenizer cannot be loaded: "),
        ({"tokenizer.json": "[" * 900}, "its tokenizer cannot be loaded: "),
        ({"tokenizer_config.json": '{"tokenizer_class": "\ud800"}'}, "its tokenizer cannot be loaded: "),
    ],
)
def test_a_tokenizer_is_text(content, tmp_path, files, message):
    path = written(content, tmp_path / "a.ckpt", **{loading.TOKENIZER_KEY: files})
    assert error_of(path, tmp_path).startswith(message)


def test_a_tokenizer_that_brings_code_is_not_run(content, tmp_path, monkeypatch):
    """The class of transformers is used if there is one; otherwise the tokenizer is refused."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "evil.py").write_text(f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()")
    files = content[loading.TOKENIZER_KEY]
    config = {**json.loads(files["tokenizer_config.json"]), "auto_map": {"AutoTokenizer": ["evil.T", None]}}
    for kind, fine in ((config["tokenizer_class"], True), ("Theirs", False)):
        changed = {**files, "tokenizer_config.json": json.dumps({**config, "tokenizer_class": kind})}
        path = written(content, tmp_path / "a.ckpt", **{loading.TOKENIZER_KEY: changed})
        if fine:
            export_checkpoint(path, str(tmp_path / "fine"))
            assert "auto_map" not in (tmp_path / "fine" / "tokenizer_config.json").read_text()
        else:
            assert "its tokenizer cannot be loaded: " in error_of(path, tmp_path)
    assert "evil" not in sys.modules
    assert not (tmp_path / "ran").exists()


def test_a_chat_template_is_kept_and_not_rendered(content, tmp_path):
    """It is stored as text and never rendered."""
    template = "{% for x in range(10**9) %}{% endfor %}{{ cycler.__init__.__globals__.os.system('false') }}"
    tokenizer = grammar_tokenizer()
    tokenizer.chat_template = {"default": template, "other": "{{ 1 }}"}
    files = loading.tokenizer_files(tokenizer)
    path = written(content, tmp_path / "a.ckpt", **{loading.TOKENIZER_KEY: files})
    export_checkpoint(path, str(tmp_path / "out"))
    kept = loading.load_tokenizer("key", str(tmp_path / "out"))
    assert kept.chat_template == {"default": template, "other": "{{ 1 }}"}


def test_a_configuration_that_names_code_brings_none(content, tmp_path):
    config = {
        **content[loading.POLICY.config_key],
        "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"},
        "custom_pipelines": {"text-generation": {"impl": "evil.P"}},
        "attn_implementation": "stranger/kernel",
        "_attn_implementation": "stranger/kernel",
        "_attn_implementation_internal": "stranger/kernel",
        "task_specific_params": {"deep": [{"auto_map": "evil"}]},
    }
    path = written(content, tmp_path / "a.ckpt", **{loading.POLICY.config_key: config})
    export_checkpoint(path, str(tmp_path / "out"))
    exported = (tmp_path / "out" / "config.json").read_text()
    assert "task_specific_params" in exported
    assert not any(word in exported for word in ("auto_map", "evil", "stranger", "custom_pipelines"))
    assert "auto_map" not in loading.config_dict(loading.load_model("key", path))


@pytest.mark.parametrize("place", ["state_dict", "policy_config", "tokenizer_files", "elsewhere"])
def test_no_pickled_code_runs(content, tmp_path, place):
    path = written(content, tmp_path / "a.ckpt", **{place: Touch(tmp_path / "ran")})
    assert error_of(path, tmp_path).startswith("damaged, or made of Python objects: loading those could run")


@pytest.mark.parametrize(
    "hyper_parameters",
    [
        {"_instantiator": "os.system", "policy_config": TINY},
        {"_instantiator": "lightning.pytorch.cli.instantiate_module", "_class_path": "evil.Module"},
    ],
)
def test_hyper_parameters_name_no_code(content, tmp_path, monkeypatch, hyper_parameters):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    path = written(content, tmp_path / "a.ckpt", hyper_parameters=hyper_parameters)
    with pytest.raises(ValueError, match="blocked to prevent arbitrary code execution"):
        SFTModule.load_from_checkpoint(path)
    export_checkpoint(path, str(tmp_path / "out"))  # does not read them
    assert "evil" not in sys.modules


def without(state, name):
    return {key: value for key, value in state.items() if key != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: None, "state_dict: must be a dictionary with strings as keys, got NoneType"),
        (lambda state: without(state, EMBEDDING), "the weight transformer.wte.weight is missing"),
        (lambda state: {**state, "policy.x": torch.zeros(1)}, "the weight x belongs to no layer of its"),
        (lambda state: {**state, EMBEDDING: torch.zeros(2, 2)}, "the weight transformer.wte.weight has the"),
        (lambda state: {**state, EMBEDDING: "x"}, "the weight transformer.wte.weight is not a tensor"),
    ],
)
def test_weights_that_are_not_the_models(content, tmp_path, change, message):
    path = written(content, tmp_path / "a.ckpt", state_dict=change(content["state_dict"]))
    assert error_of(path, tmp_path).startswith(message)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("gpt2", "policy_config: must be a dictionary with strings as keys, got str"),
        ({"model_type": "os.system"}, "policy_config: model_type must be the name of an architecture"),
        ({**TINY, "n_positions": 100, "vocab_size": 239}, "the weight transformer.wpe.weight has"),
    ],
)
def test_configurations_that_are_not_the_models(content, tmp_path, config, message):
    path = written(content, tmp_path / "a.ckpt", **{loading.POLICY.config_key: config})
    assert error_of(path, tmp_path).startswith(message)


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ("x", "adapter: must be a dictionary with strings as keys, got str"),
        ({"r": 2, "megatron_config": {}, "megatron_core": "evil"}, "lora: megatron_config makes peft import"),
        ({"r": "two"}, "lora: "),
    ],
)
def test_adapters_that_are_none(content, tmp_path, adapter, message):
    path = written(content, tmp_path / "a.ckpt", **{loading.ADAPTER_KEY: adapter})
    assert error_of(path, tmp_path).startswith(message)


def test_a_file_is_read_once_until_another_is_in_its_place(content, tmp_path, monkeypatch):
    path, reads = str(tmp_path / "model.ckpt"), []
    read = checkpoints.read
    monkeypatch.setattr(checkpoints, "read", lambda *args, **kwargs: reads.append(1) or read(*args, **kwargs))
    torch.save(content, path)
    first, second = (loading.load_model("path", path).state_dict() for _ in range(2))
    assert loading.load_tokenizer("path", path).get_vocab() == grammar_tokenizer().get_vocab()
    assert (len(reads), equal(first, second)) == (1, True)
    name, size = "policy.transformer.ln_f.weight", os.path.getsize(path)
    other = content["state_dict"] | {name: content["state_dict"][name] + 1}
    torch.save(content | {"state_dict": other}, path)
    assert os.path.getsize(path) == size
    assert not equal(loading.load_model("path", path).state_dict(), first)
    assert len(reads) == 2


def test_only_checkpoints_of_a_warm_start_have_token_values(content, tmp_path):
    assert loading.load_token_values("policy_path", "gpt2") is None
    path = tmp_path / "plain.ckpt"
    assert loading.load_token_values("policy_path", written(content, path)) is None
    values = torch.arange(3.0)
    path = written(content, path, **{loading.TOKEN_VALUES_KEY: values})
    assert torch.equal(loading.load_token_values("policy_path", path), values)

"""Untrusted folders: their code is not run, and no weight is initialised at random."""

import builtins
import json
import os
import re
import shlex
import shutil
import sys
from functools import reduce
from pathlib import Path

import peft
import pytest
import torch
from pickles import Touch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from written import save

from lit_klrb.data.tokenizer import grammar_tokenizer
from lit_klrb.errors import ConfigurationError
from lit_klrb.models import loading
from lit_klrb.models.tokenizers import common_vocabulary
from lit_klrb.rewards import load_reward

TINY = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 16}
LAYER = "transformer.h.0.mlp.c_fc.weight"


def saved(folder, role):
    tokenizer = grammar_tokenizer()
    return save(folder, loading.fresh_model(TINY, tokenizer, seed=1, role=role), tokenizer)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("policy"), loading.POLICY)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("classifier"), loading.CLASSIFIER)


@pytest.fixture
def folder(policy, tmp_path):
    return shutil.copytree(policy, tmp_path / "copy")


@pytest.fixture(autouse=True)
def never_asked(monkeypatch):
    """Fail if transformers asks whether to run untrusted code."""
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("asked whether to run code"))


def refused(place, message, *loads):
    """Check that loaders, that of models unless others are given, refuse a place in one line."""
    for load in loads or (loading.load_model,):
        with pytest.raises(ConfigurationError, match=f"^key: {place}:? {message}"):
            load("key", str(place))


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_language_model_is_no_reward(policy, classifier):
    """Its head would be random, without an error."""
    assert load_reward(str(classifier))(["What a film!"]).isfinite().all()
    with pytest.raises(
        ConfigurationError, match=f"^reward_path: {policy}: not a classifier: it has no weights"
    ):
        load_reward(str(policy))


def test_a_classifier_is_no_policy(classifier):
    """Its language-model head is tied to the embedding, so no weight is missing."""
    refused(classifier, "not a policy: it has the weights of a classifier, score.weight$")


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({LAYER: None}, f"not a policy: it has no weights for {LAYER}"),
        ({LAYER: torch.zeros(3, 3)}, rf"the weight {LAYER} has the shape \[3, 3\]; its .* \[8, 32\]"),
    ],
    ids=["missing", "mismatched"],
)
def test_weights_that_are_not_there(folder, weights, message):
    changed = {**load_file(folder / "model.safetensors"), **weights}
    kept = {name: value for name, value in changed.items() if value is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    refused(folder, f"{message}$")


def test_an_index_names_files_of_its_folder_only(folder):
    weights = folder / "model.safetensors"
    elsewhere = weights.rename(folder.parent / "elsewhere.safetensors")
    os.mkfifo(folder.parent / "pipe")
    index = folder / "model.safetensors.index.json"
    for name in ("../elsewhere.safetensors", str(elsewhere), "../pipe", "lost.safetensors", 5, None, [1]):
        index.write_text(
            json.dumps({"metadata": {}, "weight_map": dict.fromkeys(load_file(elsewhere), name)})
        )
        refused(folder, f"{index.name} names {re.escape(repr(name))}, which is not")
    for content in ("{", "[1]", "{}", "[" * 100_000):
        index.write_text(content)
        refused(folder, f"{index.name} is not an index")
    elsewhere.rename(folder / "part.safetensors")
    names = dict.fromkeys(load_file(folder / "part.safetensors"), "part.safetensors")
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    loading.load_model("policy_path", str(folder))


def planted(folder, other):
    """Each way in which the files of a tokenizer can name another file."""
    settings = folder / "tokenizer_config.json"
    for key in ("vocab", "merges", "gguf_file", "anything"):
        yield settings, {"tokenizer_class": "BertTokenizer", key: other}
    yield settings, {"init_inputs": [other]}
    yield settings, {"sp_model_kwargs": {"model_file": other}}
    yield folder / "special_tokens_map.json", {"vocab_file": other}
    yield folder / "special_tokens_map.json", {"pad_token": {"content": other}}
    for key in ("vocab", "merges"):
        model = json.loads((folder / "tokenizer.json").read_text())["model"]
        yield folder / "tokenizer.json", {"model": {**model, key: other}}


def test_a_tokenizer_reads_no_other_files(folder):
    """They would become tokens, and a pipe would be waited for."""
    other = folder.parent / "other.txt"
    other.write_text("secret\n")
    link = folder.parent / "pipe"
    os.mkfifo(link)
    for place in (other, link):
        for path, change in planted(folder, str(place)):
            before = path.read_text() if path.exists() else None
            path.write_text(json.dumps({**json.loads(before or "{}"), **change}))
            message = f"its {path.name} names the file {place}: only its own are read"
            refused(folder, f"{message}$", loading.load_tokenizer)
            with pytest.raises(ConfigurationError, match=f"^{message}$"):
                loading.tokenizer_from_files({path.name: path.read_text()})
            path.unlink() if before is None else path.write_text(before)
    (folder / "special_tokens_map.json").write_text('{"vocab_file": "not_there.txt"}')
    refused(folder, ".*has vocab_file, which is no token", loading.load_tokenizer)


@pytest.mark.parametrize("templates", [{"../../x": "a"}, [{"name": "/x", "template": "a"}], {"": "a"}])
def test_a_template_is_named_by_a_word(folder, templates):
    """An export writes a file of that name."""
    edit(folder / "tokenizer_config.json", chat_template=templates)
    refused(folder, ".*has a chat template named", loading.load_tokenizer)


def test_a_link_to_a_file_elsewhere_is_not_read(folder, tmp_path):
    (folder / "vocab.txt").symlink_to("/etc/hostname")
    refused(folder, r"holds vocab\.txt, a link to a file elsewhere$", loading.load_tokenizer)
    (folder / "vocab.txt").unlink()
    # As in the cache of the hub, whose snapshots are links to contents
    snapshot, blobs = tmp_path / "models--a" / "snapshots" / "1f", tmp_path / "models--a" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(folder.iterdir()):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert len(loading.load_tokenizer("tokenizer_path", str(snapshot))) == len(grammar_tokenizer())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_attn_implementation": "theirs/kernel"}, "_attn_implementation: theirs/kernel is code to be"),
        ({"text_config": {"_experts_implementation": "a/b"}}, "_experts_implementation: a/b is code to be"),
    ],
)
def test_no_kernel_is_downloaded(folder, change, message):
    edit(folder / "config.json", **change)
    refused(folder, f".*({message})")


def test_no_layer_is_dropped(folder):
    weights = load_file(folder / "model.safetensors")
    more = {name.replace(".0.", ".1."): value.clone() for name, value in weights.items() if ".h.0." in name}
    save_file({**weights, **more}, folder / "model.safetensors", metadata={"format": "pt"})
    refused(folder, r"its configuration has no layer for the weight .*\.1\.")


def test_weights_cut_off(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused(folder, "cannot be loaded: ")


def test_pickled_weights_are_read_as_tensors_only(folder):
    (folder / "model.safetensors").unlink()
    torch.save({"transformer.wte.weight": Touch(folder / "ran")}, folder / "pytorch_model.bin")
    refused(folder, "cannot be loaded: ")
    assert not (folder / "ran").exists()


def test_code_beside_the_weights_is_not_run(folder, monkeypatch):
    (folder / "evil.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(folder)
    edit(folder / "config.json", auto_map={"AutoModelForCausalLM": "evil.M", "AutoConfig": "evil.C"})
    edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.T", None]})
    # transformers has this architecture, so its class is used.
    model, tokenizer = loading.load_model("key", str(folder)), loading.load_tokenizer("key", str(folder))
    assert "auto_map" not in loading.config_dict(model)
    assert "auto_map" not in loading.tokenizer_files(tokenizer)["tokenizer_config.json"]
    edit(folder / "config.json", model_type="theirs")
    edit(folder / "tokenizer_config.json", tokenizer_class="Theirs")
    for load in (loading.load_model, loading.load_tokenizer):
        with pytest.raises(ConfigurationError, match=f"^key: .*{folder}"):
            load("key", str(folder))
    assert "evil" not in sys.modules


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's
def test_an_adapter_is_merged_by_the_command_that_it_is_refused_with(folder, tmp_path, monkeypatch):
    """Loading it would download the model that it names."""
    settings = {"target_modules": "all-linear", "fan_in_fan_out": True, "init_lora_weights": False}
    base = AutoModelForCausalLM.from_pretrained(folder)
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, task_type="CAUSAL_LM", **settings)).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    with pytest.raises(
        ConfigurationError, match="this is an adapter; merge it into its model first"
    ) as error:
        loading.load_model("policy_path", str(tmp_path / "adapter"))
    _, _, code, *arguments = shlex.split(re.search("first: (python -c .*), and copy", str(error.value))[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["-c", *arguments])
    exec(code)
    for file in folder.glob("tokenizer*"):
        shutil.copy(file, "MERGED")
    tokens = loading.load_tokenizer("policy_path", "MERGED")("What a film!", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        found = loading.load_model("policy_path", "MERGED").eval()(tokens).logits
        assert torch.allclose(found, adapted(tokens).logits, atol=1e-5)
        assert not torch.allclose(found, loading.load_model("policy_path", str(folder)).eval()(tokens).logits)


class Binary:
    """A tokenizer with a binary model."""

    is_fast = False

    def save_pretrained(self, folder, **_):
        (Path(folder) / "spiece.model").write_bytes(b"\xff")


def test_a_tokenizer_that_no_checkpoint_can_carry_is_refused_before_training(folder, monkeypatch):
    monkeypatch.setattr(loading, "tokenizer_from_folder", lambda _: Binary())
    refused(folder, "'spiece.model' is not a file", loading.load_tokenizer)


@pytest.mark.parametrize(
    ("file", "place", "value", "message"),
    [
        ("tokenizer_config.json", ("model_max_length",), "many", "its tokenizer cannot be loaded: '>' not"),
    ],
)
def test_a_tokenizer_is_tried_before_it_is_used(folder, file, place, value, message):
    content = json.loads((folder / file).read_text())
    *above, last = place
    reduce(dict.__getitem__, above, content)[last] = value
    (folder / file).write_text(json.dumps(content))
    refused(folder, message, loading.load_tokenizer)


def test_a_pipe_is_not_waited_for(folder, tmp_path):
    os.mkfifo(tmp_path / "last.ckpt")
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    loads = loading.load_model, loading.load_tokenizer
    refused(tmp_path / "last.ckpt", "is not a file$", *loads)
    refused(folder, "holds config.json, which is neither a file nor a folder$", *loads)


def test_two_vocabularies_of_one_size_and_other_words():
    words = grammar_tokenizer().get_vocab()

    def check(others):
        return common_vocabulary("reference_path", "x", (words, 400), (others, 400))

    assert check(dict(words)) == check({**words, "<other>": len(words) + 1}) == (400, None)
    first, second = (next(word for word, index in words.items() if index == n) for n in (10, 11))
    difference = f"id 10 is '{second}' there and '{first}' in"
    message = f"^reference_path: x has another vocabulary than the policy: {difference}"
    with pytest.raises(ConfigurationError, match=message):
        check({**words, first: 11, second: 10})

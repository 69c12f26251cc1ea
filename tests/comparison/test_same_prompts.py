"""`validate` and `kl` measure the same KL of the same models on the same prompts."""

import json
import re

import pytest
import torch
from chat_tokenizer import chat_tokenizer
from written import save, write_rows

from lit_klrb.cli.main import main
from lit_klrb.models.loading import fresh_model

CONFIG = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 64}
PROMPTS = ["Good", "The film was", "It", "Do not miss"]


def test_validate_and_kl_read_the_same_tokens(chain, tmp_path, capsys, monkeypatch):
    """Of one token, whose KL is a sum over the vocabulary and the same for every completion."""
    tokenizer, models = chat_tokenizer(), {}
    assert tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id
    for seed, name in enumerate(("policy", "reference")):
        model = fresh_model(CONFIG, tokenizer, seed=seed).eval()
        with torch.no_grad():
            model.transformer.wte.weight.mul_(20)
        save(tmp_path / name, model, tokenizer)
        models[name] = model
    rows = {"train": ["x"], "validation": PROMPTS, "test": ["y"]}
    for split, texts in rows.items():
        write_rows(tmp_path / "prompts" / f"{split}.jsonl", ({"prompt": text} for text in texts))
    paths = [w for name in models for w in (f"--model.{name}_path", str(tmp_path / name))]
    source = ["--data.source", str(tmp_path / "prompts"), "--model.max_new_tokens", "1"]
    (tmp_path / "length_rewards.py").write_text(
        "def length(texts):\n    return [len(text) for text in texts]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    source += ["--model.reward_path", "length_rewards:length"]
    capsys.readouterr()
    assert chain.run("validate", "rloo", *paths, *source, run=tmp_path / "run") == 0
    (validated,) = re.findall(r"KL\(policy‖reference\) ([\d.]+)", capsys.readouterr().out)
    file = str(tmp_path / "prompts" / "validation.jsonl")
    paths = [w for name in models for w in (f"--{name}", str(tmp_path / name))]
    assert main(["kl", *paths, "--prompts", file, "--max_new_tokens", "1", "--json"]) == 0
    output = capsys.readouterr().out
    measured = json.loads(output)["directions"]["forward"]
    with torch.no_grad():
        by_hand = []
        for text in PROMPTS:
            ids = torch.tensor([tokenizer(text)["input_ids"]])
            p, q = (model(ids).logits[0, -1].double().log_softmax(-1) for model in models.values())
            by_hand.append((p.exp() * (p - q)).sum().item())
    expected = sum(by_hand) / len(by_hand)
    assert float(validated) == pytest.approx(expected, abs=1e-4)
    assert measured["estimates"]["Rao-Blackwell"]["sequence"]["estimate"] == pytest.approx(expected, abs=1e-4)

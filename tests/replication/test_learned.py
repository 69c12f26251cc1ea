"""A reward on hidden states: it learns, and one pass scores all beginnings."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lit_klrb.data.tokenizer import grammar_tokenizer
from replication import learned


def test_one_pass_scores_all_beginnings(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tokenizer = grammar_tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), num_hidden_layers=2, **sizes)
    LlamaForCausalLM(config).save_pretrained("model")
    tokenizer.save_pretrained("model")
    texts = [
        f"The {part} was {word}." for part in ("plot", "cast", "music") for word in ("hideous", "superb")
    ]
    table = pa.table({"text": texts * 50, "label": [0, 1] * 150})
    for name in ("train", "test"):
        pq.write_table(table, f"{name}.parquet")
    monkeypatch.setattr(learned, "SHARD", 128)
    learned.main(Path(), "model", tested=200)
    assert "first 512 tokens: right on 1.0000 of 200 test reviews" in capsys.readouterr().out
    prompts, answers = ["The plot", "The cast"], [" was superb. The music", " was hideous."]
    ids = [tokenizer(text).input_ids for text in answers]
    good, bad = learned.log_odds(prompts, answers, ids)
    assert good > 0 > bad
    cut = [row[:2] for row in ids]
    with monkeypatch.context() as patched:
        patched.setattr(learned.Reader, "means", None)  # no further pass
        kept = learned.log_odds(prompts, answers, cut)
    learned._KEPT.clear()
    assert kept == pytest.approx(learned.log_odds(prompts, answers, cut), rel=0.05, abs=0.05)

"""Mistakes in models: folders with a single error, or of another kind."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from re import escape

from mistakes.driver import Mistake

DEEP = 100_000
INDICES = {
    "list_index": [1],
    "empty_index": {},
    "pipe_index": {"metadata": {}, "weight_map": {"transformer.wte.weight": "../fifo.jsonl"}},
    "lost_index": {"metadata": {}, "weight_map": {"transformer.wte.weight": "nowhere.safetensors"}},
}
# A file of the folder, and what it holds instead; None for nothing.
FILES: dict[str, tuple[str, bytes | None]] = {
    "no_config": ("config.json", None),
    "torn_config": ("config.json", b"{"),
    "list_config": ("config.json", b"[]"),
    "deep_config": ("config.json", b'{"a": ' + b"[" * DEEP + b"]" * DEEP + b"}"),
    "latin1_config": ("config.json", '{"model_type": "caf\u00e9"}'.encode("latin-1")),
    "unknown_type": ("config.json", b'{"model_type": "nothing"}'),
    "no_weights": ("model.safetensors", None),
    "empty_weights": ("model.safetensors", b""),
    "torn_weights": ("model.safetensors", b""),
    "text_weights": ("model.safetensors", b"text"),
    "no_tokens": ("tokenizer.json", None),
    "torn_tokens": ("tokenizer.json", b"{"),
    "deep_tokens": ("tokenizer.json", b"[" * DEEP),
}


def make_models(root: Path, finished: Path) -> None:
    """Write folders of models with one error each, and a model with another tokenizer."""
    from lit_klrb.cli.export import export_checkpoint
    from lit_klrb.data.tokenizer import train_bpe
    from lit_klrb.models import loading

    export_checkpoint(str(finished / "sft" / "checkpoints" / "last.ckpt"), str(root / "model"))
    (root / "model" / "SHA256SUMS").unlink()  # it would refuse damaged weights before they are read
    bpe = train_bpe(["It was good."], 262)
    settings = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    loading.fresh_model(settings, bpe, 0).save_pretrained(root / "bpe_model")
    bpe.save_pretrained(root / "bpe_model")
    for name, (file, content) in FILES.items():
        shutil.copytree(root / "model", root / f"model_{name}")
        (root / f"model_{name}" / file).unlink()
        if content is not None:
            (root / f"model_{name}" / file).write_bytes(content)
    whole = (root / "model" / "model.safetensors").read_bytes()
    (root / "model_torn_weights" / "model.safetensors").write_bytes(whole[:5000])
    for name, index in INDICES.items():
        shutil.copytree(root / "model", root / f"model_{name}")
        (root / f"model_{name}" / "model.safetensors").unlink()
        (root / f"model_{name}" / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copytree(root / "model", root / "model_no_eos")
    path = root / "model_no_eos" / "tokenizer_config.json"
    tokens = {k: v for k, v in json.loads(path.read_text()).items() if k not in ("eos_token", "pad_token")}
    path.write_text(json.dumps(tokens))


def wrong_models() -> Iterator[Mistake]:
    """Folders as policies, references and rewards."""
    for name in (*FILES, "no_eos", *INDICES):
        line = rf"model\.init_args\.policy_path: .*FILES/model_{name}\b"
        yield Mistake(["--model.policy_path", f"FILES/model_{name}"], line)
    for name in ("empty", "a_file", "bpe_model"):
        line = rf"model\.init_args\.reference_path: .*FILES/{name}\b"
        yield Mistake(["--model.reference_path", f"FILES/{name}"], line)
    line = r"reward_path: .*FILES/model: not a classifier: it has no weights for score\.weight"
    yield Mistake(["--model.reward_path", "FILES/model"], line, quick=True)
    yield Mistake(["--model.reward_path", "FILES/checkpoint.pt"], r"reward_path: .*FILES/checkpoint\.pt\b")
    yield Mistake(
        ["--model.reward_path", "{grammar: 1, FILES/empty.ckpt: 1}"], r"reward_path: .*FILES/empty\.ckpt"
    )
    for path in ("/no/where", "no-such/hub-id", "a/b/c", "~nobody/x", ".", "x" * 5000, "a b", "grammar"):
        line = rf"model\.init_args\.policy_path: .*{escape(path[:50])}"
        yield Mistake(["--model.policy_path", path], line)

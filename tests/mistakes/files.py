"""Mistakes in files: missing, damaged, of other encodings, of another kind, or not to be written."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from re import escape

import torch

from mistakes.driver import Mistake

DEEP = 100_000


def review(text, label=1):
    return json.dumps({"text": text, "label": label}) + "\n"


TEXTS = "".join(review(f"The film was good {n}.", n % 2) for n in range(60))
DATA: dict[str, bytes] = {
    "empty.jsonl": b"",
    "blank_lines.jsonl": b"\n\n\n",
    "spaces.jsonl": b"   ",
    "one_row.jsonl": review("The film was good.").encode(),
    "latin1.jsonl": TEXTS.replace("good", "caf\u00e9").encode("latin-1"),
    "utf16.jsonl": TEXTS.encode("utf-16"),
    "bom.jsonl": TEXTS.encode("utf-8-sig"),
    "truncated.jsonl": TEXTS.encode()[:-20],
    "not_json.jsonl": b"The film was good.\n" * 5,
    "array.jsonl": b"[1, 2, 3]\n" * 5,
    "numbers.jsonl": b"1\n2\n",
    "deep.jsonl": b'{"text": ' + b"[" * DEEP + b"]" * DEEP + b"}\n",
    "binary.jsonl": bytes(range(256)) * 20,
    "nul.jsonl": b"\0" * 1000,
    "no_text.jsonl": b'{"txt": "a"}\n' * 5,
    "null_text.jsonl": b'{"text": null, "label": 1}\n' * 5,
    "number_text.jsonl": b'{"text": 5, "label": 1}\n' * 5,
    "list_text.jsonl": b'{"text": ["a"], "label": 1}\n' * 5,
    "label_5.jsonl": review("The film was good.", 5).encode() * 5,
    "label_text.jsonl": review("The film was good.", "positive").encode() * 5,
    "label_list.jsonl": review("The film was good.", [1]).encode() * 5,
    "label_nan.jsonl": b'{"text": "a film", "label": NaN}\n' * 5,
    "unlabelled.jsonl": b'{"text": "The film was good."}\n' * 60,
    "blank_texts.jsonl": "".join(review(" " * n) for n in range(60)).encode(),
    "surrogate.jsonl": b'{"text": "a \\ud800 film", "label": 1}\n' * 60,
    "long.jsonl": review("film " * 200_000).encode() * 2,
    "one_class.jsonl": "".join(review(f"The film was good {n}.") for n in range(60)).encode(),
    "empty.parquet": b"",
    "text.parquet": TEXTS.encode(),
    "no_chosen.jsonl": b'{"prompt": "The film", "rejected": "was bad"}\n' * 5,
    "null_chosen.jsonl": b'{"prompt": "The film", "chosen": null, "rejected": "was bad"}\n' * 5,
    "empty_prompt.jsonl": b'{"prompt": "", "chosen": "a", "rejected": "was bad"}\n' * 5,
    "chat.jsonl": b'{"prompt": [{"role": "user"}], "chosen": "a", "rejected": "b"}\n' * 5,
    "reviews.csv": b"text,label\ngood,1\n",
    "reviews.json": b'[{"text": "good", "label": 1}]',
    "a_file": b"a file\n",
}
CODE = {
    "wrong_import.py": b"import no_such_package\n",
    "wrong_syntax.py": b"def broken(:\n",
    "wrong_start.py": b"1 / 0\n",
}
CONFIGS: dict[str, bytes] = {
    "empty.yaml": b"",
    "null.yaml": b"null\n",
    "list.yaml": b"- 1\n- 2\n",
    "scalar.yaml": b"5\n",
    "text.yaml": b"just words\n",
    "latin1.yaml": "# caf\u00e9\nseed_everything: 0\n".encode("latin-1"),
    "utf16.yaml": "seed_everything: 0\n".encode("utf-16"),
    "bom.yaml": "seed_everything: 0\n".encode("utf-8-sig"),
    "tab.yaml": b"kl:\n\tbeta: 1\n",
    "truncated.yaml": b"kl: {beta: 1\n",
    "bad_indent.yaml": b"kl:\n    beta: 1\n  horizon: 5\n",
    "unresolved.yaml": b"kl:\n  beta: ${nothing}\n",
    "no_environment.yaml": b"data:\n  init_args:\n    source: ${oc.env:NO_SUCH_VARIABLE}\n",
    "no_resolver.yaml": b"kl:\n  beta: ${nothing:1}\n",
    "circular.yaml": b"kl:\n  beta: ${kl.final_beta}\n  final_beta: ${kl.beta}\n",
    "malformed.yaml": b"kl:\n  beta: ${\n",
    "missing_value.yaml": b"kl:\n  beta: ???\n",
    "unknown_key.yaml": b"kl:\n  betta: 1\n",
    "unknown_section.yaml": b"modell:\n  beta: 1\n",
    "duplicate.yaml": b"kl:\n  beta: 1\n  beta: 2\n",
    "null_model.yaml": b"model:\n",
    "null_data.yaml": b"data:\n",
    "null_trainer.yaml": b"trainer:\n",
    "number_trainer.yaml": b"trainer: 5\n",
    "number_model.yaml": b"model: 5\n",
    "list_model.yaml": b"model: [RLOOModule]\n",
    "no_class.yaml": b"model:\n  class_path: NoModule\n",
    "no_class_path.yaml": b"model:\n  init_args:\n    betta: 5\n",
    "number_key.yaml": b"5: 6\n",
    "bool_key.yaml": b"kl:\n  yes: 6\n",
    "python.yaml": b"kl:\n  beta: !!python/object/apply:os.getcwd []\n",
    "tag.yaml": b"kl:\n  beta: !nothing 5\n",
    "anchors.yaml": b"a: &a [x,x,x,x,x,x,x,x,x]\n"
    + b"".join(b"%c: &%c [%s]\n" % (98 + n, 98 + n, b",".join([b"*%c" % (97 + n)] * 9)) for n in range(9)),
    "deep.yaml": b"kl: " + b"{a: " * 3000 + b"1" + b"}" * 3000 + b"\n",
    "deep_list.yaml": b"kl: " + b"[" * DEEP + b"]" * DEEP + b"\n",
    "binary.yaml": bytes(range(256)),
    "nul.yaml": b"kl:\n  beta: 1\0\n",
    "two_documents.yaml": b"seed_everything: 0\n---\nseed_everything: 1\n",
    "nul_path.yaml": b'trainer:\n  default_root_dir: "a\\0b"\n',
    "date.yaml": b"kl:\n  beta: 2020-01-01\n",
    "words.yaml": b"kl:\n  beta: .nan\n",
    "wrong_type.yaml": b"kl:\n  beta: much\n",
    "json.yaml": b'{"kl": {"beta": "much"}}',
    "text_callbacks.yaml": b"trainer:\n  callbacks: [5]\n",
    "model_in_list.yaml": b"model:\n  class_path: [RLOOModule]\n",
    "args_list.yaml": b"model:\n  class_path: RLOOModule\n  init_args: [1]\n",
}
CHECKPOINTS: dict[str, bytes] = {
    "empty.ckpt": b"",
    "text.ckpt": b"no checkpoint\n",
    "zeros.ckpt": b"\0" * 5000,
    "binary.ckpt": bytes(range(256)) * 20,
    "pickle.ckpt": b"cos\nsystem\n(S'echo pwned >&2'\ntR.",
}


def make_files(root: Path, finished: Path) -> None:
    """Write every file that a mistake names.

    Args:
        root: The folder.
        finished: Finished runs, by stage.
    """
    root.mkdir(exist_ok=True)
    for name, content in {**DATA, **CODE, **CONFIGS, **CHECKPOINTS}.items():
        (root / name).write_bytes(content)
    for suffix in ("jsonl", "yaml", "ckpt", "parquet", "csv", "json"):
        (root / f"folder.{suffix}").mkdir(exist_ok=True)
        os.mkfifo(root / f"fifo.{suffix}")
        (root / f"dangling.{suffix}").symlink_to("nothing")
        (root / f"circle.{suffix}").symlink_to(f"circle.{suffix}")
    for folder, files in {
        "empty": {},
        "only_csv": {"train.csv": DATA["reviews.csv"]},
        "only_test": {"test.jsonl": TEXTS.encode()},
        "one_damaged": {"train.jsonl": TEXTS.encode(), "test.jsonl": b"{"},
        "empty_train": {"train.jsonl": b"", "test.jsonl": TEXTS.encode()},
        "same_texts": {"train.jsonl": TEXTS.encode(), "test.jsonl": TEXTS.encode()},
    }.items():
        (root / folder).mkdir()
        for name, content in files.items():
            (root / folder / name).write_bytes(content)
    (root / "taken").mkdir()
    (root / "taken" / "checkpoints").write_text("a file where a folder should be")
    (root / "odd_run").mkdir()
    for name in ("config.yaml", "summary.json", "metrics", "checkpoints/last.ckpt"):
        (root / "odd_run" / name).mkdir(parents=True)
    (root / "truncated.parquet").write_bytes(parquet()[:-20])
    make_checkpoints(root, finished)
    make_models(root, finished)


def parquet() -> bytes:
    """A whole Parquet file of reviews."""
    import pyarrow
    from pyarrow import parquet

    rows = [json.loads(line) for line in TEXTS.splitlines()]
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return sink.getvalue().to_pybytes()


def make_checkpoints(root: Path, finished: Path) -> None:
    """Checkpoints of the RLOO run, each with one thing wrong."""
    whole = finished / "rloo" / "checkpoints" / "last.ckpt"
    content = whole.read_bytes()
    (root / "truncated.ckpt").write_bytes(content[: len(content) // 2])
    (root / "no_end.ckpt").write_bytes(content[:-100])
    shutil.copy(whole, root / "checkpoint.pt")
    torch.save({}, root / "nothing.ckpt")
    torch.save([1, 2], root / "list.ckpt")
    torch.save(torch.zeros(3), root / "tensor.ckpt")

    def damaged(name, edit):
        checkpoint = torch.load(whole, weights_only=True)
        edit(checkpoint)
        torch.save(checkpoint, root / f"{name}.ckpt")

    key = "policy.transformer.wte.weight"
    damaged("no_state", lambda c: c.pop("state_dict"))
    damaged("text_state", lambda c: c.update(state_dict="text"))
    damaged("other_shape", lambda c: c["state_dict"].update({key: torch.zeros(2, 2)}))
    damaged("missing_weight", lambda c: c["state_dict"].pop(key))
    damaged("more_weights", lambda c: c["state_dict"].update({"policy.nothing": torch.zeros(2)}))
    damaged("text_weight", lambda c: c["state_dict"].update({key: "text"}))
    damaged("nan_weights", lambda c: c["state_dict"].update({key: c["state_dict"][key] * float("nan")}))
    damaged("no_tokenizer", lambda c: c.pop("tokenizer_files"))
    damaged("empty_tokenizer", lambda c: c.update(tokenizer_files={}))
    damaged("torn_tokenizer", lambda c: c["tokenizer_files"].update({"tokenizer.json": "{"}))
    damaged("text_tokenizer", lambda c: c.update(tokenizer_files="text"))
    damaged("no_type", lambda c: c["policy_config"].pop("model_type"))
    damaged("other_type", lambda c: c["policy_config"].update(model_type="llama"))
    damaged("text_config", lambda c: c.update(policy_config="text"))
    damaged("no_loops", lambda c: c.pop("loops"))
    damaged("no_step", lambda c: c.pop("global_step"))
    damaged("no_optimizer", lambda c: c.pop("optimizer_states"))
    damaged("no_version", lambda c: c.pop("pytorch-lightning_version"))
    damaged("no_callbacks", lambda c: c.pop("callbacks"))
    damaged("text_hyper_parameters", lambda c: c.update(hyper_parameters="text"))
    damaged("no_experience", lambda c: c.pop("experience"))
    damaged("text_experience", lambda c: c.update(experience="text"))
    damaged("two_experiences", lambda c: c.update(experience=c["experience"] * 2))
    damaged("text_step", lambda c: c.update(global_step="text"))


def make_models(root: Path, finished: Path) -> None:
    """Folders of models, each with one thing wrong; a model with another tokenizer."""
    from lit_klrb.cli.export import export_checkpoint
    from lit_klrb.data.tokenizer import train_bpe
    from lit_klrb.models import loading

    export_checkpoint(str(finished / "sft" / "checkpoints" / "last.ckpt"), str(root / "model"))
    bpe = train_bpe(["It was good."], 262)
    settings = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    loading.fresh_model(settings, bpe, 0).save_pretrained(root / "bpe_model")
    bpe.save_pretrained(root / "bpe_model")
    for name, file, content in (
        ("no_config", "config.json", None),
        ("torn_config", "config.json", b"{"),
        ("list_config", "config.json", b"[]"),
        ("deep_config", "config.json", b'{"a": ' + b"[" * DEEP + b"]" * DEEP + b"}"),
        ("latin1_config", "config.json", '{"model_type": "caf\u00e9"}'.encode("latin-1")),
        ("unknown_type", "config.json", b'{"model_type": "nothing"}'),
        ("no_weights", "model.safetensors", None),
        ("empty_weights", "model.safetensors", b""),
        ("torn_weights", "model.safetensors", (root / "model" / "model.safetensors").read_bytes()[:5000]),
        ("text_weights", "model.safetensors", b"text"),
        ("no_tokens", "tokenizer.json", None),
        ("torn_tokens", "tokenizer.json", b"{"),
        ("deep_tokens", "tokenizer.json", b"[" * DEEP),
    ):
        shutil.copytree(root / "model", root / f"model_{name}")
        (root / f"model_{name}" / file).unlink()
        if content is not None:
            (root / f"model_{name}" / file).write_bytes(content)
    shutil.copytree(root / "model", root / "model_no_eos")
    path = root / "model_no_eos" / "tokenizer_config.json"
    tokens = {k: v for k, v in json.loads(path.read_text()).items() if k not in ("eos_token", "pad_token")}
    path.write_text(json.dumps(tokens))


# What a source of reviews may say; the others are refused for what they hold.
FINE_DATA = {"bom.jsonl", "unlabelled.jsonl", "long.jsonl", "one_class.jsonl"}
NO_REVIEWS = {"no_chosen.jsonl", "null_chosen.jsonl", "empty_prompt.jsonl", "chat.jsonl", "a_file"}


def wrong_data() -> Iterator[Mistake]:
    """Each file as the source of reviews, some as preferences."""
    for name in (*DATA, "truncated.parquet"):
        if name not in NO_REVIEWS:
            line = None if name in FINE_DATA else rf"data\.init_args\.source: FILES/{escape(name)} "
            yield Mistake(["--data.source", f"FILES/{name}"], line)
    for kind in ("folder", "fifo", "dangling", "circle"):
        for suffix in ("jsonl", "parquet", "csv"):
            line = rf"data\.init_args\.source: FILES/{kind}\.{suffix} "
            yield Mistake(["--data.source", f"FILES/{kind}.{suffix}"], line)
    for name in ("empty", "only_csv", "only_test", "one_damaged", "empty_train", "same_texts", "a_file"):
        line = rf"data\.init_args\.source: FILES/{name} "
        yield Mistake(["--data.source", f"FILES/{name}"], line)
    for name in (
        "/dev/null",
        "/dev/zero",
        "/proc/self/mem",
        "no/such/hub/id",
        "no-such/hub-id",
        ".",
        "~",
        "x" * 5000,
    ):
        line = rf"data\.init_args\.source: {escape(name[:200])}"
        yield Mistake(["--data.source", name], line)
    for name in ("unlabelled", "empty", "label_5", "one_row"):
        line = rf"data\.init_args\.source: FILES/{name}\.jsonl "
        yield Mistake(["--data.source", f"FILES/{name}.jsonl"], line, "reward")
    for name in ("empty", "no_text", "latin1", "blank_texts", "one_row"):
        line = rf"data\.init_args\.source: FILES/{name}\.jsonl "
        yield Mistake(["--data.source", f"FILES/{name}.jsonl"], line, "sft")
    for name in (
        "empty",
        "no_chosen",
        "null_chosen",
        "empty_prompt",
        "chat",
        "truncated",
        "fifo",
        "folder",
        "deep",
    ):
        line = rf"data\.init_args\.preferences: FILES/{name}\.jsonl "
        yield Mistake(["--data.preferences", f"FILES/{name}.jsonl"], line, "dpo")


FINE_CONFIGS = {"empty.yaml", "null.yaml", "bom.yaml"}
IN_CONFIG = {
    "unresolved.yaml": "nothing",
    "no_environment.yaml": "NO_SUCH_VARIABLE",
    "no_resolver.yaml": "nothing",
    "circular.yaml": "kl",
    "malformed.yaml": r"kl|malformed",
    "missing_value.yaml": r"kl\.beta",
    "unknown_key.yaml": r"unknown key kl\.betta \(did you mean kl\.beta\?\)",
    "unknown_section.yaml": r"unknown key modell \(did you mean model\?\)",
    "null_model.yaml": r"^error: model: ",
    "null_data.yaml": r"^error: data: ",
    "null_trainer.yaml": r"^error: trainer: ",
    "number_trainer.yaml": r"^error: trainer: ",
    "number_model.yaml": r"^error: model: ",
    "list_model.yaml": r"^error: model: ",
    "no_class.yaml": r"^error: model: NoModule ",
    "no_class_path.yaml": r"unknown key model\.init_args\.betta",
    "number_key.yaml": r"5",
    "bool_key.yaml": r"kl",
    "nul_path.yaml": r"default_root_dir: ",
    "date.yaml": r"^error: kl\.beta: .*2020-01-01",
    "words.yaml": r"^error: kl\.beta.* .*nan",
    "wrong_type.yaml": r"^error: kl\.beta: 'much' is not",
    "json.yaml": r"^error: kl\.beta: 'much' is not",
    "text_callbacks.yaml": r"^error: trainer\.callbacks: .*5",
    "model_in_list.yaml": r"^error: model: ",
    "args_list.yaml": r"^error: model",
    "anchors.yaml": r"unknown key a|anchors\.yaml",
    "deep.yaml": r"kl|deep\.yaml",
}


def wrong_configs() -> Iterator[Mistake]:
    """Each file as a second configuration, on top of a whole one."""
    for name in CONFIGS:
        line = None if name in FINE_CONFIGS else IN_CONFIG.get(name, rf"FILES/{escape(name)}")
        yield Mistake(["--config", f"FILES/{name}"], line)
    for kind in ("folder", "fifo", "dangling", "circle"):
        yield Mistake(["--config", f"FILES/{kind}.yaml"], rf"FILES/{kind}\.yaml")
    for name in ("/dev/null/x", "/dev/zero", "/proc/self/mem", "x" * 5000):
        yield Mistake(["--config", name], escape(name[:100]))


STARTS = [
    "empty",
    "text",
    "zeros",
    "binary",
    "pickle",
    "truncated",
    "no_end",
    "nothing",
    "list",
    "tensor",
    "folder",
    "fifo",
    "dangling",
    "circle",
]
DAMAGED = [
    "no_state",
    "text_state",
    "other_shape",
    "missing_weight",
    "more_weights",
    "text_weight",
    "no_tokenizer",
    "empty_tokenizer",
    "torn_tokenizer",
    "text_tokenizer",
    "no_type",
    "other_type",
    "text_config",
    "nan_weights",
]
RESUMED = [
    "no_state",
    "other_shape",
    "missing_weight",
    "more_weights",
    "no_tokenizer",
    "torn_tokenizer",
    "no_type",
    "no_loops",
    "no_step",
    "no_optimizer",
    "no_version",
    "no_callbacks",
    "text_hyper_parameters",
    "no_experience",
    "text_experience",
    "two_experiences",
    "text_step",
]


def wrong_checkpoints() -> Iterator[Mistake]:
    """Each as the policy to start from, some as reference, as reward, and as the run to resume."""
    for name in (*STARTS, *DAMAGED):
        line = rf"model\.init_args\.policy_path: FILES/{name}\.ckpt "
        yield Mistake(["--model.policy_path", f"FILES/{name}.ckpt"], line)
    for key in ("reference_path", "reward_path"):
        for name in (*STARTS[::3], *DAMAGED[::3]):
            line = rf"model\.init_args\.{key}: FILES/{name}\.ckpt "
            yield Mistake([f"--model.{key}", f"FILES/{name}.ckpt"], line)
    for name in (*STARTS, *RESUMED):
        yield Mistake(["--ckpt_path", f"FILES/{name}.ckpt"], rf"^error: ckpt_path: FILES/{name}\.ckpt ")
    for command in ("validate", "test", "predict"):
        for name in ("truncated", "other_shape", "nothing", "fifo"):
            line = rf"^error: ckpt_path: FILES/{name}\.ckpt "
            yield Mistake(["--ckpt_path", f"FILES/{name}.ckpt"], line, command=command)
        yield Mistake(
            ["--ckpt_path", "/no/where.ckpt"], r"ckpt_path: /no/where\.ckpt does not exist", command=command
        )
    for stage in ("sft", "dpo", "reward"):
        other = "rloo" if stage != "rloo" else "sft"
        line = rf"^error: ckpt_path: CHAIN/{other}/checkpoints/last\.ckpt "
        yield Mistake(["--ckpt_path", f"CHAIN/{other}/checkpoints/last.ckpt"], line, stage)
    for path in ("best", "last", "hpc", "registry:x", "s3://bucket/x.ckpt", "", "~/none.ckpt", "FILES"):
        yield Mistake(["--ckpt_path", path], r"^error: ckpt_path: ")


MODELS = [
    "no_config",
    "torn_config",
    "list_config",
    "deep_config",
    "latin1_config",
    "unknown_type",
    "no_weights",
    "empty_weights",
    "torn_weights",
    "text_weights",
    "no_tokens",
    "torn_tokens",
    "deep_tokens",
    "no_eos",
]


def wrong_models() -> Iterator[Mistake]:
    """Folders as policies, references and rewards."""
    for name in MODELS:
        line = rf"model\.init_args\.policy_path: .*FILES/model_{name}\b"
        yield Mistake(["--model.policy_path", f"FILES/model_{name}"], line)
    for name in ("empty", "a_file", "bpe_model"):
        line = rf"model\.init_args\.reference_path: .*FILES/{name}\b"
        yield Mistake(["--model.reference_path", f"FILES/{name}"], line)
    yield Mistake(["--model.reward_path", "FILES/model"], r"reward_path: .*FILES/model\b.*classifier")
    yield Mistake(["--model.reward_path", "FILES/checkpoint.pt"], r"reward_path: .*FILES/checkpoint\.pt\b")
    yield Mistake(
        ["--model.reward_path", "{grammar: 1, FILES/empty.ckpt: 1}"], r"reward_path: .*FILES/empty\.ckpt"
    )
    for path in (
        "/no/where",
        "no-such/hub-id",
        "no-such-id",
        "a/b/c",
        "~nobody/x",
        ".",
        "x" * 5000,
        "a b",
        "grammar",
    ):
        line = rf"model\.init_args\.policy_path: .*{escape(path[:50])}"
        yield Mistake(["--model.policy_path", path], line)


def wrong_places() -> Iterator[Mistake]:
    """Run directories that cannot be."""
    for place in (
        "FILES/a_file",
        "FILES/a_file/run",
        "FILES/fifo.jsonl",
        "FILES/circle.jsonl",
        "FILES/taken",
        "/proc/nowhere",
        "/dev/null",
        "/dev/full/run",
        "/sys/run",
        "x" * 300,
    ):
        line = rf"^error: trainer\.default_root_dir: {escape(place[:100])}"
        for command in ("fit", "predict"):
            yield Mistake(["--trainer.default_root_dir", place], line, command=command)
    yield Mistake(["--trainer.default_root_dir", "FILES/odd_run"], None)

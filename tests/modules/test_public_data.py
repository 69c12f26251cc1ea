"""Files with the schemas of public data sets, and those of public bug reports, as the stages read them."""

import json
import re

import pytest
from chat_tokenizer import chat_tokenizer, message
from written import save, write_splits

from lit_klrb.cli.main import main
from lit_klrb.models.loading import CLASSIFIER, fresh_model

CONFIG = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 256}
CHAT = [message("user", "Is it even?"), message("assistant", "Yes.")]
PAIR = {"chosen": [CHAT[0], message("assistant", "No.")], "rejected": CHAT}
PROMPT = {"prompt": "Is it even?", "prompt_id": "a1"}
SCORES = {"score_chosen": 8.5, "score_rejected": 3.0}
# The stage, further arguments, and row number n; tests/data/test_public_sets.py has all sets
SCHEMAS = {
    "ultrafeedback_binarized": (
        "dpo",
        ["--data.split", "train_prefs", "--data.eval_split", "test_prefs"],
        lambda n: {
            **PROMPT,
            **{side: [message("user", f"Is {n} even?"), chat[1]] for side, chat in PAIR.items()},
            **SCORES,
            "prompt": f"Is {n} even?",
            "messages": [message("user", f"Is {n} even?"), PAIR["chosen"][1]],
        },
    ),
    "UltraChat": (
        "sft",
        ["--data.split", "train_sft", "--data.eval_split", "test_sft"],
        lambda n: {**PROMPT, "messages": [message("user", f"Is {n} even?"), CHAT[1], *CHAT]},
    ),
    "OpenAssistant": (
        "rloo",
        [],
        lambda n: {"messages": [message("user", f"Is {n} even?"), CHAT[1]], "lang": "en"},
    ),
    "preferences with scores": (
        "pairs",
        [],
        lambda n: {
            "instruction": "even",
            **{side: [message("user", f"Is {n} even?"), chat[1]] for side, chat in PAIR.items()},
            "chosen-rating": 4.0,
            "rejected-rating": 1.0,
        },
    ),
}
BEGUN, ASKED = "<bos>", "<bos><|user|>Is N even?<eos>\n<|assistant|>"
# The first row as the model reads it, with N for numbers and a bar before each answer: one BOS, one end
FIRST = {
    "ultrafeedback_binarized": f"{ASKED} | No.<eos> | Yes.<eos>",
    "UltraChat": f"{ASKED} | Yes.<eos>\n<|user|>Is it even?<eos>\n<|assistant|>Yes.<eos>",
    "OpenAssistant": f"{ASKED} |",
    "preferences with scores": f"{ASKED}No. | {ASKED}Yes.",
}
LONG = "so " * 90
# The stage, the rows, and what `check` says: what became of them, or the line that refuses them
REPORTS = {
    "360-LLaMA-Factory#26, AReno#216: max_new_tokens is no limit of given answers": (
        "dpo",
        [{"prompt": "Q0 ", "chosen": "Yes, it is even", "rejected": "Yes, it is odd"}],
        {"left_out": {}, "first": f"{BEGUN}QN  | Yes, it is even<eos> | Yes, it is odd<eos>"},
    ),
    "ms-swift#2955: nothing of a conversation is cut at 64 tokens": (
        "sft",
        [{"messages": [message("user", f"Q0 {LONG[:150]}"), message("assistant", "Yes.")]}],
        {"first": f"<bos><|user|>QN {LONG[:150]}<eos>\n<|assistant|> | Yes.<eos>"},
    ),
    "ms-swift#2955: an answer that does not fit is left out": (
        "sft",
        [{"prompt": "Q0 ", "completion": answer} for answer in ("Yes.", "No.", LONG)],
        {"rows": 3, "left_out": {"longer than max_tokens=256": 1}, "cut": 0},
    ),
    "trl#1311: a pair without a difference is left out": (
        "dpo",
        [{"prompt": "Q0 ", "chosen": "Yes", "rejected": answer} for answer in ("Yes", "No", "no")],
        {"rows": 3, "left_out": {"chosen equals rejected": 1}},
    ),
    "trl#1311: all pairs are without a difference": (
        "dpo",
        [{"prompt": "Q0 ", "chosen": "Yes", "rejected": "Yes"}] * 3,
        "3 of 3 train rows cannot be read: 3 chosen equals rejected",
    ),
    "one overlong prompt is left out": (
        "rloo",
        [{"prompt": prompt} for prompt in ("Q0 ", "Q01", "Q02", f"Q0 {LONG}")],
        {"rows": 4, "left_out": {"longer than the policy's context length=256": 1}},
    ),
    "tool calls have no content, and parts of text are a text": (
        "sft",
        [
            {
                "messages": [
                    message("user", [{"type": "text", "text": "Q0 "}, {"type": "text", "text": "+ 2?"}]),
                    {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]},
                    message("tool", "4"),
                    message("assistant", "It is 4."),
                ]
            }
        ],
        {
            # The template writes nothing of the calls
            "first": "<bos><|user|>QN + N?<eos>\n<|assistant|><eos>\n<|tool|>N<eos>\n"
            "<|assistant|> | It is N.<eos>"
        },
    ),
    "prompts that are all equal": (
        "rloo",
        "Q0",
        "its splits: train; one in 20 of its different prompts or texts (1) is held out for it",
    ),
}
KINDS = {
    "sft": ("SFTModule", "TextDataModule", ["policy_path"], "policy"),
    "dpo": ("DPOModule", "PreferenceDataModule", ["reference_path"], "policy"),
    "rloo": ("RLOOModule", "PromptDataModule", ["policy_path", "reference_path"], "policy"),
    "pairs": ("PairwiseRewardModule", "TextPairDataModule", ["classifier_path"], "classifier"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A policy and a classifier whose tokenizer has a chat template."""
    root = tmp_path_factory.mktemp("models")
    for name, settings in (("policy", {}), ("classifier", {"role": CLASSIFIER})):
        tokenizer = chat_tokenizer()
        save(root / name, fresh_model(CONFIG, tokenizer, seed=0, **settings), tokenizer)
    return root


def arguments(models, stage, source, run):
    """Those of fit."""
    module, data, paths, model = KINDS[stage]
    argv = ["--model", module, "--data", data, "--data.source", str(source)]
    argv += [word for path in paths for word in (f"--model.{path}", str(models / model))]
    if stage in ("dpo", "rloo"):
        argv += ["--model.reward_path", str(models / "classifier"), "--model.max_new_tokens", "4"]
        argv += ["--model.beta", "0.1"] if stage == "dpo" else ["--kl.beta", "0.1"]
    if stage == "dpo":
        argv += ["--data.preferences", str(source)]
    argv += ["--data.train_size", "0", "--data.batch_size", "2", "--data.eval_size", "2"]
    argv += ["--trainer.max_steps", "1", "--trainer.val_check_interval", "1", "--trainer.accelerator", "cpu"]
    return [*argv, "--trainer.default_root_dir", str(run), "--trainer.enable_progress_bar", "false"]


def checked(argv, capsys):
    """What `check` says of the rows."""
    assert main(["check", *argv, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["rows"]
    return shown | {"first": re.sub(r"\d+", "N", shown["first"])}


@pytest.mark.parametrize("name", REPORTS)
def test_what_public_reports_were_of(models, tmp_path, capsys, name):
    stage, rows, expected = REPORTS[name]
    source = tmp_path / "data"
    source.mkdir()
    if isinstance(rows, str):  # a file alone
        source /= "train.jsonl"
        source.write_text("\n".join([json.dumps({"prompt": rows})] * 40))
    else:
        for number, split in enumerate(("train", "validation", "test")):
            lines = [
                json.dumps(row).replace("Q0", f"Q{number}") for row in rows[: None if number == 0 else 1]
            ]
            (source / f"{split}.jsonl").write_text("\n".join(lines))
    argv = arguments(models, stage, source, tmp_path / "run")
    if isinstance(expected, dict):
        shown = checked(argv, capsys)
        assert {key: shown[key] for key in expected} == expected
    else:
        assert main(["check", *argv]) == 2
        assert expected in capsys.readouterr().err.strip().splitlines()[-1]


ASKING, NO = message("user", "Is N even?"), message("assistant", "No.")
# Rows whose last column can be without a value
COMPLETE = [
    ("sft", {"text": "N is even"}),
    ("sft", {"prompt": "N", "completion": "Yes."}),
    ("sft", {"completion": "Yes.", "prompt": "N"}),
    ("sft", {"question": "N", "answer": "Yes."}),
    ("sft", {"instruction": "N", "input": "", "output": "Yes."}),
    ("sft", {"messages": [ASKING, CHAT[1]]}),
    ("sft", {"conversations": [ASKING, CHAT[1]]}),
    ("rloo", {"prompt": "N"}),
    ("rloo", {"messages": [ASKING, CHAT[1]]}),
    ("dpo", {"prompt": "N", "chosen": "Yes", "rejected": "No"}),
    ("dpo", {"prompt": [ASKING], "chosen": [CHAT[1]], "rejected": [NO]}),
    ("pairs", {"prompt": "N", "rejected": "Yes", "chosen": "No"}),
    ("pairs", {"rejected": [ASKING, CHAT[1]], "chosen": [ASKING, NO]}),
]


@pytest.mark.parametrize(("stage", "row"), COMPLETE)
def test_a_row_without_a_value_is_counted_as_empty(models, tmp_path, capsys, stage, row):
    def split(numbers):
        return [json.loads(json.dumps(row).replace("N", str(number))) for number in numbers]

    train = [*split(range(3)), {**row, [*row][-1]: None}]
    folder = write_splits(tmp_path / "data", train=train, validation=split([3]), test=split([4]))
    shown = checked(arguments(models, stage, folder, tmp_path / "run"), capsys)
    assert (shown["rows"], shown["left_out"]) == (4, {"empty": 1})


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_public_data_set_runs_as_it_is(models, tmp_path, capsys, name):
    stage, extra, row = SCHEMAS[name]
    named = dict(zip(extra[::2], extra[1::2], strict=True))
    splits = (named.get("--data.split", "train"), named.get("--data.eval_split", "test"))
    numbers = range(120), range(120, 124)
    folder = write_splits(tmp_path / "data", **{s: map(row, n) for s, n in zip(splits, numbers, strict=True)})
    argv = [*arguments(models, stage, folder, tmp_path / "run"), *extra]
    assert checked(argv, capsys)["first"] == FIRST[name]
    assert main(["fit", *argv]) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["final"]

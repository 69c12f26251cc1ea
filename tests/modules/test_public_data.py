"""Files with the schemas of public data sets run through their stages as they are."""

import json

import pytest
from chat_tokenizer import chat_tokenizer, message

from lit_klrb.cli.main import main
from lit_klrb.models.loading import CLASSIFIER, fresh_model

CONFIG = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 256}
CHAT = [message("user", "Is it even?"), message("assistant", "Yes.")]
PAIR = {"chosen": [CHAT[0], message("assistant", "No.")], "rejected": CHAT}
PROMPT = {"prompt": "Is it even?", "prompt_id": "a1"}
SCORES = {"score_chosen": 8.5, "score_rejected": 3.0}
DIALOGUE = "\n\nHuman: Is {} even?\n\nAssistant: "
# The stage, further arguments, and row number n
SCHEMAS = {
    "gsm8k": ("sft", [], lambda n: {"question": f"What is 2 + {n}?", "answer": f"It is\n#### {n + 2}"}),
    "hh-rlhf": (
        "dpo",
        [],
        lambda n: {"chosen": f"{DIALOGUE.format(n)}I think so.", "rejected": f"{DIALOGUE.format(n)}No!"},
    ),
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
    "tldr": (
        "rloo",
        [],
        lambda n: {"prompt": f"SUBREDDIT: r/{n}\n\nPOST: long\n\nTL;DR:", "completion": " short", "id": n},
    ),
    "Capybara": (
        "sft",
        [],
        lambda n: {
            "source": "Airoboros",
            "conversation": [
                {"input": f"Is {n} even?", "output": "Yes."},
                {"input": "Why?", "output": "So"},
            ],
        },
    ),
    "OpenAssistant": (
        "rloo",
        [],
        lambda n: {"messages": [message("user", f"Is {n} even?"), CHAT[1]], "lang": "en"},
    ),
    "ShareGPT": (
        "sft",
        [],
        lambda n: {
            "id": str(n),
            "conversations": [
                {"from": "system", "value": "Be brief."},
                {"from": "human", "value": f"Is {n} even?"},
                {"from": "gpt", "value": "Yes."},
            ],
        },
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
    "instructions": (
        "sft",
        [],
        lambda n: {"instruction": "Double it.", "input": str(n), "output": str(2 * n), "text": None},
    ),
}
KINDS = {
    "sft": ("SFTModule", "ReviewDataModule", ["policy_path"], "policy"),
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
        fresh_model(CONFIG, tokenizer, seed=0, **settings).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return root


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_public_data_set_runs_as_it_is(models, tmp_path, name):
    stage, extra, row = SCHEMAS[name]
    named = dict(zip(extra[::2], extra[1::2], strict=True))
    splits = (named.get("--data.split", "train"), named.get("--data.eval_split", "test"))
    folder = tmp_path / "data"
    folder.mkdir()
    for split, numbers in ((splits[0], range(120)), (splits[1], range(120, 124))):
        (folder / f"{split}.jsonl").write_text("\n".join(json.dumps(row(number)) for number in numbers))
    module, data, paths, model = KINDS[stage]
    argv = ["--model", module, "--data", data, "--data.source", str(folder), *extra]
    argv += [word for path in paths for word in (f"--model.{path}", str(models / model))]
    if stage in ("dpo", "rloo"):
        argv += ["--model.reward_path", str(models / "classifier"), "--model.max_new_tokens", "4"]
        argv += ["--model.beta", "0.1"] if stage == "dpo" else ["--kl.beta", "0.1"]
    if stage == "dpo":
        argv += ["--data.preferences", str(folder)]
    argv += ["--data.train_size", "0", "--data.batch_size", "2", "--data.eval_size", "2"]
    argv += ["--trainer.max_steps", "1", "--trainer.val_check_interval", "1", "--trainer.accelerator", "cpu"]
    argv += ["--trainer.default_root_dir", str(tmp_path / "run"), "--trainer.enable_progress_bar", "false"]
    assert main(["fit", *argv]) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["final"]

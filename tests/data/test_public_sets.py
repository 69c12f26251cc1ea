"""Public data sets by their published columns: each is read right, or refused with the line to add.

Three rows of each, in .parquet as the hub stores them. What is shown is what `check` shows.
"""

import re
from types import SimpleNamespace

import pytest
from chat_tokenizer import chat_tokenizer, message
from pyarrow import Table, parquet

from lit_klrb.data.modules import (
    LabelledTextDataModule,
    PreferenceDataModule,
    PromptDataModule,
    TextDataModule,
    TextPairDataModule,
)
from lit_klrb.errors import ConfigurationError

ASK, YES, NO = message("user", "Is N even?"), message("assistant", "Yes."), message("assistant", "No.")
CHAT = [ASK, YES]
PAIR = {"chosen": CHAT, "rejected": [ASK, NO]}
SHARED = [{"from": "human", "value": "Is N even?"}, {"from": "gpt", "value": "Yes."}]
SYSTEM = {"from": "system", "value": "Be brief."}
DIALOGUE = "\n\nHuman: Is N even?\n\nAssistant:"
MATH = {"problem": "What is N + 2?", "solution": "It is N."}
ORCA = {"chosen": "N is not even.", "rejected": "N is even."}
ALPACA = {"instruction": "Double it.", "input": "N", "output": "N."}
# What is read of them: special tokens, and a bar before each answer
ASKED, BRIEF = "<|user|>Is N even?<eos>\n<|assistant|>", "<|system|>Be brief.<eos>\n"
SFT, DPO = f"<bos>{ASKED} | Yes.<eos>", f"<bos>{ASKED} | Yes.<eos> | No.<eos>"
PROMPT, TWO = f"<bos>{ASKED} |", f"<bos>{ASKED}Yes. | <bos>{ASKED}No."
GUESSED = "N is not even.<eos> | N is even.<eos>"
DOUBLE, SUM = "<bos>Double it.\n\nN\n\n | N.<eos>", "<bos>What is N + N? | It is N.<eos>"
OFFER = "add --data.columns '{{{}}}'"
BETTER = f"{OFFER.format('chosen: COLUMN, rejected: COLUMN')}, or write both if another column has the choice"
SAYS = {"converted", "not read"}
# Stage, a row, the columns to add, what is shown or the line that refuses, and what else is said
# fmt: off
SETS = {
    "Anthropic/hh-rlhf": ("dpo", {"chosen": f"{DIALOGUE} Yes.", "rejected": f"{DIALOGUE} No."},
        f"<bos>{DIALOGUE} |  Yes.<eos> |  No.<eos>", "what both have up to the last 'Assistant:'"),
    "Anthropic/hh-rlhf as pairs": ("pairs", {"chosen": f"{DIALOGUE} Yes.", "rejected": f"{DIALOGUE} No."},
        f"<bos>{DIALOGUE} Yes. | <bos>{DIALOGUE} No.", "what both have up to the last 'Assistant:'"),
    "HuggingFaceH4/ultrafeedback_binarized": ("dpo",
        {"prompt": "Is N even?", "prompt_id": "a", **PAIR, "messages": CHAT, "score_chosen": 8.5}, DPO,
        "not read: prompt_id, messages, score_chosen"),
    "HuggingFaceH4/ultrafeedback_binarized, train_sft": ("sft",
        {"prompt": "Is N even?", "prompt_id": "a", **PAIR, "messages": CHAT, "score_chosen": 8.5}, SFT,
        "not read: prompt, prompt_id, chosen, rejected, score_chosen"),
    "trl-lib/ultrafeedback_binarized": ("dpo", {**PAIR, "score_chosen": 8.5, "score_rejected": 3.0},
        DPO, "not read: score_chosen, score_rejected"),
    "argilla/dpo-mix-7k": ("dpo", {"dataset": "a", **PAIR, "chosen_rating": 5.0, "rejected_rating": 1.0},
        DPO, "not read: dataset"),
    "mlabonne/orpo-dpo-mix-40k": ("dpo",
        {"source": "a", **PAIR, "prompt": "Is N even?", "question": "Is N even?"}, DPO,
        "not read: source, question"),
    "allenai/llama-3.1-tulu-3-8b-preference-mixture": ("dpo",
        {"id": "a", "source": "b", "prompt": "Is N even?", **PAIR, "chosen_model": "c"}, DPO,
        "not read: id, source, chosen_model"),
    "Skywork/Skywork-Reward-Preference-80K-v0.2": ("pairs", {**PAIR, "source": "a"}, TWO, "not read: source"),
    "HuggingFaceH4/ultrachat_200k": ("sft", {"prompt": "Is N even?", "prompt_id": "a", "messages": CHAT},
        SFT, "not read: prompt, prompt_id"),
    "HuggingFaceH4/ultrachat_200k, train_gen": ("rloo",
        {"prompt": "Is N even?", "prompt_id": "a", "messages": CHAT}, PROMPT, None),
    "trl-lib/tldr": ("sft", {"prompt": "POST: N\n\nTL;DR:", "completion": " N."},
        "<bos>POST: N\n\nTL;DR: |  N.<eos>", None),
    "trl-lib/tldr, RLOO": ("rloo", {"prompt": "POST: N\n\nTL;DR:", "completion": " N."},
        "<bos>POST: N\n\nTL;DR: |", None),
    "CarperAI/openai_summarize_comparisons": ("dpo",
        {"prompt": "POST: N", "chosen": "TL;DR: N.", "rejected": "TL;DR: no."},
        "<bos>POST: N | TL;DR: N.<eos> | TL;DR: no.<eos>", None),
    "openai/gsm8k": ("sft", {"question": "What is N + 2?", "answer": "It is\n#### N"},
        "<bos>What is N + N?\n\n | It is\n#### N<eos>", "question and answer are prompt and completion"),
    "openai/gsm8k, RLOO with a system prompt": ("rloo",
        {"question": "Is N even?", "answer": "#### N"}, f"<bos>{BRIEF}{ASKED} |",
        "question and answer are prompt and completion", {"system_prompt": "Be brief."}),
    "tatsu-lab/alpaca": ("sft", {**ALPACA, "text": "Below is an instruction. ### Response: N."},
        DOUBLE, "instruction, input and output are prompt and completion"),
    "yahma/alpaca-cleaned": ("sft", ALPACA,
        DOUBLE, "instruction, input and output are prompt and completion"),
    "TIGER-Lab/MathInstruct": ("sft", {"source": "a", "output": "N.", "instruction": "Double N."},
        "<bos>Double N.\n\n | N.<eos>", "not read: source"),
    "WizardLMTeam/WizardLM_evol_instruct_70k": ("sft", {"instruction": "Double N.", "output": "N."},
        "<bos>Double N.\n\n | N.<eos>", "instruction and output are prompt and completion"),
    "timdettmers/openassistant-guanaco": ("sft", {"text": "### Human: Is N even?### Assistant: Yes."},
        " | <bos>### Human: Is N even?### Assistant: Yes.<eos>", None),
    "OpenAssistant/oasst_top1_2023-08-25": ("sft", {"text": "Is N even?"}, " | <bos>Is N even?<eos>", None),
    "roneneldan/TinyStories": ("sft", {"text": "Once N."}, " | <bos>Once N.<eos>", None),
    "Salesforce/wikitext": ("sft", {"text": " = N = \n"}, " | <bos>= N =<eos>", "are repaired"),
    "allenai/tulu-3-sft-mixture": ("sft", {"id": "a", "messages": CHAT, "source": "b"},
        SFT, "not read: id, source"),
    "HuggingFaceH4/no_robots": ("sft",
        {"prompt": "Is N even?", "prompt_id": "a", "messages": CHAT, "category": "b"}, SFT,
        "not read: prompt, prompt_id, category"),
    "HuggingFaceTB/smoltalk": ("sft", {"messages": CHAT, "source": "a"}, SFT, "not read: source"),
    "AI-MO/NuminaMath-CoT": ("sft", {"source": "a", **MATH, "messages": CHAT},
        SFT, "not read: source, problem, solution"),
    "open-r1/OpenR1-Math-220k": ("sft",
        {**MATH, "answer": "N", "generations": ["N"], "correctness_count": 1, "messages": CHAT}, SFT,
        "not read: problem, solution, answer, generations, correctness_count"),
    "allenai/RLVR-GSM": ("rloo", {"messages": [ASK], "ground_truth": "N", "dataset": "a"}, PROMPT, None),
    "AI-MO/NuminaMath-TIR": ("rloo", {**MATH, "messages": CHAT}, PROMPT, None),
    "BytedTsinghua-SIA/DAPO-Math-17k": ("rloo",
        {"data_source": "a", "prompt": [ASK], "reward_model": {"ground_truth": "N", "style": "rule"}},
        PROMPT, None),
    "Open-Orca/SlimOrca": ("sft",
        {"conversations": [SYSTEM, {**SHARED[0], "weight": 0}, {**SHARED[1], "weight": 1}]},
        f"<bos>{BRIEF}{ASKED} | Yes.<eos>", "conversations are messages"),
    "LDJnr/Capybara": ("sft", {"source": "a", "conversation": [{"input": "Is N even?", "output": "Yes."}]},
        SFT, "conversation is messages"),
    "BAAI/Infinity-Instruct": ("sft",
        {"id": 1, "conversations": SHARED, "label": {"ability_en": ["a"]}, "langdetect": "en"}, SFT,
        "not read: id, label, langdetect"),
    "NousResearch/hermes-function-calling-v1": ("sft",
        {"id": "a", "conversations": [SYSTEM, *SHARED], "tools": "[]", "category": "b"},
        f"<bos>{BRIEF}{ASKED} | Yes.<eos>", "not read: id, category"),
    "teknium/OpenHermes-2.5": ("sft",
        {"custom_instruction": None, "conversations": SHARED, "system_prompt": "Be brief.", "source": "a"},
        f"<bos>{BRIEF}{ASKED} | Yes.<eos>", "not read: source"),
    "Team-ACE/ToolACE": ("sft",
        {"system": "Be brief.",
        "conversations": [{**SHARED[0], "from": "user"}, {**SHARED[1], "from": "assistant"}]},
        f"<bos>{BRIEF}{ASKED} | Yes.<eos>", "conversations are messages"),
    "Intel/orca_dpo_pairs": ("dpo", {"system": "", "question": "Is N even?", **ORCA},
        f"<bos>{ASKED} | {GUESSED}", "question is the prompt"),
    "Intel/orca_dpo_pairs as pairs": ("pairs", {"system": "Be brief.", "question": "Is N even?", **ORCA},
        f"<bos>{BRIEF}{ASKED}N is not even. | <bos>{BRIEF}{ASKED}N is even.", "question is the prompt"),
    "argilla/distilabel-intel-orca-dpo-pairs": ("dpo",
        {"system": "Be brief.", "input": "Is N even?", **ORCA, "rating": [9.0, 1.0], "status": "unchanged"},
        f"<bos>{BRIEF}{ASKED} | {GUESSED}", "input is the prompt"),
    "argilla/distilabel-intel-orca-dpo-pairs as pairs": ("pairs",
        {"system": "Be brief.", "input": "Is N even?", **ORCA, "rating": [9.0, 1.0], "status": "unchanged"},
        f"<bos>{BRIEF}{ASKED}N is not even. | <bos>{BRIEF}{ASKED}N is even.", "not read: rating, status"),
    "stanfordnlp/imdb": ("labels", {"text": "Good N.", "label": 1}, "<bos>Good N. | N", None),
    "HuggingFaceH4/MATH-500": ("rloo", {**MATH, "answer": "N", "subject": "a", "level": 2},
        OFFER.format("prompt: problem"), "<bos>What is N + N? |"),
    "HuggingFaceH4/MATH-500, SFT": ("sft", {**MATH, "answer": "N", "subject": "a", "level": 2},
        OFFER.format("prompt: problem, completion: solution"), SUM),
    "EleutherAI/hendrycks_math": ("rloo", {**MATH, "level": "a"},
        OFFER.format("prompt: problem"), "<bos>What is N + N? |"),
    "EleutherAI/hendrycks_math, SFT": ("sft", {**MATH, "level": "a", "type": "b"},
        OFFER.format("prompt: problem, completion: solution"), SUM),
    "agentica-org/DeepScaleR-Preview-Dataset": ("rloo", {**MATH, "answer": "N"},
        OFFER.format("prompt: problem"), "<bos>What is N + N? |"),
    "databricks/databricks-dolly-15k": ("sft",
        {"instruction": "Double it.", "context": "N", "response": "N.", "category": "a"},
        OFFER.format("completion: response"), DOUBLE),
    "meta-math/MetaMathQA": ("sft",
        {"type": "a", "query": "What is N + 2?", "original_question": "b", "response": "It is N."},
        OFFER.format("prompt: query, completion: response"), SUM),
    "m-a-p/CodeFeedback-Filtered-Instruction": ("sft",
        {"query": "What is N + 2?", "answer": "It is N.", "resource": "a", "lang": "b"},
        OFFER.format("prompt: query, completion: answer"), SUM),
    "Salesforce/xlam-function-calling-60k": ("sft",
        {"id": 1, "query": "What is N + 2?", "answers": "It is N.", "tools": "[]"},
        OFFER.format("prompt: query, completion: answers"), SUM),
    "openbmb/UltraFeedback": ("dpo",
        {"source": "a", "instruction": "N?", "completions": [{"response": "Yes."}, {"response": "No."}]},
        BETTER, None),
    "openai/summarize_from_feedback": ("dpo",
        {"info": {"post": "N"}, "summaries": [{"text": "a"}, {"text": "b"}], "choice": 1}, BETTER, None),
    "PKU-Alignment/PKU-SafeRLHF": ("dpo",
        {"prompt": "N?", "response_0": "a", "response_1": "b", "better_response_id": 1}, BETTER, None),
    "stingning/ultrachat": ("sft", {"id": "a", "data": ["Is N even?", "Yes."]},
        OFFER.format("messages: data"), SFT),
    "glaiveai/glaive-function-calling-v2": ("sft",
        {"system": "SYSTEM: Be.", "chat": "USER: N?\n\n\nASSISTANT: Yes."}, OFFER.format("text: chat"),
        " | <bos>USER: N?\n\n\nASSISTANT: Yes.<eos>"),
}
# fmt: on
KINDS = {
    "sft": TextDataModule,
    "rloo": PromptDataModule,
    "dpo": PreferenceDataModule,
    "pairs": TextPairDataModule,
    "labels": LabelledTextDataModule,
}


def numbered(value, number):
    """A row with numbers in place of N."""
    if isinstance(value, dict):
        return {name: numbered(part, number) for name, part in value.items()}
    if isinstance(value, list):
        return [numbered(part, number) for part in value]
    return re.sub(r"\bN\b", str(number), value) if isinstance(value, str) else value


@pytest.fixture(scope="module")
def learner():
    return SimpleNamespace(tokenizer=chat_tokenizer(), trained=SimpleNamespace(config=None))


def read(learner, stage, source, **settings):
    """The first row as the model reads it, with N for numbers."""
    preferences = {"preferences": source} if stage == "dpo" else {}
    if stage == "dpo":
        settings["source"] = "grammar"
    data = KINDS[stage](**{"source": source, "eval_size": 1, **preferences, **settings})
    examples = data.preview(learner) if stage != "dpo" else only_pairs(data, learner)
    return re.sub(r"\d+", "N", examples["first"]).rstrip(" ")


def only_pairs(data, learner):
    """Without the evaluation's prompts, which are the embedded world's."""
    data._preview = learner
    data.rows["train"] = data.load("train")
    return {"first": data.visible(data.examples("train")[0])}


@pytest.mark.parametrize("name", SETS)
def test_a_public_data_set_is_read_right_or_refused_with_the_line_to_add(learner, tmp_path, caplog, name):
    stage, row, expected, said, *more = SETS[name]
    (tmp_path / "data").mkdir()
    rows = Table.from_pylist([numbered(row, number) for number in range(10, 13)])
    parquet.write_table(rows, tmp_path / "data" / "train-00000-of-00001.parquet")
    settings = more[0] if more else {}
    if expected.startswith("add "):
        with pytest.raises(ConfigurationError) as refused:
            read(learner, stage, str(tmp_path))
        assert expected in str(refused.value)
        assert all(column in str(refused.value) for column in row)
        if said is None:
            return
        line = re.search(r"'\{(.*)\}'", expected)[1]
        settings = {"columns": dict(part.split(": ") for part in line.split(", "))}
        expected, said = said, None
    assert read(learner, stage, str(tmp_path), **settings) == expected
    lines = [message for message in caplog.messages if any(word in message for word in SAYS)]
    assert said is None or any(said in line for line in lines), lines
    assert settings or said or not lines, "what is not expected is not said"

"""Every stage reads the text of a row, whatever the tokenizer, and nothing but it."""

import json
import random
from types import SimpleNamespace

import pytest
from chat_tokenizer import BOS, TEMPLATE, chat_of, chat_tokenizer, message, reader_of
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from lit_klrb.comparison.measure import encode_prompts, encode_windows
from lit_klrb.data.chat import Conversation, LeftOutError
from lit_klrb.data.encode import classifier_ids, encode, end_tokens
from lit_klrb.data.kinds import Row
from lit_klrb.data.modules import PreferenceDataModule, PromptDataModule, TextDataModule
from lit_klrb.data.prompts import read_prompts
from lit_klrb.data.reader import Reader

# The end of a turn is another token than the end of a text, as in Gemma's and Llama 3's
TURNS = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|system|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CORPUS = ["2+2=4 and the film was good, it is", "a  film! naïve café", "was it so? \n\nyes it is"] * 4
SPECIAL = ["<pad>", "<unk>", "<bos>", "<eos>"]


def trained(model, pre, decoder, trainer, normalizer=None, added=None, **names):
    backend = Tokenizer(model)
    backend.pre_tokenizer, backend.decoder = pre, decoder
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.train_from_iterator(CORPUS, trainer)
    if added is not None:
        ids = [(token, backend.token_to_id(token)) for token in ("<bos>", "<eos>")]
        backend.post_processor = TemplateProcessing(single=added, special_tokens=ids)
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>", "bos_token": "<bos>", **names}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def bpe(added=None, **names):
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return trained(models.BPE(), pre, decoders.ByteLevel(), trainer, added=added, **names)


def metaspace(added=None):
    """A space in front of a text, as Llama 2 and Mistral have it, and bytes for unknown characters."""
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=360, special_tokens=[*SPECIAL, *fallback], show_progress=False)
    decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    model = models.BPE(byte_fallback=True, unk_token="<unk>")
    return trained(model, pre_tokenizers.Metaspace(prepend_scheme="always"), decoder, trainer, added=added)


def wordpiece():
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=SPECIAL, show_progress=False)
    pre, decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return trained(models.WordPiece(unk_token="<unk>"), pre, decoder, trainer, normalizers.BertNormalizer())


TOKENIZERS = {
    "byte-level": bpe,
    "with BOS": lambda: bpe("<bos> $A"),
    "EOS added": lambda: bpe("<bos> $A <eos>"),
    "EOS is PAD": lambda: bpe(pad_token="<eos>"),
    "space in front": metaspace,
    "space in front and BOS": lambda: metaspace("<bos> $A"),
    "WordPiece": wordpiece,
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_tokens_of_prompt_and_answer_are_the_text_of_the_row(name):
    """sentencepiece#282, trl#2209: "2+2=" with the answer "4" is "2+2=4", not "2+2= 4"."""
    tokenizer, rng = TOKENIZERS[name](), random.Random(0)
    pieces = ["2+2=", "4", " ", "film", " was", "é", "good", "\n\n", "it", "a", "!", "  "]
    texts = [
        ("2+2=", "4"),
        ("the fi", "lm was"),
        *(("a" + "".join(rng.choices(pieces, k=5)), "".join(rng.choices(pieces, k=4))) for _ in range(80)),
    ]
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<unk>")]
    reader = Reader("key", tokenizer, ends if name == "byte-level" else ends[:1])
    for prompt, answer in texts:
        ids, mask = reader.answered(prompt, answer)
        start = mask.index(True)
        assert mask == [False] * start + [True] * (len(ids) - start)
        plain = tokenizer(prompt + answer, add_special_tokens=False)["input_ids"]
        before = tokenizer.bos_token_id if "BOS" in name or name == "EOS added" else None
        assert ids == [*([before] if before is not None else []), *plain, tokenizer.eos_token_id]
        text = prompt + answer
        if name == "WordPiece":  # which forgets white space
            text = tokenizer.decode(plain, skip_special_tokens=True)
        assert tokenizer.decode(ids[:start] + ids[start:], skip_special_tokens=True) == text
        # The answer's tokens are those that reach into it: the prompt's end before it
        given = tokenizer.decode(ids[:start], skip_special_tokens=True)
        assert name == "WordPiece" or prompt.startswith(given.rstrip("\ufffd"))


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


def plain(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="module")
def model(tokenizer):
    config = {"n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": len(tokenizer)}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **config))
    turn = tokenizer.convert_tokens_to_ids("<|system|>")
    model.generation_config = GenerationConfig(eos_token_id=[turn, tokenizer.eos_token_id])
    return model


def examples(data, tokenizer, model, path, row, split="train"):
    """Those of a data module that reads one row; its other splits do not interfere."""
    for name in ("train", "validation", "test"):
        path.mkdir(exist_ok=True)
        (path / f"{name}.jsonl").write_text(json.dumps(row if name == split else {"text": f"x{name}"}))
    data.source = str(path)
    learner = SimpleNamespace(
        tokenizer=tokenizer, trained=model, reads=data.contents, preference_pairs=None, given_pairs=list
    )
    data.trainer = SimpleNamespace(lightning_module=learner, max_steps=-1)
    data.rows[split] = data.load(split)
    return data.examples(split)


def test_all_paths_read_a_text_with_the_same_bos(tmp_path, tokenizer, model):
    expected = [tokenizer.bos_token_id, *plain(tokenizer, "Good film")]
    assert encode("Good film", None, tokenizer).ids == expected
    assert encode_prompts("x", [{"prompt": "Good film"}], tokenizer)[0].tokens == expected
    assert encode_windows("x", [{"text": "Good film"}], tokenizer, 99)[0] == [expected]
    row = {"text": "Good film"}
    (text,) = examples(TextDataModule(), tokenizer, model, tmp_path / "sft", row)
    assert text.ids == [*expected, tokenizer.eos_token_id]
    for data, split in ((PromptDataModule(), "train"), (PreferenceDataModule(), "validation")):
        path = tmp_path / type(data).__name__
        (prompt,) = examples(data, tokenizer, model, path, {"prompt": "Good film"}, split)
        assert prompt.tokens == expected
        (start,) = examples(data, tokenizer, model, path / "text", row, split)
        assert start.tokens == expected[: len(start.tokens)]
        assert 1 + data.min_prompt_tokens <= len(start.tokens) <= 1 + data.max_prompt_tokens
    reader = Reader("key", tokenizer, end_tokens(tokenizer, model))
    assert reader.answered("Good film", "Yes").ids[: len(expected)] == expected


def test_a_text_that_begins_with_a_bos_gets_no_second_one(tokenizer):
    expected = [tokenizer.bos_token_id, *plain(tokenizer, "Good film")]
    for text in ("<bos>Good film", "Good film"):
        assert encode(text, None, tokenizer).ids == expected
        assert classifier_ids(text, tokenizer) == expected, "reward models, too"
    rows = [Row(None, ("<bos>Good film",))] * 9
    lengths = [len(prompt.tokens) for prompt in read_prompts(rows, Reader("key", tokenizer, ()), 2, 4)]
    assert {3, 5} <= set(lengths) <= {3, 4, 5}


def test_the_ends_of_a_completion_are_those_of_tokenizer_and_generation_settings(tokenizer, model):
    turn, eos = tokenizer.convert_tokens_to_ids("<|system|>"), tokenizer.eos_token_id
    assert end_tokens(tokenizer, model) == (eos, turn)
    assert end_tokens(tokenizer, SimpleNamespace(generation_config=None)) == (eos,)


def test_an_answer_ends_with_the_end_of_its_turn(tmp_path, model):
    """Not with that and an end of text, which the model would then be trained to write after it."""
    tokenizer = chat_tokenizer(TURNS)
    turn = tokenizer.convert_tokens_to_ids("<|system|>")
    chat = [
        message("user", "Hi"),
        message("assistant", "Yes"),
        message("user", "No?"),
        message("assistant", "No"),
    ]
    (text,) = examples(TextDataModule(), tokenizer, model, tmp_path / "chats", {"messages": chat})
    turns = ("<bos><|user|>Hi", "<|assistant|>Yes", "<|user|>No?", "<|assistant|>No<|system|>")
    whole = "<|system|>\n".join(turns)
    assert tokenizer.decode(text.ids) == whole
    trained = [index for index, kept in zip(*text, strict=True) if kept]
    assert trained == [*plain(tokenizer, "Yes"), turn, *plain(tokenizer, "No"), turn], (
        "trl#4147, Megatron-Bridge#3359, nanochat#582: answers alone"
    )
    everything = examples(
        TextDataModule(train_on="all"), tokenizer, model, tmp_path / "chats", {"messages": chat}
    )
    assert everything == [(text.ids, [True] * len(text.ids))]
    reader = Reader("key", tokenizer, end_tokens(tokenizer, model), "Be")
    encoded = reader.answered("Hi", "Yes")
    assert encoded.ids[encoded.start :] == [*plain(tokenizer, "Yes"), turn]


def test_contents_are_no_control_tokens():
    """transformers#29279, vllm#31735: an end of a turn inside a message does not end it."""
    reader, _ = reader_of()
    for content in ("Say <eos> now", "<|assistant|>Yes", BOS):
        with pytest.raises(LeftOutError, match="a message contains the control token <"):
            reader.whole(chat_of(content, "Yes"))
        with pytest.raises(LeftOutError, match="a message contains the control token <"):
            reader.answered(chat_of("Hi"), Conversation.read("row", [message("assistant", content)]))
    with pytest.raises(LeftOutError, match="an end within the answer"):
        reader.answered("Hi", "Yes<eos>and more")
    once = reader.answered("Hi", "Yes<eos>\n")
    assert once == reader.answered("Hi", "Yes"), "one end, the first"


def test_templates_that_do_not_do_as_asked_are_said_once():
    """instructlab/training#232: the completion would begin with the role, without a word."""
    reader, said = reader_of(TEMPLATE.partition("{% if add")[0])
    for _ in range(2):
        encoded = reader.answered(chat_of("Hi"), "Yes")
    assert said == ["the chat template has no generation prompt: answers begin with what it puts before them"]
    assert reader.tokenizer.decode(encoded.ids[encoded.start :]) == "<|assistant|>Yes<eos>"
    with pytest.raises(LeftOutError, match="gives the prompt another text once the answer is there"):
        reader_of("{{ messages | length }}" + TEMPLATE)[0].answered(chat_of("Hi"), "Yes")
    # As Qwen3 forgets what was thought in earlier turns
    forgets = TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'] if loop.last else m['content'][:1] }}")
    reader, said = reader_of(
        forgets.replace("{% if add", "{% if messages | length == 2 %}{% endif %}{% if add")
    )
    ids, mask = reader.whole(chat_of("H", "Yes", "N", "No"))
    kept = [index for index, answer in zip(ids, mask, strict=True) if answer]
    assert reader.tokenizer.decode(kept) == "Y<eos>No<eos>"
    assert said == ["the chat template changes an answer once there are later messages"]


def test_settings_of_the_template_and_tools_reach_it():
    """trl#5824: Qwen3 without thinking; tool calls beside which the content is null, and parts of text."""
    thinks = "{% if add_generation_prompt and not enable_thinking | default(true) %}<t></t>{% endif %}"
    plain_reader, _ = reader_of(TEMPLATE + thinks)
    quiet, _ = reader_of(TEMPLATE + thinks, template={"enable_thinking": False})
    decode = plain_reader.tokenizer.decode
    assert decode(quiet.prompt(chat_of("Hi"))) == decode(plain_reader.prompt(chat_of("Hi"))) + "<t></t>"
    shows_tools = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    calls = [{"role": "user", "content": [{"type": "text", "text": "2"}, {"type": "text", "text": "+2?"}]}]
    calls += [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"name": "add", "arguments": {"a": 2, "b": None}}],
        }
    ]
    chat = Conversation.read("row 1", calls, tools='[{"name": "add"}]')
    text = chat.rendered("key", chat_tokenizer(shows_tools))
    assert text == "[{\"name\": \"add\"}]2+2?[{'name': 'add', 'arguments': {'a': 2}}]"

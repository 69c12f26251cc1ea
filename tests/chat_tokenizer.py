"""A byte-level tokenizer that adds a BOS, as its chat template does."""

from tokenizers.processors import TemplateProcessing

from lit_klrb.data.chat import Conversation
from lit_klrb.data.reader import Reader
from lit_klrb.data.tokenizer import train_bpe

BOS, NEWLINE = "<bos>", "\n"
MARKS = ["<|system|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def chat_tokenizer(template=TEMPLATE):
    tokenizer = train_bpe(["ab"], vocab_size=258)
    tokenizer.add_special_tokens({"bos_token": BOS, "additional_special_tokens": MARKS})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = template
    return tokenizer


def message(role, content):
    return {"role": role, "content": content}


def by_hand(tokenizer, *messages, begun=True):
    """Token ids of a conversation, assembled from those of its parts."""

    def plain(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    ids = [tokenizer.bos_token_id]
    for role, content in messages:
        mark = tokenizer.convert_tokens_to_ids(f"<|{role}|>")
        ids += [mark, *plain(content), tokenizer.eos_token_id, *plain(NEWLINE)]
    return [*ids, tokenizer.convert_tokens_to_ids("<|assistant|>")] if begun else ids


def reader_of(jinja=TEMPLATE, **settings):
    """A reader with a chat template, and what it says."""
    tokenizer, said = chat_tokenizer(jinja), []
    return Reader("key", tokenizer, [tokenizer.eos_token_id], say=said.append, **settings), said


def chat_of(*contents, **more):
    """A conversation of user and assistant in turn."""
    roles = ("user", "assistant") * len(contents)
    return Conversation.read("row 1", [message(*pair) for pair in zip(roles, contents, strict=False)], **more)

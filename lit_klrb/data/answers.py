"""What of a row belongs to its prompt, and what to each answer: common beginnings, repeats, earlier messages.

What is converted is noted: each function gets what records a line.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from lit_klrb.data.chat import ASSISTANT, USER, Content, Conversation, LeftOutError
from lit_klrb.data.columns import PAIR

LAST = "\n\nAssistant:"  # where the answer of a dialogue in one text begins
REPEATED = "answers that begin with the prompt are read without it"

Note = Callable[[str], None]


def alike(
    prompt: Content | None, answers: Sequence[Content], origin: str, note: Note
) -> list[Content | None]:
    """A prompt and its answers in one form: texts beside conversations become messages."""
    contents = [prompt, *answers]
    if len({isinstance(content, str) for content in contents if content is not None}) < 2:
        return contents
    note("texts beside messages are messages")
    roles = [USER, *(ASSISTANT for _ in answers)]
    pairs = zip(contents, roles, strict=True)
    return [Conversation.of(c, role, origin) if isinstance(c, str) else c for c, role in pairs]


def without_repeats(prompt: Content, answers: Sequence[Content], note: Note) -> list[Content]:
    """A prompt, and answers without it, if all begin with it; of one word this may be chance."""
    if isinstance(prompt, str):
        texts = [str(answer) for answer in answers]
        for start in (prompt, prompt.rstrip()):
            if len(start.split()) > 1 and texts and all(text.startswith(start) for text in texts):
                note(REPEATED)
                return [start, *(text[len(start) :] for text in texts)]
        return [prompt, *answers]
    chats, count = [a for a in answers if isinstance(a, Conversation)], len(prompt.messages)
    if chats and all(len(c.messages) > count and c.messages[:count] == prompt.messages for c in chats):
        note(REPEATED)
        return [prompt, *(replace(chat, messages=chat.messages[count:]) for chat in chats)]
    return [prompt, *answers]


def split_texts(chosen: str, rejected: str, note: Note, are_whole: bool) -> list[Content]:
    """Two texts without the prompt with which they begin; texts that are whole need none."""
    differ = (n for n, both in enumerate(zip(chosen, rejected, strict=False)) if len({*both}) > 1)
    common = chosen[: next(differ, len(rejected))]
    if LAST in common:
        length, what = common.rfind(LAST) + len(LAST), f"what both have up to the last {LAST.strip()!r}"
    else:  # the space belongs to the answer
        length, what = max(0, *map(common.rfind, " \n")), "the words with which both begin"
        length *= not are_whole
    if length:
        note(f"the prompt of a pair is {what}")
    return [chosen[:length], chosen[length:], rejected[length:]]


def split_chats(prompt: Conversation | None, *chats: Conversation) -> list[Content]:
    """The messages before the answers of two conversations, and the answers."""
    for name, chat in zip(PAIR, chats, strict=True):
        if (role := chat.messages[-1]["role"]) != ASSISTANT:
            raise LeftOutError(f"{name} ends with the role {role}, not with the assistant's answer")
    earlier = [chat.messages[:-1] for chat in chats]
    answers = [replace(chat, messages=chat.messages[-1:]) for chat in chats]
    if prompt is not None and all(part in ((), prompt.messages) for part in earlier):
        return [prompt, *answers]
    if prompt is not None and any(part and part[0]["role"] == ASSISTANT for part in earlier):
        raise LeftOutError("several messages after the prompt")
    if prompt is not None or earlier[0] != earlier[1]:
        raise LeftOutError("conversations that differ before the answer")
    if not earlier[0]:
        raise LeftOutError("no message before the assistant's")
    return [replace(chats[0], messages=earlier[0]), *answers]

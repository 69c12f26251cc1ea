"""What a stranger's chat template may take is bounded."""

import pytest

from lit_klrb.data import chat
from lit_klrb.data.chat import Conversation
from lit_klrb.data.tokenizer import grammar_tokenizer
from lit_klrb.errors import ConfigurationError


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(chat, "SECONDS", 1)


def test_time_and_memory_are_bounded_and_errors_are_not_its_business():
    assert chat.ends_in_time(lambda: "a text")
    assert chat.ends_in_time(lambda: 1 / 0)
    assert not chat.ends_in_time(lambda: [0] * 10**10)
    assert not chat.ends_in_time(lambda: int("9" * 10) ** int("9" * 10))


@pytest.mark.parametrize(
    "template",
    ["{% for a in range(10**5) %}{% for b in range(10**5) %}{% endfor %}{% endfor %}", "{{ 'a' * 10**11 }}"],
)
def test_a_template_that_never_ends_is_refused(template):
    tokenizer = grammar_tokenizer()
    tokenizer.chat_template = template
    conversation = Conversation(({"role": "user", "content": "I saw this film ."},), "row 1")
    with pytest.raises(ConfigurationError, match="takes too much time or memory"):
        conversation.prompt("source", tokenizer)

"""Parts of a prompt that repeat the model's own tokens."""

from pathlib import Path
from typing import Any

import pytest

from cuq1.text import ChatTemplate, Tokenizer, check_tools, parse_output
from cuq1.text.stream import Detokenizer
from cuq1.text.written import Written

NANO = Path(__file__).parents[2] / "cuq1" / "assets" / "iquest-q1-nano"
TOKENIZER = Tokenizer.load(NANO, 4096)
CHAT = ChatTemplate.load(NANO, TOKENIZER)
TOOLS = check_tools(
    [{"type": "function", "function": {"name": "put", "parameters": {"type": "object", "properties": {"n": {}}}}}]
)
USER = {"role": "user", "content": "put it"}
# Other whitespace, numbers and JSON than a template would write, and text around the calls.
TEXT = (
    'I will.</think>\n\nNow <iquest_tool_call> put \n<arg_key> n</arg_key>\n<arg_value>{"a":1.50,"b":[ ]}</arg_value>'
    "</iquest_tool_call>\nand<iquest_tool_call>put</iquest_tool_call>"
)


def spelled(text: str) -> list[int]:
    """Ids of `text` with every letter of 'will' a token of its own, as no tokenizer writes it."""
    before, word, after = text.partition("will")
    ids = TOKENIZER.encode(before, control=True)
    for letter in word:
        ids += TOKENIZER.encode(letter, control=True)
    return ids + TOKENIZER.encode(after, control=True)


def turn(text: str, *, exact_reasoning: bool = True) -> tuple[dict[str, Any], Written]:
    """The message that an output is parsed to, and its tokens."""
    ids = spelled(text)
    close = ids.index(TOKENIZER.control_tokens["</think>"])
    parsed = parse_output(Detokenizer(TOKENIZER).feed(ids), tools=TOOLS, reasoning=True)
    message = {
        "role": "assistant",
        "content": parsed.content,
        "reasoning_content": parsed.reasoning,
        "tool_calls": [call.to_openai() for call in parsed.tool_calls],
    }
    return message, Written(tuple(ids[:close]) if exact_reasoning else None, tuple(ids[close + 1 :]))


def test_the_next_prompt_begins_with_the_last_one_and_what_the_model_wrote() -> None:
    first = CHAT.prompt([USER], tools=TOOLS)
    message, written = turn(TEXT)
    messages = [USER, message, {"role": "tool", "content": "ok"}]
    second = CHAT.prompt(messages, tools=TOOLS, written={1: written})
    expected = first.ids + spelled(TEXT)
    assert second.ids[: len(expected)] == expected
    assert second.text == TOKENIZER.decode(second.ids)
    assert second.in_reasoning == first.in_reasoning
    # What follows is as without it.
    plain = CHAT.prompt(messages, tools=TOOLS)
    rest = second.ids[len(expected) :]
    assert plain.ids[-len(rest) :] == rest
    # The control: the template's own rendering is none of this.
    assert plain.ids[: len(expected)] != expected


def test_reasoning_that_is_not_known_by_its_tokens_is_rendered() -> None:
    message, written = turn(TEXT, exact_reasoning=False)
    prompt = CHAT.prompt([USER, message], tools=TOOLS, written={1: written})
    assert TOKENIZER.decode(prompt.ids).count(TEXT) == 1
    assert prompt.ids != CHAT.prompt([USER, message], tools=TOOLS, written={1: turn(TEXT)[1]}).ids


@pytest.mark.parametrize(
    "other",
    [
        "no call at all",
        "<iquest_tool_call>put</iquest_tool_call>",
        TEXT.partition("</think>")[2] + "<|iquest_end|><|iquest_user|>more",
    ],
)
def test_tokens_with_other_markup_than_the_message_has_are_left_out(other: str) -> None:
    message, _ = turn(TEXT)
    written = Written(None, tuple(TOKENIZER.encode(other, control=True)))
    messages = [USER, message]
    assert CHAT.prompt(messages, tools=TOOLS, written={1: written}).ids == CHAT.prompt(messages, tools=TOOLS).ids


def test_whitespace_that_the_template_writes_itself_does_not_come_twice() -> None:
    source = (
        "{% for m in messages %}<|iquest_user|>{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content | trim }}"
        "\n</think>\n\n{{ m.content | trim }}{% for c in m.tool_calls or [] %}\n<iquest_tool_call>{{ c.function.name }}"
        "{% for k, v in (c.function.arguments | fromjson).items() %}<arg_key>{{ k }}</arg_key><arg_value>"
        "{{ v | tojson }}</arg_value>{% endfor %}</iquest_tool_call>{% endfor %}{% else %}{{ m.content }}{% endif %}"
        "<|iquest_end|>"
        "{% endfor %}{% if add_generation_prompt %}<|iquest_user|><think>\n{% endif %}"
    )
    chat = ChatTemplate("test.jinja", source, {}, TOKENIZER)
    text = TEXT.replace("</think>", "\n</think>", 1)
    message, written = turn(text)
    first = chat.prompt([USER], tools=TOOLS)
    second = chat.prompt([USER, message], tools=TOOLS, written={1: written})
    assert second.text.startswith(first.text + text + "<|iquest_end|>")
    assert not chat.prompt([USER, message], tools=TOOLS).text.startswith(first.text + text)


def test_a_template_that_does_not_show_a_message_once_is_left_alone() -> None:
    message, written = turn(TEXT)
    for shown in ("{{ m.content }}{{ m.content }}", "{{ m.content[:2] }}", "{{ m.role }}"):
        chat = ChatTemplate("test.jinja", "{% for m in messages %}" + shown + "{% endfor %}", {}, TOKENIZER)
        assert chat.prompt([USER, message], written={1: written}).ids == chat.prompt([USER, message]).ids


def test_no_input_can_name_a_placeholder() -> None:
    """Every character that a placeholder could be marked with may be typed."""
    message, written = turn(TEXT)
    typed = "".join(f"{chr(mark)}1a{chr(mark)}" for mark in (*range(0xFDD0, 0xFDF0), *range(0xE000, 0xE020)))
    prompt = CHAT.prompt([{"role": "user", "content": typed}, message], tools=TOOLS, written={1: written})
    assert typed in prompt.text
    assert TOKENIZER.decode(prompt.ids).count(TEXT) == 1

"""What check_messages and check_tools refuse, by index and field, and what they make of what they accept."""

import math
from typing import Any

import pytest

from cuq1.errors import TextError
from cuq1.text import check_messages, check_tools

USER = {"role": "user", "content": "hi"}


def assistant(**fields: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "content": None} | fields]


def called(call: Any) -> list[dict[str, Any]]:
    return assistant(tool_calls=[{"function": {"name": "ok"}}, call])


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        (None, "messages must be a list of at least one message, not null"),
        ((USER,), "messages must be a list of at least one message, not a tuple"),
        ("hi", "messages must be a list of at least one message, not 'hi'"),
        (USER, "messages must be a list of at least one message, not an object"),
        ([], "messages must be a list of at least one message, not an empty list"),
        ([USER, "hi"], r"messages\[1\] must be an object"),
        ([{"content": "hi"}], r"messages\[0\]\.role must be one of system, .*, not absent"),
        ([USER, {"role": "robot", "content": "x"}], r"messages\[1\]\.role must be one of .*, not 'robot'"),
        ([{"role": ["user"], "content": "x"}], r"messages\[0\]\.role must be one of .*, not a list"),
        ([{"role": "user"}], r"messages\[0\]\.content must be a string or a list of text parts, not null"),
        ([{"role": "tool", "content": None}], r"messages\[0\]\.content must be .*, not null"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content must be .*, not a number"),
        ([{"role": "assistant", "content": {}}], r"messages\[0\]\.content must be .*, not an object"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}],
            r"messages\[0\]\.content\[1\] must be a part of type 'text'.*, not type 'image_url'",
        ),
        ([{"role": "user", "content": ["a"]}], r"messages\[0\]\.content\[0\] must be a part .*, not 'a'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text must be a string, not null"),
        ([USER | {"tool_calls": [{}]}], r"messages\[0\]\.tool_calls belongs to assistant messages only"),
        (assistant(reasoning_content=5), r"messages\[1\]\.reasoning_content must be a string or null"),
        (assistant(reasoning=["a"]), r"messages\[1\]\.reasoning must be a string or null"),
        (assistant(tool_calls={}), r"messages\[1\]\.tool_calls must be a list or null, not an object"),
        (called("f"), r"messages\[1\]\.tool_calls\[1\] must be an object with a function, not 'f'"),
        (called({"type": "custom", "function": {}}), r"tool_calls\[1\]\.type must be 'function', not 'custom'"),
        (called({"function": "f"}), r"tool_calls\[1\]\.function must be an object"),
        (called({"function": {}}), r"tool_calls\[1\]\.function\.name must be a non-empty string, not null"),
        (called({"function": {"name": ""}}), r"function\.name must be a non-empty string"),
        (
            called({"function": {"name": "f", "arguments": "{"}}),
            r"function\.arguments must be a string with a JSON object",
        ),
        (called({"function": {"name": "f", "arguments": "[1]"}}), r"function\.arguments must be .*, not with a list"),
        (called({"function": {"name": "f", "arguments": '{"a": NaN}'}}), r"arguments must be .*NaN is not JSON"),
        (called({"function": {"name": "f", "arguments": '{"a":' * 9999}}), r"function\.arguments must be"),
        (assistant(function_call={"name": "f"}), r"messages\[1\]\.function_call is not read: write tool_calls"),
        ([USER | {"function_call": {"name": "f"}}], r"messages\[0\]\.function_call is not read: write tool_calls"),
        # not JSON, or not Unicode
        (assistant(n=[1, math.nan]), r"messages\[1\]\.n\[1\] is nan, which is no JSON number: write a finite one"),
        (
            called({"function": {"name": "f", "arguments": {"a": {"b c": 1e400}}}}),
            r"tool_calls\[1\]\.function\.arguments\.a\['b c'\] is inf, which is no JSON number",
        ),
        (
            called({"function": {"name": "f", "arguments": {1: 2}}}),
            r"arguments has the key 1, and .* strings: quote it",
        ),
        (called({"function": {"name": "f", "arguments": {"a": {1}}}}), r"arguments\.a is a set: use JSON values only"),
        (
            [USER, USER | {"content": "é\ud800"}],
            r"messages\[1\]\.content holds the lone surrogate U\+D800 at character 1, .*: decode its source as UTF-8",
        ),
        (assistant(reasoning="\udfff"), r"messages\[1\]\.reasoning(_content)? holds the lone surrogate U\+DFFF"),
        (called({"function": {"name": "\ud800"}}), r"tool_calls\[1\]\.function\.name holds the lone surrogate"),
        (
            called({"function": {"name": "f", "arguments": '{"a": ["\\ud800"]}'}}),
            r"tool_calls\[1\]\.function\.arguments\.a\[0\] holds the lone surrogate U\+D800",
        ),
        (called({"function": {"name": "f", "arguments": {"\ud800": 1}}}), r"arguments holds the lone surrogate"),
        (called({"function": {"name": "f", "arguments": 5}}), r"function\.arguments must be .*, not a number"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, problem: str) -> None:
    with pytest.raises(TextError, match=problem):
        check_messages(messages)
    # The sentence itself is one line, as command lines print it.
    with pytest.raises(TextError, match=r"^[^\n]+[^\n.]$"):
        check_messages(messages)


def test_messages_are_normalised() -> None:
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "kept"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": '{"a": 1}'}}, {"name": "g"}],
        },
        {"role": "assistant", "content": "c", "reasoning": "r", "tool_calls": None},
        {"role": "tool", "content": "", "tool_call_id": "x"},
        {"role": "developer", "content": "d"},
    ]
    before = repr(messages)
    assert check_messages(messages) == [
        {"role": "system", "content": "ab", "name": "kept"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
                {"type": "function", "function": {"name": "g", "arguments": "{}"}},
            ],
        },
        {"role": "assistant", "content": "c", "reasoning": "r", "reasoning_content": "r", "tool_calls": None},
        {"role": "tool", "content": "", "tool_call_id": "x"},
        {"role": "developer", "content": "d"},
    ]
    assert repr(messages) == before
    assert check_messages(check_messages(messages)) == check_messages(messages)


@pytest.mark.parametrize(
    ("content", "reasoning", "rest"),
    [
        ("<think>why</think>so", "why", "so"),
        ("\n <think>\nwhy\n</think>\n\nso", "\nwhy\n", "\n\nso"),
        ("<think></think>", "", ""),
        ("<think>a</think>b</think>c", "a", "b</think>c"),
        ("<think>a<think>b</think>c", "a<think>b", "c"),
        ([{"type": "text", "text": "<think>a</th"}, {"type": "text", "text": "ink>b"}], "a", "b"),
    ],
)
def test_leading_reasoning_is_lifted_out_of_content(content: Any, reasoning: str, rest: str) -> None:
    lifted = check_messages(assistant(content=content))
    assert (lifted[1]["reasoning_content"], lifted[1]["content"]) == (reasoning, rest)
    assert check_messages(lifted) == lifted


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "say <think>a</think>b"},
        {"role": "assistant", "content": "<think>a"},
        {"role": "assistant", "content": "a</think>b"},
        {"role": "assistant", "content": "<THINK>a</THINK>b"},
        {"role": "assistant", "content": "<think>a</think>b", "reasoning_content": "r"},
        {"role": "assistant", "content": "<think>a</think>b", "reasoning_content": ""},
        {"role": "user", "content": "<think>a</think>b"},
        {"role": "tool", "content": "<think>a</think>b"},
    ],
)
def test_other_mentions_of_reasoning_stay(message: dict[str, Any]) -> None:
    assert check_messages([message]) == [message]
    (kept,) = check_messages([message | {"reasoning": "r"}])
    assert kept["content"] == message["content"]


def test_an_absent_function_call_is_no_fault() -> None:
    assert check_messages(assistant(content="x", function_call=None))[1]["content"] == "x"


@pytest.mark.parametrize("arguments", [None, "", "  ", "{}"])
def test_no_arguments_have_many_spellings(arguments: Any) -> None:
    (_, message) = check_messages(assistant(tool_calls=[{"function": {"name": "f", "arguments": arguments}}]))
    assert message["tool_calls"][0]["function"]["arguments"] == "{}"


def test_arguments_of_any_size_are_accepted() -> None:
    text = '{"n": ' + "9" * 10_000 + "}"
    (_, message) = check_messages(assistant(tool_calls=[{"function": {"name": "f", "arguments": text}}]))
    assert message["tool_calls"][0]["function"]["arguments"] == text


@pytest.mark.parametrize(
    ("tools", "problem"),
    [
        (None, "tools must be a list of tools, not null"),
        ((), "tools must be a list of tools, not a tuple"),
        ([{"name": "f", "parameters": {"default": -math.inf}}], r"tools\[0\]\.function\.parameters\.default is -inf"),
        ([{"name": "f", "description": "\ud800"}], r"tools\[0\]\.function\.description holds the lone surrogate"),
        ({"name": "f"}, "tools must be a list of tools, not an object"),
        (["f"], r"tools\[0\] must be an object with a function, not 'f'"),
        ([{}], r"tools\[0\]\.function must be an object with name and parameters, not absent"),
        ([{"type": "function", "function": "f"}], r"tools\[0\]\.function must be an object .*, not 'f'"),
        ([{"type": "web_search"}], r"tools\[0\]\.type must be 'function', not 'web_search'"),
        ([{"function": {}}], r"tools\[0\]\.function\.name must be .*, not null"),
        ([{"function": {"name": ""}}], r"tools\[0\]\.function\.name must be .*, not ''"),
        ([{"function": {"name": "a b"}}], r"tools\[0\]\.function\.name must be .*, not 'a b'"),
        ([{"function": {"name": "<arg_key>"}}], r"tools\[0\]\.function\.name must be"),
        ([{"function": {"name": "f", "description": 1}}], r"tools\[0\]\.function\.description must be a string"),
        (
            [{"function": {"name": "f", "parameters": []}}],
            r"tools\[0\]\.function\.parameters must be .*, not an empty list",
        ),
        ([{"name": "f", "parameters": "x"}], r"tools\[0\]\.function\.parameters must be a JSON Schema object, not 'x'"),
        ([{"name": "f", "parameters": {"properties": [1]}}], r"parameters\.properties must be an object, not a list"),
        (
            [{"name": "f"}, {"name": "g"}, {"function": {"name": "f"}}],
            r"tools\[2\]\.function\.name must differ from that of tools\[0\]",
        ),
    ],
)
def test_malformed_tools_are_refused(tools: Any, problem: str) -> None:
    with pytest.raises(TextError, match=problem):
        check_tools(tools)


def test_tools_are_wrapped_and_otherwise_kept() -> None:
    whole = {"type": "function", "function": {"strict": True, "name": "f", "parameters": {"type": "object"}}}
    assert check_tools([]) == []
    assert check_tools([whole]) == [whole]
    assert check_tools([whole["function"]]) == [whole]
    assert check_tools([{"type": "function", "name": "f"}]) == [{"type": "function", "function": {"name": "f"}}]
    assert check_tools([{"function": {"name": "f"}}]) == [{"type": "function", "function": {"name": "f"}}]

"""OutputParser against an independent regular-expression oracle, for every way of cutting, through both front ends."""

import json
import random
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from cuq1.text import (
    Delta,
    Detokenizer,
    Event,
    OutputParser,
    ParsedMessage,
    Tokenizer,
    collect,
    markup,
    parse_output,
    parser,
    toolcalls,
)

NANO = Path(__file__).parents[2] / "cuq1" / "assets" / "iquest-q1-nano"
TOKENIZER = Tokenizer.load(NANO, 4096)
T = TypeVar("T")

OPEN, CLOSE = "<iquest_tool_call>", "</iquest_tool_call>"
TAGS = [OPEN, CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
THINK_TAGS = ["<think>", "</think>"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "ref": {"$ref": "#/$defs/Text"},
                    "maybe": {"type": ["string", "null"]},
                    "limit": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
                    "count": {"type": "integer"},
                    "options": {},
                },
                "$defs": {"Text": {"$ref": "#/$defs/Inner"}, "Inner": {"type": "string"}},
            },
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]
# How the oracle knows the types: written by hand, not read from the schema. Absent: any type.
ALLOWED = {"path": {str}, "ref": {str}, "maybe": {str, type(None)}, "limit": {int, str}, "count": {int}}


def fresh_random() -> random.Random:
    """New random inputs in every run; a failure's captured output names the seed."""
    seed = random.randrange(2**32)
    print(f"random.Random({seed})")
    return random.Random(seed)


def block(name: str, *arguments: tuple[str, str], gap: str = "") -> str:
    parts = [f"<arg_key>{k}</arg_key>{gap}<arg_value>{v}</arg_value>{gap}" for k, v in arguments]
    return f"{OPEN}{name}{gap}{''.join(parts)}{CLOSE}"


def oracle_value(key: str, text: str) -> str:
    def refuse(name: str) -> None:
        raise ValueError(name)

    allowed = ALLOWED.get(key, set())
    try:
        value = json.loads(text, parse_constant=refuse)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    if str in allowed and (isinstance(value, str) or type(value) not in allowed):
        return json.dumps(text, ensure_ascii=False)
    return text.strip(" \t\r\n")


def oracle(text: str, with_tools: bool, reasoning: bool) -> tuple[str, str, list[tuple[str, str]]]:
    """(content, reasoning, [(name, arguments)]) of a whole text, by regular expressions."""
    thought, content, calls = "", "", []
    if reasoning:
        thought, _, text = text.partition("</think>")
    if not with_tools:
        return text, thought, []
    free = "(?:(?!</?iquest_tool_call>|</?arg_key>|</?arg_value>).)*"
    argument = f"<arg_key>({free})</arg_key>\\s*<arg_value>({free})</arg_value>\\s*"
    at = 0
    for match in re.finditer(f"{OPEN}({free})((?:{argument})*){CLOSE}", text, re.DOTALL):
        name = match[1].strip()
        arguments = [(k.strip(), v) for k, v in re.findall(argument, match[2], re.DOTALL)]
        keys = [k for k, _ in arguments]
        if name not in ("read", "stop") or "" in keys or len(keys) != len(set(keys)):
            continue
        content += text[at : match.start()]
        at = match.end()
        pairs = (
            f"{json.dumps(k, ensure_ascii=False)}: {oracle_value(k if name == 'read' else '', v)}" for k, v in arguments
        )
        calls.append((name, "{" + ", ".join(pairs) + "}"))
    return content + text[at:], thought, calls


VALUES = [
    "",
    " ",
    "a b",
    ' "q" ',
    "1",
    "-0",
    " 12 ",
    "1e400",
    "9" * 25,
    "null",
    "true",
    "NaN",
    "[1, {}]",
    '"s"',
    "{",
    "a<b",
    "é日\n",
    "<arg",
    "<think>",
]


def random_output(rng: random.Random) -> str:
    """Mostly valid output, with parts lost, doubled and mixed up in some."""
    parts: list[str] = []
    for _ in range(rng.randint(0, 4)):
        if rng.random() < 0.4:
            parts.append(rng.choice(["text", "\n", " < ", "<iq", "</think>", "<think>", "日本", CLOSE, "<arg_key>"]))
            continue
        gap = rng.choice(["", "", "\n", " \n"])
        parts += [
            OPEN,
            rng.choice(["", "\n"]) + rng.choice(["read", "read", "read", "read", "stop", "stop", "other", ""]),
            gap,
        ]
        for key in rng.choices(
            ["path", "ref", "maybe", "limit", "count", "options", "é", " path ", ""], k=rng.randint(0, 3)
        ):
            parts += ["<arg_key>", key, "</arg_key>", gap, "<arg_value>", rng.choice(VALUES), "</arg_value>", gap]
        parts.append(CLOSE)
    while parts and rng.random() < 0.3:
        i = rng.randrange(len(parts))
        parts[i] = rng.choice(["", parts[i] * 2, rng.choice([*TAGS, *THINK_TAGS, "x", " "])])
    return "".join(parts)


def as_events(text: str) -> list[Event]:
    """The events of `text` where every markup literal is a control token."""
    pieces = re.split(f"({'|'.join(TAGS + THINK_TAGS)})", text)
    return [Event(piece, i % 2 == 1) for i, piece in enumerate(pieces) if piece]


def cut(rng: random.Random, items: Sequence[T]) -> list[Sequence[T]]:
    marks = sorted(rng.randint(0, len(items)) for _ in range(rng.randint(0, 6)))
    return [items[a:b] for a, b in zip([0, *marks], [*marks, len(items)], strict=True)]


def cut_events(rng: random.Random, events: Sequence[Event]) -> list[list[Event]]:
    """Feeds of events whose texts are cut at random too."""
    small: list[Event] = []
    for event in events:
        small += [event] if event.control else [Event(str(t)) for t in cut(rng, event.text) if t]
    return [list(piece) for piece in cut(rng, small)]


def plain(message: ParsedMessage) -> tuple[str, str, list[tuple[str, str]]]:
    assert [call.index for call in message.tool_calls] == list(range(len(message.tool_calls)))
    return message.content, message.reasoning, [(call.name, call.arguments) for call in message.tool_calls]


def stream_text(pieces: Iterable[str], tools: Any, reasoning: bool) -> list[Delta]:
    output_parser = parser.OutputParser(tools=tools, reasoning=reasoning)
    return [delta for piece in pieces for delta in output_parser.feed_text(piece)] + output_parser.finish()


def stream_events(pieces: Iterable[Iterable[Event]], tools: Any, reasoning: bool, **more: Any) -> list[Delta]:
    output_parser = parser.OutputParser(tools=tools, reasoning=reasoning, **more)
    return [delta for piece in pieces for delta in output_parser.feed(piece)] + output_parser.finish()


def check_against_oracle(rounds: int) -> None:
    rng = fresh_random()
    calls = visible = 0
    for _ in range(rounds):
        text, reasoning, tools = random_output(rng), rng.random() < 0.3, rng.choice([TOOLS, TOOLS, TOOLS, None, []])
        want = oracle(text, bool(tools), reasoning)
        calls += len(want[2])
        visible += bool(tools) and OPEN in want[0]
        assert plain(parser.parse_output(text, tools=tools, reasoning=reasoning)) == want
        events = as_events(text)
        assert plain(parser.parse_output(events, tools=tools, reasoning=reasoning)) == want
        single = ([text[:i], text[i:]] for i in range(len(text)))
        for pieces in [list(text), [str(t) for t in cut(rng, text)], *single]:
            assert plain(collect(stream_text(pieces, tools, reasoning))) == want
        for feeds in ([[e] for e in events], cut_events(rng, events), cut_events(rng, events)):
            assert plain(collect(stream_events(feeds, tools, reasoning))) == want
            # Markup that the tokenizer spells in ordinary tokens is found in text.
            texts = [[Event(e.text) for e in feed] for feed in feeds]
            assert plain(collect(stream_events(texts, tools, reasoning, control_tokens=()))) == want
    assert calls > rounds // 8
    assert visible > rounds // 20


def test_parsing_is_the_oracles_for_every_cut() -> None:
    check_against_oracle(300)


def _no_hold_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Eager(markup.MarkupScanner):
        def feed(self, text: str) -> list[Event]:
            return super().feed(text) + super().flush()

    monkeypatch.setattr(parser, "MarkupScanner", Eager)


def _lenient_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolcalls, "CALL_MARKUP", toolcalls.CALL_MARKUP - {"<arg_key>"})


def _rounded_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(self: Any, tool: str, key: str, text: str) -> str:
        try:
            return json.dumps(json.loads(text))
        except ValueError:
            return json.dumps(text, ensure_ascii=False)

    monkeypatch.setattr(toolcalls.ToolCatalog, "argument_json", convert)


def _any_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolcalls.ToolCatalog, "__contains__", lambda self, name: True)


def _lost_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parser.OutputParser, "_abandon_block", lambda self, deltas: setattr(self, "_block", None))


@pytest.mark.parametrize("flaw", [_no_hold_back, _lenient_values, _rounded_numbers, _any_tool, _lost_blocks])
def test_broken_parsers_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch, flaw: Callable[[pytest.MonkeyPatch], None]
) -> None:
    flaw(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        check_against_oracle(3000)


def single_call(text: str, tools: Any = TOOLS) -> tuple[str, str]:
    message = parse_output(text, tools=tools, reasoning=False)
    assert len(message.tool_calls) == 1, message
    assert message.content == ""
    return message.tool_calls[0].name, message.tool_calls[0].arguments


def test_the_shape_of_a_call() -> None:
    message = parse_output(block("read", ("path", "src/main.py")), tools=TOOLS, reasoning=False)
    (call,) = message.tool_calls
    openai = call.to_openai()
    assert openai == {
        "id": call.id,
        "type": "function",
        "function": {"name": "read", "arguments": '{"path": "src/main.py"}'},
    }
    assert re.fullmatch("call_[0-9a-f]{32}", call.id)


def test_ids_are_never_reused() -> None:
    text = block("stop") * 50
    ids = [c.id for _ in range(20) for c in parse_output(text, tools=TOOLS, reasoning=False).tool_calls]
    assert len(set(ids)) == 1000


@pytest.mark.parametrize(
    ("key", "text", "want"),
    [
        ("path", ' "a" \n', '" \\"a\\" \\n"'),
        ("path", "12", '"12"'),
        ("path", "null", '"null"'),
        ("path", "", '""'),
        ("ref", "{}", '"{}"'),
        ("maybe", "null", "null"),
        ("maybe", '"quoted"', '"\\"quoted\\""'),
        ("maybe", "12", '"12"'),
        ("limit", " 12 ", "12"),
        ("limit", "12.5", '"12.5"'),
        ("count", "9" * 5000, "9" * 5000),
        ("count", "five", '"five"'),
        ("count", "", '""'),
        ("count", '"5"', '"5"'),
        ("options", "1.10", "1.10"),
        ("options", "1e400", "1e400"),
        ("options", "NaN", '"NaN"'),
        ("options", '{"a" : 1.0,\n"a": 2}', '{"a" : 1.0,\n"a": 2}'),
        ("options", "[" * 5000 + "]" * 5000, "[" * 5000 + "]" * 5000),
        ("unknown", "true", "true"),
    ],
)
def test_values(key: str, text: str, want: str) -> None:
    assert single_call(block("read", (key, text))) == ("read", f'{{"{key}": {want}}}')


def test_keys_are_exact_where_the_schema_has_them() -> None:
    schema = {"properties": {" a ": {"type": "string"}, "b": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert single_call(block("f", (" a ", "1"), (" b\n", "2")), tools) == ("f", '{" a ": "1", "b": "2"}')


def test_parts_may_be_spaced_and_blocks_may_follow_each_other() -> None:
    text = "before " + block("\nread\n", ("path", "x"), gap="\n") + block("stop") + "\n" + block("stop") + " after"
    message = parse_output(text, tools=TOOLS, reasoning=False)
    assert plain(message) == ("before \n after", "", [("read", '{"path": "x"}'), ("stop", "{}"), ("stop", "{}")])


@pytest.mark.parametrize(
    "text",
    [
        block("other", ("path", "x")),
        block(""),
        block("read", ("", "x")),
        block("read", ("path", "x"), ("path", "y")),
        block("read", ("path", "x"), (" path ", "y")),
        f"{OPEN}read<arg_value>x</arg_value>{CLOSE}",
        f"{OPEN}read<arg_key>path</arg_key>{CLOSE}",
        f"{OPEN}read<arg_key>path</arg_key><arg_value>x{CLOSE}",
        f"{OPEN}read<arg_key>path<arg_value>x</arg_value>{CLOSE}",
        f"{OPEN}read<arg_key>path</arg_key>x<arg_value>x</arg_value>{CLOSE}",
        f"{OPEN}read<arg_key>path</arg_key><arg_value>x</arg_value>junk{CLOSE}",
        f"{OPEN}read<arg_key>path</arg_key><arg_value>x<arg_key>ref</arg_key><arg_value>y</arg_value>{CLOSE}",
        f"{OPEN}read</arg_key>{CLOSE}",
        f"{OPEN}stop",
        f"{OPEN}read<arg_key>path</arg_key><arg_value>unfinished",
        f"{CLOSE} stray {TAGS[2]}",
        OPEN,
        "<iquest_tool_cal",
    ],
)
def test_what_is_no_call_stays_visible(text: str) -> None:
    around = f"a {text} b"
    for output in (around, as_events(around)):
        assert plain(parse_output(output, tools=TOOLS, reasoning=False)) == (around, "", [])


def test_a_block_inside_a_block_may_be_a_call() -> None:
    unfinished = f"{OPEN}read<arg_key>path</arg_key><arg_value>x"
    message = parse_output(unfinished + block("stop") + "</arg_value>", tools=TOOLS, reasoning=False)
    assert plain(message) == (unfinished + "</arg_value>", "", [("stop", "{}")])


@pytest.mark.parametrize("tools", [None, []])
def test_without_tools_nothing_is_parsed(tools: Any) -> None:
    text = "a" + block("read", ("path", "x")) + "</think><think>"
    assert plain(parse_output(text, tools=tools, reasoning=False)) == (text, "", [])
    assert stream_text([text[:3], text[3:]], tools, False) == [Delta("content", text[:3]), Delta("content", text[3:])]


def test_reasoning_ends_at_the_first_closing_tag_and_hides_calls() -> None:
    thought = f"so {block('stop')} <think>\n"
    text = thought + "</think>" + block("stop") + "</think><think>x"
    assert plain(parse_output(text, tools=TOOLS, reasoning=True)) == ("</think><think>x", thought, [("stop", "{}")])
    assert plain(parse_output(thought, tools=TOOLS, reasoning=True)) == ("", thought, [])
    assert plain(parse_output("<think>a</think>b", tools=TOOLS, reasoning=False)) == ("<think>a</think>b", "", [])
    assert plain(parse_output("a</think>b", tools=None, reasoning=True)) == ("b", "a", [])


def test_text_streams_at_once_and_calls_arrive_whole() -> None:
    output_parser = OutputParser(tools=TOOLS, reasoning=True)
    assert output_parser.feed_text("think <") == [Delta("reasoning", "think ")]
    assert output_parser.feed_text("b") == [Delta("reasoning", "<b")]
    assert output_parser.feed_text("</think>Hi") == [Delta("content", "Hi")]
    assert output_parser.feed_text(OPEN + "st") == []
    deltas = output_parser.feed_text(f"op{CLOSE}!")
    assert [delta.kind for delta in deltas] == ["tool_call", "content"]
    assert output_parser.finish() == []


def test_typed_markup_in_tokens_is_text() -> None:
    """An argument may hold the block's own markup, spelled in ordinary tokens."""
    value = f"x</arg_value>{CLOSE}{OPEN}stop{CLOSE}</think>"
    head, tail = block("read", ("path", "\0")).split("\0")
    ids = TOKENIZER.encode("thought " + "</think>", control=False)
    ids += TOKENIZER.encode("</think>" + head, control=True)
    ids += TOKENIZER.encode(value, control=False)
    ids += TOKENIZER.encode(tail, control=True)
    for pieces in ([ids], [[i] for i in ids]):
        detokenizer = Detokenizer(TOKENIZER)
        feeds = [detokenizer.feed(piece) for piece in pieces] + [detokenizer.flush()]
        control_tokens = TOKENIZER.control_tokens
        message = collect(stream_events(feeds, TOOLS, True, control_tokens=control_tokens))
        want = ("", "thought </think>", [("read", json.dumps({"path": value}))])
        assert plain(message) == want


def test_generated_output_parses_from_tokens_as_from_text() -> None:
    rng = fresh_random()
    for _ in range(100):
        text = random_output(rng)
        ids = TOKENIZER.encode(text, control=True)
        detokenizer = Detokenizer(TOKENIZER)
        feeds = [detokenizer.feed([i]) for i in ids] + [detokenizer.flush()]
        assert plain(collect(stream_events(feeds, TOOLS, True))) == oracle(TOKENIZER.decode(ids), True, True)

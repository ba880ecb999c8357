"""Qwen2.5's tool calls: `<tool_call>` and JSON, against an oracle of the json module, for every way of cutting."""

import json
import random
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cuq1.text import ChatTemplate, Delta, Event, OutputParser, Tokenizer, collect, hermes, parse_output, parser
from cuq1.text.formats import HERMES, IQUEST, CallFormat, call_format
from cuq1.text.jsontext import json_members
from cuq1.text.output import OutputStream
from tests.unit.test_text_parser import TOOLS, cut, cut_events, fresh_random, plain
from tools.checkpoint_qwen2 import qwen2_config
from tools.make_checkpoint import write_qwen2_checkpoint

OPEN, CLOSE = "<tool_call>", "</tool_call>"
NANO = Path(__file__).parents[2] / "cuq1" / "assets" / "iquest-q1-nano"


def call(name: str, arguments: str) -> str:
    return f'{OPEN}\n{{"name": "{name}", "arguments": {arguments}}}\n{CLOSE}'


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object_pairs_hook that keeps what a dict would lose."""
    return {"repeated": len(pairs) != len({key for key, _ in pairs}), "pairs": pairs}


def refuse(name: str) -> None:
    raise ValueError(name)


EXACT = json.JSONDecoder(object_pairs_hook=unique, parse_int=str, parse_float=str, parse_constant=refuse)


def oracle_call(text: str, at: int) -> tuple[int, str, str] | None:
    """(end, name, arguments) of the call whose opening tag ends at `at`, or None."""
    start = at + len(text[at:]) - len(text[at:].lstrip(" \t\r\n"))
    try:
        value, end = EXACT.raw_decode(text, start)
    except ValueError:
        return None
    close = re.compile(f"[ \t\r\n]*{CLOSE}").match(text, end)
    if (
        close is None
        or not isinstance(value, dict)
        or [key for key, _ in sorted(value["pairs"])]
        != [
            "arguments",
            "name",
        ]
    ):
        return None
    members = dict(value["pairs"])
    name, arguments = members["name"], members["arguments"]
    if name not in ("read", "stop") or not isinstance(arguments, dict) or arguments["repeated"]:
        return None
    # the arguments' own text: what the decoder reads behind their key
    for found in re.finditer(r":[ \t\r\n]*(?=\{)", text[start:end]):
        begin = start + found.end()
        with suppress(ValueError):
            inner, stop = EXACT.raw_decode(text, begin)
            if inner == arguments:
                return close.end(), name, text[begin:stop]
    raise AssertionError("the decoder found arguments that are not in the text")


def oracle(text: str) -> tuple[str, str, list[tuple[str, str]]]:
    """(content, "", calls): from each opening tag on, a call or not."""
    content, calls, at = "", [], 0
    while (start := text.find(OPEN, at)) >= 0:
        content += text[at:start]
        found = oracle_call(text, start + len(OPEN))
        if found is None:
            content, at = content + OPEN, start + len(OPEN)
        else:
            at, name, arguments = found
            calls.append((name, arguments))
    return content + text[at:], "", calls


PIECES = [
    *("text", "\n", " < ", "<tool", "日本", OPEN, CLOSE, "{", "}", '"', "\\", '{"', '":', ", ", "[", "]", "\x01", "1"),
    *('{"name": "stop", "arguments": {}}', '{"name": "read", "arguments": {"path": "', "<tool_call", 'a\\"b'),
]
ARGUMENTS = [
    "{}",
    '{"path": "a b"}',
    '{ "path" : "x\\n\\"y\\"", "count":1.10 }',
    '{"options": [{"a": 1e400, "a": 2}, null, "é日\\ud800"]}',
    '{"path": "<tool_call>{}</tool_call>"}',
    '{"path": "</tool_call>", "ref": "<tool_call>"}',
    '{"path": "a", "path": "b"}',
    '{"": 9}',
    '"{}"',
    "[]",
    "null",
    '{"path": NaN}',
    '{"path": "unfinished}',
    '{"path": "a\nb"}',
    '{"path": "a",}',
    "{\"path\": 'a'}",
]


def random_output(rng: random.Random) -> str:
    """Mostly calls, some with parts lost, doubled and mixed up."""
    parts: list[str] = []
    for _ in range(rng.randint(0, 4)):
        if rng.random() < 0.4:
            parts.append(rng.choice(PIECES))
            continue
        gap = rng.choice(["", "\n", " \n"])
        name = f'"name":{gap}"' + rng.choice(["read", "read", "stop", "other", "re\\u0061d"]) + '"'
        members = [name, f'"arguments": {rng.choice(ARGUMENTS)}', '"id": "a"'][: rng.choice([1, 2, 2, 2, 2, 2, 2, 3])]
        rng.shuffle(members)
        parts += [OPEN, gap, "{", gap, f"{gap},".join(members), gap, "}", gap, CLOSE]
    while parts and rng.random() < 0.3:
        i = rng.randrange(len(parts))
        parts[i] = rng.choice(["", parts[i] * 2, rng.choice(PIECES)])
    return "".join(parts)


def as_events(text: str) -> list[Event]:
    """The events of `text` where every tag is a control token."""
    pieces = re.split(f"({OPEN}|{CLOSE})", text)
    return [Event(piece, i % 2 == 1) for i, piece in enumerate(pieces) if piece]


def stream(feeds: Iterable[Any], *, form: CallFormat = HERMES, **more: Any) -> list[Delta]:
    output = parser.OutputParser(tools=TOOLS, reasoning=False, calls=form, **more)
    deltas = [
        delta for piece in feeds for delta in (output.feed_text if isinstance(piece, str) else output.feed)(piece)
    ]
    return deltas + output.finish()


def check_against_oracle(rounds: int) -> None:
    rng = fresh_random()
    calls = visible = 0
    for _ in range(rounds):
        text = random_output(rng)
        want = oracle(text)
        calls += len(want[2])
        visible += OPEN in want[0]
        events = as_events(text)
        single = ([text[:i], text[i:]] for i in range(len(text)))
        for pieces in ([text], list(text), [str(t) for t in cut(rng, text)], *single):
            assert plain(collect(stream(pieces))) == want
        for feeds in ([events], [[e] for e in events], cut_events(rng, events), cut_events(rng, events)):
            assert plain(collect(stream(feeds))) == want
            texts = [[Event(e.text) for e in feed] for feed in feeds]  # a tokenizer without such tokens
            assert plain(collect(stream(texts, control_tokens=()))) == want
    assert calls > rounds // 8
    assert visible > rounds // 20


def test_parsing_is_the_oracles_for_every_cut() -> None:
    check_against_oracle(250)


def _ends_in_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hermes, "_STRING", re.compile(r'[^"\\\x00-\x1f<]*+'))


def _forgets_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    own = hermes.HermesBlock._may_go_on

    def forgetful(self: Any, text: str) -> bool:
        self._escaped = False
        return own(self, text)

    monkeypatch.setattr(hermes.HermesBlock, "_may_go_on", forgetful)


def _any_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hermes.ToolCatalog, "__contains__", lambda self, name: True)


def _last_of_repeated_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hermes, "json_members", lambda text: (found := json_members(text)) and [*dict(found).items()])


def _rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hermes.HermesBlock, "arguments", property(lambda self: json.dumps(json.loads(self._arguments))))


def _lost_inner_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def abandon(self: Any, deltas: list[Delta]) -> None:
        parser._append(deltas, "content", "".join(event.text for event in self._block.events))
        self._block = None

    monkeypatch.setattr(parser.OutputParser, "_abandon_block", abandon)


FLAWS = [_ends_in_strings, _forgets_escapes, _any_tool, _last_of_repeated_keys, _rounded, _lost_inner_blocks]


@pytest.mark.parametrize("flaw", FLAWS)
def test_broken_parsers_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch, flaw: Callable[[pytest.MonkeyPatch], None]
) -> None:
    flaw(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        check_against_oracle(4000)


def test_a_files_own_tags_stay_in_the_argument() -> None:
    value = f'x = "{OPEN}"\n{CLOSE} {call("stop", "{}")}'
    text = call("read", json.dumps({"path": value}))
    for output in (text, as_events(text)):
        message = parse_output(output, tools=TOOLS, reasoning=False, calls=HERMES)
        assert plain(message) == ("", "", [("read", json.dumps({"path": value}))])


def test_a_call_follows_a_string_that_never_ends() -> None:
    broken = f'{OPEN}{{"name": "read", "arguments": {{"path": "x}}}}{CLOSE}'
    message = parse_output(broken + call("stop", "{}") + " b", tools=TOOLS, reasoning=False, calls=HERMES)
    assert plain(message) == (broken + " b", "", [("stop", "{}")])


def test_text_is_shown_as_soon_as_it_is_no_call() -> None:
    output = OutputParser(tools=TOOLS, reasoning=False, calls=HERMES)
    assert output.feed_text(f"a {OPEN}") == [Delta("content", "a ")]
    assert output.feed_text(' {"name"') == []
    assert output.feed_text(": 'r") == [Delta("content", f'{OPEN} {{"name": \'r')]
    assert output.feed_text("est " + call("stop", "{}")[:-3]) == [Delta("content", "est ")]
    assert [delta.kind for delta in output.feed_text("ll>!")] == ["tool_call", "content"]
    assert output.finish() == []


@pytest.mark.parametrize("inside", ['{"a":["', "{", '{"', '{"a\\"', '{",":[', ""])
def test_time_is_linear_whatever_is_nested(inside: str) -> None:
    text = (OPEN + inside) * 20_000 + "x" * 100_000
    started = time.perf_counter()
    assert plain(collect(stream([as_events(text)]))) == (text, "", [])
    long = call("read", json.dumps({"path": '"\\ ' * 100_000}))
    assert len(collect(stream([long[i : i + 3] for i in range(0, len(long), 3)])).tool_calls) == 1
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize(
    ("control", "template", "form"),
    [
        (["<|im_end|>", OPEN, CLOSE], "", HERMES),
        (["<iquest_tool_call>"], "", IQUEST),
        (["<|im_end|>"], "", IQUEST),
        (["<|im_end|>"], f"in {OPEN}{CLOSE}", HERMES),
        ([OPEN], "{{ '<iquest_tool_call>' }}", IQUEST),
        ([OPEN], "no calls", HERMES),
    ],
)
def test_template_and_tokenizer_say_which_format(control: list[str], template: str, form: CallFormat) -> None:
    assert call_format(control, template) is form


def test_checkpoints_have_their_own_format(tmp_path: Path) -> None:
    """The whole way: a template that asks for JSON, a tokenizer without tokens for the tags, and a stream of tokens."""
    folder = write_qwen2_checkpoint(tmp_path / "hf", qwen2_config("qwen2.5-coder-0.5b-tiny"))
    tokenizer = Tokenizer.load(folder, 512)
    template = ChatTemplate.load(folder, tokenizer)
    assert template.calls is HERMES
    nano = Tokenizer.load(NANO, 4096)
    assert ChatTemplate.load(NANO, nano).calls is call_format(nano.control_tokens) is IQUEST
    text = "Now: " + call("read", '{"path": "a.py"}')
    output = OutputStream(tokenizer, tools=TOOLS, calls=template.calls)
    shown = "".join(output.feed(token)[0] for token in tokenizer.encode(text, control=True)) + output.finish()[0]
    assert shown == output.text == text
    assert plain(output.message()) == ("Now: ", "", [("read", '{"path": "a.py"}')])


MEMBERS = [
    ('{"a": 1, "b" : [1, {"c": 2}] }', [("a", "1"), ("b", '[1, {"c": 2}]')]),
    ('{"a":"\\u0061:,}", "a": {}}', [("a", '"\\u0061:,}"'), ("a", "{}")]),
    ('{"\\u0061": null}', [("a", "null")]),
    (" {} ", []),
    ("[1]", None),
    ('{"a": 1', None),
    ('{"a": 01}', None),
    ('"a"', None),
]


@pytest.mark.parametrize(("text", "members"), MEMBERS)
def test_members_of_an_object(text: str, members: list[tuple[str, str]] | None) -> None:
    assert json_members(text) == members

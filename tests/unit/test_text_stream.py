"""Detokenizer and StopFilter: no half characters, no leaks, and no dependence on how the stream is cut."""

import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuq1.errors import TextError
from cuq1.text import Detokenizer, Event, StopFilter, Tokenizer
from cuq1.text import stream as stream_module

NANO = Path(__file__).parents[2] / "cuq1" / "assets" / "iquest-q1-nano"
TOKENIZER = Tokenizer.load(NANO, 4096)
BYTE_IDS = {TOKENIZER.token_bytes(i): i for i in range(4096) if len(TOKENIZER.token_bytes(i)) == 1}
T = TypeVar("T")

EXOTIC = [
    "👩🏽‍👩‍👧‍👦 family",
    "漢字かな交じり文",
    "e\u0301\u0323 combining, שָׁלוֹם, नमस्ते",
    "\U0001d518\U0001d52b four bytes, 🏴\U000e0067\U000e0062\U000e007f",
    "\ufeff\u200d\ufffd literal replacement",
    "plain ascii\r\n",
]
INVALID = [
    b"\xff",
    b"\xf0\x9f\x92",
    b"\xe6\x97",
    b"\xc3",
    b"\xed\xa0\x80",
    b"\x80\x80",
    b"\xf0\x9f\xe6\x97\xa5",
    b"\xc0\xaf",
]


def fresh_random() -> random.Random:
    """New random inputs in every run; a failure's captured output names the seed."""
    seed = random.randrange(2**32)
    print(f"random.Random({seed})")
    return random.Random(seed)


def cut(rng: random.Random, items: Sequence[T]) -> list[Sequence[T]]:
    """`items` cut at random into pieces, some of them empty."""
    marks = sorted(rng.randint(0, len(items)) for _ in range(rng.randint(0, 6)))
    return [items[a:b] for a, b in zip([0, *marks], [*marks, len(items)], strict=True)]


def joined(events: Iterable[Event]) -> str:
    return "".join(event.text for event in events)


def random_ids(rng: random.Random) -> list[int]:
    """Whole characters, characters spread over byte tokens, invalid bytes, control and random tokens."""
    ids: list[int] = []
    for _ in range(rng.randint(0, 8)):
        match rng.randrange(5):
            case 0:
                ids += TOKENIZER.encode(rng.choice(EXOTIC), control=False)
            case 1:
                ids += [BYTE_IDS[bytes([b])] for b in rng.choice(EXOTIC).encode()]
            case 2:
                ids += [BYTE_IDS[bytes([b])] for b in rng.choice(INVALID)]
            case 3:
                ids.append(rng.choice(list(TOKENIZER.control_tokens.values())))
            case _:
                ids += [rng.randrange(4096) for _ in range(rng.randint(1, 4))]
    return ids


def check_detokenizer(make: Callable[[Tokenizer], Any], rounds: int) -> None:
    rng = fresh_random()
    for _ in range(rounds):
        ids = random_ids(rng)
        whole = TOKENIZER.decode(ids)
        for pieces in ([ids], [[i] for i in ids], cut(rng, ids)):
            detokenizer = make(TOKENIZER)
            events = [event for piece in pieces for event in detokenizer.feed(piece)] + detokenizer.flush()
            assert joined(events) == whole
            assert all(event.text for event in events)
            controls = [event.text for event in events if event.control]
            assert controls == [TOKENIZER.control_text(i) for i in ids if TOKENIZER.control_text(i)]


def test_events_joined_are_the_decoded_text_for_every_cut() -> None:
    check_detokenizer(Detokenizer, 400)


def test_decoding_token_by_token_would_be_noticed() -> None:
    class Naive(Detokenizer):
        def feed(self, ids: Iterable[int]) -> list[Event]:
            return super().feed(ids) + super().flush()

    with pytest.raises(AssertionError):
        check_detokenizer(Naive, 400)


@pytest.mark.parametrize("text", EXOTIC)
def test_a_character_arrives_with_its_last_byte(text: str) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    for character in text:
        *head, last = character.encode()
        for byte in head:
            assert detokenizer.feed([BYTE_IDS[bytes([byte])]]) == []
        assert detokenizer.feed([BYTE_IDS[bytes([last])]]) == [Event(character)]
    assert detokenizer.flush() == []


def test_a_control_token_ends_an_unfinished_character() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    head = [BYTE_IDS[bytes([b])] for b in "日".encode()[:2]]
    think = TOKENIZER.control_tokens["<think>"]
    assert detokenizer.feed([*head, think]) == [Event("\ufffd"), Event("<think>", True)]
    assert detokenizer.feed(head) == []
    assert detokenizer.flush() == [Event("\ufffd")]
    assert detokenizer.flush() == []


def test_typed_and_real_control_tokens_differ_in_kind_only() -> None:
    typed = Detokenizer(TOKENIZER).feed(TOKENIZER.encode("</think>", control=False))
    real = Detokenizer(TOKENIZER).feed(TOKENIZER.encode("</think>", control=True))
    assert typed == [Event("</think>")]
    assert real == [Event("</think>", True)]


def expected_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The rule, literally: the first prefix that ends with a stop string, the longest such one being cut off."""
    for end in range(len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end - len(stop)], stop
    return text, None


def run_filter(stops: Sequence[str], pieces: Iterable[Iterable[Event]]) -> tuple[list[Event], str | None]:
    stop_filter = stream_module.StopFilter(stops)
    events = [event for piece in pieces for event in stop_filter.feed(piece)] + stop_filter.flush()
    return events, stop_filter.matched


def check_stops(rounds: int) -> None:
    rng = fresh_random()
    matches = 0
    for _ in range(rounds):
        alphabet = rng.choice(["ab", "abc", "<a>", "é日a"])
        text = "".join(rng.choices(alphabet, k=rng.randint(0, 24)))
        stops = ["".join(rng.choices(alphabet, k=rng.randint(1, 5))) for _ in range(rng.randint(0, 3))]
        want = expected_stop(text, stops)
        matches += want[1] is not None
        single_cuts = [[text[:i], text[i:]] for i in range(len(text))]
        for pieces in [[text], list(text), cut(rng, text), *single_cuts]:
            # A piece is a text event, or a control event of the same text: the match must not care.
            events = [[Event(piece, rng.random() < 0.3)] if piece else [] for piece in pieces]
            out, matched = run_filter(stops, events)
            assert (joined(out), matched) == want
    assert matches > rounds // 10


def test_stop_strings_match_the_rule_for_every_cut() -> None:
    check_stops(500)


@pytest.mark.parametrize("flaw", ["forgets across pieces", "restarts after a mismatch", "leaks what it should hold"])
def test_broken_stop_filters_would_be_noticed(monkeypatch: pytest.MonkeyPatch, flaw: str) -> None:
    class Forgetful(StopFilter):
        def feed(self, events: Iterable[Event]) -> list[Event]:
            for needle in self._needles:
                needle.length = 0
            return super().feed(events)

    class Leaky(StopFilter):
        def feed(self, events: Iterable[Event]) -> list[Event]:
            return super().feed(events) + super().flush()

    if flaw == "restarts after a mismatch":

        def step(needle: Any, character: str) -> bool:
            if needle.pattern[needle.length] != character:
                needle.length = 0
            needle.length += needle.pattern[needle.length] == character
            return bool(needle.length == len(needle.pattern))

        monkeypatch.setattr(stream_module._Needle, "step", step)
    else:
        monkeypatch.setattr(stream_module, "StopFilter", Forgetful if flaw == "forgets across pieces" else Leaky)
    with pytest.raises((AssertionError, IndexError)):
        check_stops(5000)


@settings(max_examples=200, deadline=None)
@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3))
def test_only_the_longest_possible_beginning_is_held(text: str, stops: list[str]) -> None:
    stop_filter = StopFilter(stops)
    out = ""
    for i, character in enumerate(text):
        out += joined(stop_filter.feed([Event(character)]))
        if stop_filter.matched is not None:
            break
        seen = text[: i + 1]
        held = max(k for k in range(len(seen) + 1) if any(stop.startswith(seen[len(seen) - k :]) for stop in stops))
        assert out == seen[: len(seen) - held]


def test_control_tokens_keep_their_kind_and_may_be_stop_strings() -> None:
    think_close = Event("</think>", True)
    assert run_filter(["</think>"], [[Event("a"), think_close, Event("b")]]) == ([Event("a")], "</think>")
    # Held because "think>x" may begin inside, released whole.
    assert run_filter(["think>x"], [[think_close], [Event("y")]]) == ([think_close, Event("y")], None)
    # Cut inside: what is left of a token is no token.
    assert run_filter(["think>x"], [[think_close], [Event("xy")]]) == ([Event("</")], "think>x")


def test_nothing_follows_a_match() -> None:
    stop_filter = StopFilter(["stop"])
    assert joined(stop_filter.feed([Event("a st"), Event("op b"), Event("c")])) == "a "
    assert stop_filter.feed([Event("d")]) == []
    assert stop_filter.flush() == []
    assert stop_filter.matched == "stop"


def test_without_stop_strings_everything_passes_at_once() -> None:
    stop_filter = StopFilter([])
    assert stop_filter.feed([Event("a"), Event("<think>", True)]) == [Event("a"), Event("<think>", True)]
    assert stop_filter.flush() == []


@pytest.mark.parametrize(
    ("stops", "message"), [([""], "string 0 is ''"), (["a", 3], "string 1 is 3"), ("ab", "as a list")]
)
def test_bad_stop_strings_are_refused(stops: Any, message: str) -> None:
    with pytest.raises(TextError, match=message):
        StopFilter(stops)

"""Tokenizer: golden ids, agreement with the library, and control tokens only where they are asked for."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from cuq1.errors import TextError
from cuq1.text import Tokenizer

NANO = Path(__file__).parents[2] / "cuq1" / "assets" / "iquest-q1-nano"
VOCAB = 4096
TOKENIZER = Tokenizer.load(NANO, VOCAB)
LIBRARY = tokenizers.Tokenizer.from_file(str(NANO / "tokenizer.json"))
CONTROL = sorted(TOKENIZER.control_tokens)

# Text with whole, halved and normalised spellings of control tokens between ordinary and exotic characters.
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(CONTROL),
        st.sampled_from(CONTROL).flatmap(lambda t: st.integers(1, len(t) - 1).map(lambda i: t[:i])),
        st.sampled_from(
            ["é", "e\u0301", "\u212a", "\u037e", "<\u0338", "\u226e", "日本", "👩‍👩‍👧", "  ", "\n\n\t", "1234"]
        ),
        st.text(max_size=8),
    ),
    max_size=8,
).map("".join)


def edited(tmp_path: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    """A folder with nano's tokenizer.json after `edit`."""
    document = json.loads((NANO / "tokenizer.json").read_text())
    edit(document)
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    return tmp_path


def test_golden_prompts_have_their_golden_ids() -> None:
    golden = np.load(NANO / "golden.npz")
    prompts = json.loads((NANO / "golden_prompts.json").read_text())
    assert set(prompts) == {"code", "chat", "run"}
    for name, prompt in prompts.items():
        ids = golden[f"{name}_ids"]
        assert TOKENIZER.encode(prompt, control=True) == ids.tolist()
        assert TOKENIZER.decode(ids) == prompt


@settings(max_examples=400, deadline=None)
@given(TEXTS)
def test_raw_encoding_is_the_librarys(text: str) -> None:
    assert TOKENIZER.encode(text, control=True) == LIBRARY.encode(text, add_special_tokens=False).ids


@settings(max_examples=400, deadline=None)
@given(TEXTS)
def test_text_encoding_has_no_control_token_and_loses_nothing(text: str) -> None:
    ids = TOKENIZER.encode(text, control=False)
    assert not set(ids) & set(TOKENIZER.control_tokens.values())
    assert TOKENIZER.decode(ids) == LIBRARY.normalizer.normalize_str(text)


def test_text_without_control_tokens_encodes_the_same_both_ways() -> None:
    for path in sorted(Path(json.__file__).parent.glob("*.py")):
        text = path.read_text()
        assert TOKENIZER.encode(text, control=False) == TOKENIZER.encode(text, control=True)


def test_the_librarys_own_switch_would_not_keep_unflagged_tokens_as_text(tmp_path: Path) -> None:
    """Negative control: `encode_special_tokens` leaves added tokens alone that are not flagged special."""

    def unflag(document: dict[str, Any]) -> None:
        for token in document["added_tokens"]:
            token["special"] = False

    folder = edited(tmp_path, unflag)
    text = "a <think> b <|iquest_end|>"
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.encode_special_tokens = True
    assert {0, 6} <= set(library.encode(text).ids)
    tokenizer = Tokenizer.load(folder, VOCAB)
    assert tokenizer.control_tokens == TOKENIZER.control_tokens
    assert tokenizer.encode(text, control=False) == TOKENIZER.encode(text, control=False)
    assert {0, 6} <= set(tokenizer.encode(text, control=True))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, VOCAB - 1), max_size=30))
def test_decoding_random_ids_is_the_librarys(ids: list[int]) -> None:
    assert TOKENIZER.decode(ids) == LIBRARY.decode(ids, skip_special_tokens=False)


def test_every_byte_is_reachable() -> None:
    single = {TOKENIZER.token_bytes(i) for i in range(VOCAB) if len(TOKENIZER.token_bytes(i)) == 1}
    assert single == {bytes([byte]) for byte in range(256)}


def test_control_tokens_decode_to_their_spelling() -> None:
    for text, token_id in TOKENIZER.control_tokens.items():
        assert TOKENIZER.decode([token_id]) == text
        assert TOKENIZER.control_text(token_id) == text
        assert TOKENIZER.encode(text, control=True) == [token_id]
    assert TOKENIZER.control_text(100) is None


def test_split_loses_nothing_and_finds_each_control_token() -> None:
    rng = random.Random(7)
    for _ in range(200):
        parts = [rng.choice([*CONTROL, "a", "<", ">", "</", "think"]) for _ in range(rng.randrange(8))]
        text = "".join(parts)
        pieces = list(TOKENIZER.split(text))
        assert "".join(piece for piece, _ in pieces) == text
        assert all(piece for piece, _ in pieces)
        assert [piece for piece, control in pieces if control] == [p for p in parts if p in TOKENIZER.control_tokens]


def test_ids_without_a_token_are_empty_and_ids_outside_are_refused() -> None:
    tokenizer = Tokenizer.load(NANO, VOCAB + 64)
    assert tokenizer.decode([VOCAB + 63]) == ""
    for bad in (-1, VOCAB + 64):
        with pytest.raises(TextError, match=f"{bad} is outside the vocabulary of {VOCAB + 64}"):
            tokenizer.decode([bad])


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff", "\ude00\ud83d"])
@pytest.mark.parametrize("control", [False, True])
def test_lone_surrogates_are_refused(text: str, control: bool) -> None:
    with pytest.raises(TextError, match=r"^the text holds the lone surrogate U\+D"):
        TOKENIZER.encode(text, control=control)


def test_abbreviations_among_added_tokens_stay_text(tmp_path: Path) -> None:
    """Runs of spaces are added tokens in some checkpoints; text must go on using them."""

    def add(document: dict[str, Any]) -> None:
        spaces = {"id": VOCAB, "content": "        ", "special": False, "normalized": False}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        document["added_tokens"].append(spaces | flags)

    folder = edited(tmp_path, add)
    tokenizer = Tokenizer.load(folder, VOCAB + 1)
    assert "        " not in tokenizer.control_tokens
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "def f():\n        return '<think>'"
    assert VOCAB in tokenizer.encode(text, control=False)
    assert 6 not in tokenizer.encode(text, control=False)
    assert tokenizer.encode(text, control=True) == library.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text, control=False)) == text


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    def limit(document: dict[str, Any]) -> None:
        document["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}

    tokenizer = Tokenizer.load(edited(tmp_path, limit), VOCAB)
    assert tokenizer.encode("one two three four five six", control=True) == TOKENIZER.encode(
        "one two three four five six", control=True
    )


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TextError, match=r"tokenizer\.json is missing: copy"):
        Tokenizer.load(tmp_path, VOCAB)


def test_a_file_that_cannot_be_read_is_not_missing(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(TextError, match=r"tokenizer\.json cannot be read .*: fetch"):
        Tokenizer.load(tmp_path, VOCAB)
    (tmp_path / "tokenizer.json").rmdir()
    (tmp_path / "tokenizer.json").symlink_to("nowhere")
    with pytest.raises(TextError, match=r"tokenizer\.json cannot be read .*: fetch"):
        Tokenizer.load(tmp_path, VOCAB)


@pytest.mark.parametrize("content", [b"", b"{", b'{"version": "1.0"}', b"\xff\xfe", b"[]"])
def test_a_broken_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TextError, match=r"tokenizer\.json cannot be read .*: fetch"):
        Tokenizer.load(tmp_path, VOCAB)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    shutil.copy(NANO / "tokenizer.json", tmp_path)
    whole = (tmp_path / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TextError, match="cannot be read"):
        Tokenizer.load(tmp_path, VOCAB)


def test_ids_beyond_the_vocabulary_are_refused_with_both_numbers() -> None:
    Tokenizer.load(NANO, VOCAB)
    with pytest.raises(TextError, match=r"token id 4095 .* vocab_size is 4095"):
        Tokenizer.load(NANO, VOCAB - 1)


@pytest.mark.parametrize(
    "edit",
    [
        lambda document: document.update(decoder=None),
        lambda document: document.update(decoder={"type": "Fuse"}),
        lambda document: document.update(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}),
    ],
)
def test_other_kinds_of_tokenizer_are_refused(tmp_path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    with pytest.raises(TextError, match="byte-level BPE only"):
        Tokenizer.load(edited(tmp_path, edit), VOCAB)


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_added_tokens_that_take_their_surroundings_are_refused(tmp_path: Path, flag: str) -> None:
    folder = edited(tmp_path, lambda document: document["added_tokens"][6].update({flag: True}))
    with pytest.raises(TextError, match="'<think>' sets lstrip"):
        Tokenizer.load(folder, VOCAB)


def test_merges_that_spell_a_control_token_are_refused_when_met(tmp_path: Path) -> None:
    def merge(document: dict[str, Any]) -> None:
        document["added_tokens"].append(
            document["added_tokens"][0] | {"id": document["model"]["vocab"]["re"], "content": "re"}
        )

    tokenizer = Tokenizer.load(edited(tmp_path, merge), VOCAB)
    with pytest.raises(TextError, match="merges plain text into 're'"):
        tokenizer.encode("re", control=False)

"""Text to token ids and back: byte-level BPE from a checkpoint's tokenizer.json.

The `tokenizers` library computes the BPE of a stretch of text. Which stretches
are text and which are control tokens is decided here, in `Tokenizer.split`,
and nowhere else: the library's instance that encodes text knows no added
tokens, so no spelling, normalisation or merge can reach a control token's id
unless the caller asked for `control=True`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Self

import tokenizers
from tokenizers import decoders, models

from cuq1.errors import TextError
from cuq1.text.source import TextSource, label, place, read_file


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's printable stand-in of each byte, as {character: byte}."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(0x100 + order): byte for order, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _alternatives(literals: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern for the leftmost, then longest, of the literals; None where there are none."""
    longest_first = sorted(literals, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


class Tokenizer:
    """A checkpoint's tokenizer. Neither BOS nor EOS is ever added.

    Control tokens are the added tokens of tokenizer.json, whether flagged
    special or not. An added token that is a single character or only
    whitespace is an abbreviation, not markup: it counts as ordinary text.
    """

    def __init__(self, text_model: tokenizers.Tokenizer, added: Mapping[str, int], vocab_size: int) -> None:
        """Takes ownership of `text_model`, which must know no added tokens; use `load`."""
        self._bpe = text_model
        self._added = dict(added)
        abbreviations = {text for text in added if len(text) == 1 or text.isspace()}
        self.vocab_size = vocab_size
        self.control_tokens: dict[str, int] = {text: i for text, i in added.items() if text not in abbreviations}
        self._literal_of = {i: text for text, i in added.items()}
        self._control_literal_of = {i: text for text, i in self.control_tokens.items()}
        self._all_added = _alternatives(added)
        self._abbreviations = _alternatives(abbreviations)
        # Filled as tokens are met: converting a whole vocabulary would cost start-up time.
        self._bytes_of: list[bytes | None] = [None] * vocab_size

    @classmethod
    def load(cls, source: TextSource, vocab_size: int) -> Self:
        """Reads tokenizer.json, of a folder or packed, for a model with `vocab_size` rows of logits.

        Raises TextError for a file that is missing, broken, not byte-level BPE,
        or that holds an id the model has no row for.
        """
        path, content = label(source, "tokenizer.json"), read_file(source, "tokenizer.json")
        if content is None:
            raise TextError(f"{path} is missing: copy it from the checkpoint's release {place(source)}")
        try:
            whole = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises bare Exception for every fault of the file
            raise TextError(f"{path} cannot be read ({error}): fetch the file again") from error
        if not isinstance(whole.model, models.BPE) or not isinstance(whole.decoder, decoders.ByteLevel):
            found = f"{type(whole.model).__name__} with decoder {type(whole.decoder).__name__}"
            raise TextError(f"{path} is {found}: cuq1 reads byte-level BPE only, so use this model's own tokenizer")
        highest = max(whole.get_vocab(with_added_tokens=True).values(), default=0)
        if highest >= vocab_size:
            raise TextError(
                f"{path} has token id {highest} but the model's vocab_size is {vocab_size}: "
                "use the tokenizer.json that belongs to this config.json"
            )
        added = {}
        for token_id, token in whole.get_added_tokens_decoder().items():
            if token.lstrip or token.rstrip or token.single_word:
                raise TextError(
                    f"{path}: added token {token.content!r} sets lstrip, rstrip or single_word, "
                    "which cuq1 does not compute: set all three to false"
                )
            added[token.content] = token_id
        # Shares the vocabulary and merges of `whole`; only the added tokens are left behind.
        text_model = tokenizers.Tokenizer(whole.model)
        if whole.normalizer is not None:
            text_model.normalizer = whole.normalizer
        if whole.pre_tokenizer is not None:
            text_model.pre_tokenizer = whole.pre_tokenizer
        return cls(text_model, added, vocab_size)

    def split(self, text: str) -> Iterator[tuple[str, bool]]:
        """Cuts `text` into (piece, is control token); pieces joined are `text`, none is empty."""
        for piece, token_id in self._cut(text, self._all_added):
            yield piece, token_id in self._control_literal_of

    def encode(self, text: str, *, control: bool) -> list[int]:
        """Token ids of `text`.

        control=True reads control tokens spelled in the text as such (raw
        prompts); control=False keeps them text and never returns a control id.
        Raises TextError where `text` holds a lone surrogate.
        """
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise TextError(
                    f"the text holds the lone surrogate U+{ord(text[error.start]):04X} at character {error.start}, "
                    "which is no Unicode text: decode its source as UTF-8"
                ) from error
        ids: list[int] = []
        for piece, token_id in self._cut(text, self._all_added if control else self._abbreviations):
            if token_id is not None:
                ids.append(token_id)
                continue
            piece_ids = self._bpe.encode(piece, add_special_tokens=False).ids
            if not self._control_literal_of.keys().isdisjoint(piece_ids):
                # Merges that spell out an added token: no checkpoint has them, but the promise must not rest on that.
                token = next(self._control_literal_of[i] for i in piece_ids if i in self._control_literal_of)
                raise TextError(f"tokenizer.json merges plain text into {token!r}: remove the merges that build it")
            ids += piece_ids
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`: control tokens as they are spelled, invalid UTF-8 as U+FFFD.

        An id in [0, vocab_size) that names no token is the empty text; an id
        outside raises TextError.
        """
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for, which may be part of a character."""
        if not 0 <= token_id < self.vocab_size:
            raise TextError(f"token id {token_id} is outside the vocabulary of {self.vocab_size}: check the ids")
        cached = self._bytes_of[token_id]
        if cached is None:
            cached = self._bytes_of[token_id] = self._convert(token_id)
        return cached

    def control_text(self, token_id: int) -> str | None:
        """The spelling of a control token, None for any other id."""
        return self._control_literal_of.get(token_id)

    def _convert(self, token_id: int) -> bytes:
        added = self._literal_of.get(token_id)
        if added is not None:
            return added.encode()
        token = self._bpe.id_to_token(token_id) or ""
        try:
            return bytes([_BYTE_OF[character] for character in token])
        except KeyError:  # a vocabulary entry written outside the byte alphabet stands for itself
            return token.encode()

    def _cut(self, text: str, pattern: re.Pattern[str] | None) -> Iterator[tuple[str, int | None]]:
        """Pieces of `text` between matches (None) and the matches (their id)."""
        start = 0
        for match in pattern.finditer(text) if pattern else ():
            if match.start() > start:
                yield text[start : match.start()], None
            yield match[0], self._added[match[0]]
            start = match.end()
        if start < len(text):
            yield text[start:], None

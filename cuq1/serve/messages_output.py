"""Anthropic Messages, to the wire: an answer's events as the events of a message, and as the message itself."""

import base64
import hashlib
import json
import math
from collections.abc import Iterator
from typing import Any

from cuq1.serve.agents import new_id, sealed
from cuq1.serve.errors import anthropic_body
from cuq1.serve.http import without_lone_surrogates
from cuq1.serve.request import ApiError, CallPiece, Event, Finished, Piece, Queued, Started

Data = dict[str, Any]

_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "stop_string": "stop_sequence",
    "tool_calls": "tool_use",
}
PING: Data = {"type": "ping"}


class MessageWriter:
    """The message that answers one request. `feed`, for every event of the answer, returns the message's events.

    Text that is nothing but whitespace is no block: agents leave such blocks out when they send the message back. What
    the model wrote is known by the ids of its calls.
    """

    def __init__(self, model: str, *, hide_thinking: bool = False) -> None:
        self._hide_thinking = hide_thinking
        self._id = new_id("msg")
        self._model = model
        self._content: list[Data] = []
        self._open: Data | None = None  # the block that is open, without its text
        self._text: list[str] = []
        self._space: list[str] = []
        self._started = Started(0, 0)
        self._end: Finished | None = None
        self._waits = False  # the queue has been heard of

    def feed(self, event: Event) -> list[Data]:
        """The events of one event of the answer."""
        return list(self._feed(event))

    def _feed(self, event: Event) -> Iterator[Data]:
        if isinstance(event, Queued):
            if self._waits:
                yield PING
            self._waits = True
        elif isinstance(event, Started):
            self._started = event
            yield {"type": "message_start", "message": self.message}
            yield PING
        elif isinstance(event, Piece):
            yield from self._piece(event)
        elif isinstance(event, CallPiece):
            yield from self._call(event)
        elif event.reason in ("error", "cancelled"):
            yield anthropic_body(event.error or ApiError("failed", "the answer was cancelled"))
        else:
            yield from self._finish(event)

    @property
    def message(self) -> Data:
        """The message so far; once it has ended, the body of an answer that isn't streamed."""
        reason = None if self._end is None else _STOP_REASONS[self._end.reason]
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": list(self._content),
            "stop_reason": reason,
            "stop_sequence": None if self._end is None else self._end.stop_string,
            "usage": self._usage(),
        }

    def _usage(self) -> Data:
        """Of all tokens of the prompt, each is counted once: as cached, or as input."""
        cached = self._started.cached_tokens
        usage: Data = {
            "input_tokens": self._started.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": 0 if self._end is None else self._end.completion_tokens,
        }
        if self._end is not None:
            usage["output_tokens_details"] = {"thinking_tokens": self._end.reasoning_tokens}
        return usage

    def _piece(self, piece: Piece) -> Iterator[Data]:
        kind = "thinking" if piece.kind == "reasoning" else "text"
        if self._open is None or self._open["type"] != kind:
            if kind == "text" and piece.text.isspace():
                self._space.append(piece.text)
                return
            yield from self._close()
            yield self._begin({"type": "text"} if kind == "text" else {"type": "thinking", "signature": ""}, kind)
        text = "".join(self._space) + piece.text
        self._space = []
        if kind == "thinking" and self._hide_thinking:
            self._text.append(text)
        else:
            yield self._write(kind, text)

    def _begin(self, block: Data, *empty: str) -> Data:
        self._open, self._text = block, []
        shown = block | dict.fromkeys(empty, "")
        return {"type": "content_block_start", "index": len(self._content), "content_block": shown}

    def _write(self, kind: str, text: str) -> Data:
        self._text.append(text)
        return self._delta({"type": f"{kind}_delta", kind: text})

    def _delta(self, delta: Data) -> Data:
        return {"type": "content_block_delta", "index": len(self._content), "delta": delta}

    def _close(self) -> Iterator[Data]:
        """End the open block, if there is one."""
        if self._open is None:
            return
        text, block = "".join(self._text), self._open
        if block["type"] == "thinking":
            hidden = self._hide_thinking
            signature = sealed(text) if hidden else _signature(text)
            block = block | {"thinking": "" if hidden else text, "signature": signature}
            yield self._delta({"type": "signature_delta", "signature": block["signature"]})
        else:
            block = block | {"text": text}
        yield from self._stop(block)

    def _stop(self, block: Data) -> Iterator[Data]:
        yield {"type": "content_block_stop", "index": len(self._content)}
        self._content.append(block)
        self._open = None

    def _call(self, call: CallPiece) -> Iterator[Data]:
        yield from self._close()
        self._space = []
        block = {"type": "tool_use", "id": tool_use_id(call.id), "name": call.name or ""}
        yield self._begin(block | {"input": {}})
        yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        yield from self._stop(block | {"input": parsed(call.arguments)})

    def _finish(self, end: Finished) -> Iterator[Data]:
        yield from self._close()
        if not any(block["type"] != "thinking" for block in self._content) and end.reason != "length":
            yield self._begin({"type": "text"}, "text")  # whoever asked reads the first text, be it empty
            if self._space:
                yield self._write("text", "".join(self._space))
            yield from self._close()
        self._end = end
        message = self.message
        delta = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
        yield {"type": "message_delta", "delta": delta, "usage": message["usage"]}
        yield {"type": "message_stop"}


def tool_use_id(call_id: str) -> str:
    """A call's id as this interface writes them; TurnMemory knows it by its end."""
    return "toolu_" + call_id.rpartition("_")[2]


def _signature(text: str) -> str:
    """Of thinking. Nobody checks it, but clients leave blocks without one out."""
    return base64.b64encode(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()).decode()


def parsed(arguments: str) -> Any:
    """A call's arguments as JSON can be sent: no half characters, and no number beyond the range of doubles."""
    return without_lone_surrogates(json.loads(arguments, parse_int=_integer, parse_float=_float))


def _integer(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:  # more digits than Python converts
        return _float(text)


def _float(text: str) -> float:
    number = float(text)
    largest = 1.7976931348623157e308
    return number if math.isfinite(number) else math.copysign(largest, number)

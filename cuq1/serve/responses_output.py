"""OpenAI Responses, to the wire: an answer's events as the events of a response, and as the response itself.

What agents act on is the complete item in `response.output_item.done` and the `response.completed` at the end. An
answer that the token limit cut ends in `response.completed` too, with the status incomplete inside: an agent takes a
`response.incomplete` for a broken connection, and asks again.
"""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from cuq1.serve.agents import new_id, sealed
from cuq1.serve.request import ApiError, CallPiece, ErrorKind, Event, Finished, Piece, Queued, Started, TokenInfo
from cuq1.serve.responses_input import Names

Data = dict[str, Any]

# What makes agents show a failure, or try again, as fits its cause.
_CODES: Mapping[ErrorKind, str] = {
    "too_long": "context_length_exceeded",
    "invalid": "invalid_prompt",
    "busy": "server_is_overloaded",
}


class ResponseWriter:
    """The response to one request. `begin`, `feed` for every event, and `fail` instead of an end, return its events."""

    def __init__(self, echo: Mapping[str, Any], names: Names, *, summary: bool = False, envelope: bool = False) -> None:
        """echo: fields of the request that the response repeats. summary: reasoning is sent as its own summary;
        envelope: and once more as encrypted_content."""
        self._echo, self._names = dict(echo), names
        self._summary, self._envelope = summary, envelope
        self._id = new_id("resp")
        self._created = int(time.time())
        self._sequence = 0
        self._output: list[Data] = []
        self._item: Data | None = None  # the one that is open
        self._text: list[str] = []  # its text
        self._logprobs: list[Data] = []
        self._space: list[tuple[str, tuple[TokenInfo, ...]]] = []  # whitespace that may be nothing but that
        self._under_way = False
        self._status = "in_progress"
        self._error: Data | None = None
        self._usage: Data | None = None
        self._started = Started(0, 0)

    def begin(self) -> list[Data]:
        """The first event."""
        return [self._event("response.created", response=self._response(brief=True))]

    def feed(self, event: Event) -> list[Data]:
        """The events of one event of the answer."""
        return list(self._feed(event))

    def fail(self, error: ApiError) -> list[Data]:
        """The end of an answer that failed."""
        self._status = "failed"
        self._error = {"code": _CODES.get(error.kind, "server_error"), "message": error.message}
        return [self._event("response.failed", response=self._response())]

    @property
    def response(self) -> Data:
        """The response so far; once it has ended, the body of an answer that isn't streamed."""
        return self._response()

    def _feed(self, event: Event) -> Iterator[Data]:
        if isinstance(event, Queued) or not self._under_way:
            self._under_way = True
            yield self._event("response.in_progress", response=self._response(brief=True))
        if isinstance(event, Started):
            self._started = event
        elif isinstance(event, Piece):
            yield from self._piece(event)
        elif isinstance(event, CallPiece):
            yield from self._close()
            yield from self._call(event)
        elif isinstance(event, Finished):
            yield from self._finish(event)

    def _piece(self, piece: Piece) -> Iterator[Data]:
        if piece.kind == "reasoning":
            if self._item is None or self._item["type"] != "reasoning":
                yield from self._close()
                yield from self._open_reasoning()
            yield from self._reason(piece.text)
            return
        if self._item is None or self._item["type"] != "message":
            if piece.text.isspace():
                self._space.append((piece.text, piece.tokens))
                return
            yield from self._open_message()
        yield self._write(piece.text, piece.tokens)

    def _open(self, item: Data) -> Data:
        self._item, self._text, self._logprobs = item, [], []
        return self._event("response.output_item.added", output_index=len(self._output), item=dict(item))

    def _open_reasoning(self) -> Iterator[Data]:
        yield self._open({"type": "reasoning", "id": new_id("rs"), "summary": [], "status": "in_progress"})
        if self._summary:
            part = {"type": "summary_text", "text": ""}
            yield self._item_event("response.reasoning_summary_part.added", summary_index=0, part=part)
        else:
            part = {"type": "reasoning_text", "text": ""}
            yield self._item_event("response.content_part.added", content_index=0, part=part)

    def _reason(self, text: str) -> Iterator[Data]:
        self._text.append(text)
        if self._summary:
            yield self._item_event("response.reasoning_summary_text.delta", summary_index=0, delta=text)
        else:
            yield self._item_event("response.reasoning_text.delta", content_index=0, delta=text)

    def _open_message(self) -> Iterator[Data]:
        """A message, with the whitespace that came before its first word."""
        yield from self._close()
        yield self._open(
            {"type": "message", "id": new_id("msg"), "role": "assistant", "status": "in_progress", "content": []}
        )
        yield self._item_event("response.content_part.added", content_index=0, part=_output_text("", []))
        for text, tokens in self._space:
            yield self._write(text, tokens)
        self._space = []

    def _write(self, text: str, tokens: tuple[TokenInfo, ...]) -> Data:
        logprobs = [logprob(token) for token in tokens]
        self._text.append(text)
        self._logprobs += logprobs
        return self._item_event("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _call(self, call: CallPiece) -> Iterator[Data]:
        """A call, whole: its arguments are known to be JSON of this tool only once they are complete."""
        self._space = []
        namespace, name = self._names.told(call.name or "")
        item: Data = {"type": "function_call", "id": new_id("fc"), "call_id": call.id, "name": name}
        if namespace is not None:
            item["namespace"] = namespace
        yield self._open(item | {"arguments": "", "status": "in_progress"})
        yield self._item_event("response.function_call_arguments.delta", delta=call.arguments)
        yield self._item_event("response.function_call_arguments.done", name=name, arguments=call.arguments)
        yield self._done(item | {"arguments": call.arguments, "status": "completed"})

    def _close(self, status: str = "completed") -> Iterator[Data]:
        """End the open item, if there is one."""
        if self._item is None:
            return
        text, item = "".join(self._text), self._item | {"status": status}
        if item["type"] == "message":
            part = _output_text(text, self._logprobs)
            yield self._item_event("response.output_text.done", content_index=0, text=text, logprobs=self._logprobs)
            yield self._item_event("response.content_part.done", content_index=0, part=part)
            yield self._done(item | {"content": [part]})
            return
        summary, part = {"type": "summary_text", "text": text}, {"type": "reasoning_text", "text": text}
        if self._summary:
            yield self._item_event("response.reasoning_summary_text.done", summary_index=0, text=text)
            yield self._item_event("response.reasoning_summary_part.done", summary_index=0, part=summary)
        else:
            yield self._item_event("response.reasoning_text.done", content_index=0, text=text)
            yield self._item_event("response.content_part.done", content_index=0, part=part)
        envelope = {"encrypted_content": sealed(text)} if self._envelope else {}
        yield self._done(item | {"summary": [summary] if self._summary else [], "content": [part], **envelope})

    def _done(self, item: Data) -> Data:
        event = self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._item = None
        return event

    def _finish(self, end: Finished) -> Iterator[Data]:
        self._usage = {
            "input_tokens": self._started.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self._started.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": end.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
            "total_tokens": self._started.prompt_tokens + end.completion_tokens,
        }
        if end.reason in ("error", "cancelled"):
            yield from self.fail(end.error or ApiError("failed", "the answer was cancelled"))
            return
        cut = end.reason == "length"
        yield from self._close("incomplete" if cut else "completed")
        if not any(item["type"] != "reasoning" for item in self._output) and not cut:
            yield from self._open_message()
            yield from self._close()
        self._status = "incomplete" if cut else "completed"
        yield self._event("response.completed", response=self._response())

    def _item_event(self, kind: str, **fields: Any) -> Data:
        assert self._item is not None
        return self._event(kind, item_id=self._item["id"], output_index=len(self._output), **fields)

    def _event(self, kind: str, **fields: Any) -> Data:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}

    def _response(self, *, brief: bool = False) -> Data:
        """`brief`: without what the request said at length, as an event that says little need not repeat it."""
        echo = self._echo | {"instructions": None, "tools": []} if brief else self._echo
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "status": self._status,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "output": [] if brief else list(self._output),
            "usage": self._usage,
            "background": False,
            "previous_response_id": None,
            "store": False,
            **echo,
        }


def _output_text(text: str, logprobs: list[Data]) -> Data:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def logprob(token: TokenInfo) -> Data:
    """A token's entry among a part's logprobs."""
    top = [
        {"token": each.bytes.decode("utf-8", "replace"), "bytes": list(each.bytes), "logprob": each.logprob}
        for each in token.top
    ]
    text = token.bytes.decode("utf-8", "replace")
    return {"token": text, "bytes": list(token.bytes), "logprob": token.logprob, "top_logprobs": top}

"""Tokens of one answer to the events that a dialect renders."""

from collections.abc import Iterator

from cuq1.sampling import Round
from cuq1.serve.job import Measures
from cuq1.serve.request import ApiError, CallPiece, Event, Finished, Generation, Piece, Reason, TokenInfo, TopToken
from cuq1.serve.turns import Call, TurnMemory
from cuq1.text import Delta, Tokenizer
from cuq1.text.formats import CallFormat
from cuq1.text.output import OutputStream


class Answering:
    """Feed it the rounds of an answer; `stopped` says that a stop string has ended it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        generation: Generation,
        measures: Measures,
        calls: CallFormat | None = None,
        turns: TurnMemory | None = None,
    ) -> None:
        """calls: how the model writes them; turns: where answers with calls are kept as they were written."""
        self._tokenizer = tokenizer
        self._stop_tokens = frozenset(generation.params.stop_tokens)
        self._with_logprobs = generation.logprobs is not None
        self._output = OutputStream(
            tokenizer,
            stops=generation.stops,
            tools=generation.tools or None,
            reasoning=generation.prompt.in_reasoning,
            calls=calls,
        )
        self._measures = measures
        self._turns, self._in_reasoning = turns, generation.prompt.in_reasoning
        self._calls = 0
        self._ids: list[int] = []
        self._infos: list[TokenInfo] = []  # of tokens whose text is held back

    @property
    def stopped(self) -> bool:
        return self._output.stopped is not None

    def feed(self, step: Round) -> list[Event]:
        """The events that a round settles."""
        measures = self._measures
        if not step.from_prompt:
            measures.rounds += 1
            measures.drafted += step.drafted
            measures.accepted += step.accepted
        events: list[Event] = []
        for place, token in enumerate(step.tokens):
            measures.completion_tokens += 1
            if token in self._stop_tokens:
                break  # the last one, and no text
            self._ids.append(token)
            measures.reasoning_tokens += self._output.in_reasoning
            if self._with_logprobs and place < len(step.logprobs):
                self._infos.append(self._info(token, step, place))
            events += self._events(self._output.feed(token)[1])
            if self.stopped:
                break
        return events

    def finish(self, reason: Reason, error: ApiError | None = None) -> list[Event]:
        """What was held back, and the end."""
        events = list(self._events(self._output.finish()[1]))
        if self._calls:
            self._remember()
            reason = "tool_calls" if reason == "stop" else reason
        measures = self._measures
        end = Finished(
            reason="stop_string" if self.stopped and error is None else reason,
            stop_string=self._output.stopped,
            completion_tokens=measures.completion_tokens,
            reasoning_tokens=measures.reasoning_tokens,
            accepted=measures.mean_accepted,
            error=error,
            ids=tuple(self._ids),
        )
        return [*events, end]

    def _remember(self) -> None:
        """Keep what was written under its calls' ids. A stop string leaves less in the message than in the tokens."""
        if self._turns is None or self.stopped:
            return
        message = self._output.message()
        calls = [Call(call.id, call.name, call.arguments) for call in message.tool_calls]
        self._turns.remember(calls, message.content, message.reasoning, self._ids, in_reasoning=self._in_reasoning)

    def _events(self, deltas: list[Delta]) -> Iterator[Event]:
        measures = self._measures
        counts = measures.completion_tokens, measures.reasoning_tokens, measures.mean_accepted
        for delta in deltas:
            infos, self._infos = tuple(self._infos), []
            if delta.tool_call is not None:
                call = delta.tool_call
                self._calls += 1
                yield CallPiece(call.index, call.id, call.name, call.arguments, call.raw, infos, *counts)
            elif delta.kind != "tool_call":
                yield Piece(delta.kind, delta.text, infos, *counts)

    def _info(self, token: int, step: Round, place: int) -> TokenInfo:
        entry = step.logprobs[place]
        top = tuple(TopToken(id_, self._tokenizer.token_bytes(id_), logprob) for id_, logprob in entry.top)
        return TokenInfo(token, self._tokenizer.token_bytes(token), entry.logprob, top)

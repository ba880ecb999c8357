"""A request's way through its grammar: reasoning, free text, the grammar's own part, the end."""

import enum
from dataclasses import dataclass

import llguidance
import numpy as np

from cuq1.errors import RequestError
from cuq1.sampling import Allowed


class Phase(enum.Enum):
    """REASONING ends with its tag. In FREE text a call's opening tag begins a GRAMMAR part. END: stop tokens alone."""

    REASONING = enum.auto()
    FREE = enum.auto()
    GRAMMAR = enum.auto()
    END = enum.auto()


@dataclass(frozen=True)
class Rules:
    """What does not depend on the schema.

    ending and going: bool [vocab], the stop tokens, and all others. think_close and opening: the ids of the tags that
    end reasoning and begin a call in free text, None without. parallel: after a call there may be another.
    """

    stop_tokens: tuple[int, ...]
    ending: Allowed
    going: Allowed
    think_close: int | None
    opening: int | None
    parallel: bool


class GrammarMask:
    """cuq1.sampling.Mask of one request."""

    def __init__(
        self,
        rules: Rules,
        whole: llguidance.LLMatcher | None,
        call: llguidance.LLMatcher | None,
        phase: Phase,
    ) -> None:
        """`whole` and `call` stay as they are; the one is the grammar of the answer, the other of a call's rest."""
        if phase is Phase.REASONING and rules.think_close is None:
            raise RequestError("this model's reasoning ends without a token of its own: ask for an answer without it")
        self._rules = rules
        self._call = call
        self._matcher = None if whole is None else whole.deep_copy()
        self._phase = phase
        # Before each token: the phase and the matcher, and whether that was told of the token.
        self._history: list[tuple[Phase, llguidance.LLMatcher | None, bool]] = []

    def allowed(self) -> Allowed | None:
        """As Mask.allowed. Raises RequestError where the library gives up on the grammar."""
        match self._phase:
            case Phase.REASONING:
                return self._rules.going  # an end here would leave the answer without its grammar's part
            case Phase.FREE:
                return None
            case Phase.END:
                return self._rules.ending
        assert self._matcher is not None
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check(self._matcher)
        return np.unpackbits(bits, count=len(self._rules.going), bitorder="little").view(np.bool_)

    def push(self, token: int) -> None:
        # A stop token is not the matcher's: it does not count one where its grammar is complete, and cannot go back.
        ends = token in self._rules.stop_tokens
        self._history.append((self._phase, self._matcher, self._phase is Phase.GRAMMAR and not ends))
        match self._phase:
            case Phase.REASONING if token == self._rules.think_close:
                self._phase = Phase.FREE if self._matcher is None else Phase.GRAMMAR
            case Phase.FREE if token == self._rules.opening:
                assert self._call is not None
                self._phase, self._matcher = Phase.GRAMMAR, self._call.deep_copy()
            case Phase.FREE | Phase.GRAMMAR if ends:
                self._phase = Phase.END
            case Phase.GRAMMAR:
                self._advance(token)

    def pop(self, count: int) -> None:
        for _ in range(count):
            phase, matcher, told = self._history.pop()
            if told and matcher is not None:
                matcher.rollback(1)
                self._check(matcher)
            self._phase, self._matcher = phase, matcher

    def _advance(self, token: int) -> None:
        assert self._matcher is not None
        self._matcher.consume_token(token)
        self._check(self._matcher)
        if self._rules.opening is not None and self._matcher.is_stopped():  # a call in free text is complete
            self._phase = Phase.FREE if self._rules.parallel else Phase.END

    def _check(self, matcher: llguidance.LLMatcher) -> None:
        if matcher.is_error():
            raise RequestError(
                "the answer's grammar became too complex to follow: simplify the schema, above all its patterns"
            )

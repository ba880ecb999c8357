"""Answers that follow a grammar: JSON of a schema, tool calls that must come, arguments that must fit.

    grammars = Grammars(tokenizer, stop_tokens, calls)          # one a server
    constraint = grammars.constraint(schema=…, tools=…, choice="required")
    engine.decode(params, mask=constraint.mask(prompt.in_reasoning))

The grammars are llguidance's. Reasoning comes before the answer, without a grammar, where the prompt ends in it; then
the whole answer is the grammar's, and once it is complete only a stop token is allowed. What is cut short by max_tokens
is the beginning of such an answer.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import llguidance
import numpy as np

from cuq1.serve.call_grammar import MAX_GRAMMAR, UnsupportedError, call_grammar
from cuq1.serve.grammar_mask import GrammarMask, Phase, Rules
from cuq1.serve.request import ApiError
from cuq1.text import Tokenizer
from cuq1.text.formats import HERMES, CallFormat, call_format
from cuq1.text.markup import THINK_CLOSE

MAX_SCHEMA_BYTES = 256 * 1024
MAX_SCHEMA_DEPTH = 64
MAX_PATTERN = 2048  # characters of one regular expression
MAX_REPEAT = 10_000  # of what a schema counts: a grammar grows with it
CACHED = 64  # compiled grammars that are kept: an agent sends the same ones every turn

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# One space, or a line break and indentation: without a bound, a model could go on with whitespace for ever.
_WHITESPACE = {"whitespace_pattern": r"(?: |\n(?: {0,32}|\t{0,8}))"}
_LIMITS = llguidance.LLParserLimits(verbose_errors=False)  # a schema is its sender's, and belongs into no log

Choice = Literal["auto", "none", "required"]


@dataclass(frozen=True)
class Constraint:
    """A compiled grammar of an answer, for any number of requests."""

    rules: Rules
    matcher: llguidance.LLMatcher | None  # of the whole answer; None where only calls are constrained
    call: llguidance.LLMatcher | None  # of what follows a call's opening tag in free text

    def mask(self, in_reasoning: bool) -> GrammarMask:
        """For one request, whose prompt ends in reasoning or not."""
        phase = Phase.REASONING if in_reasoning else Phase.FREE if self.matcher is None else Phase.GRAMMAR
        return GrammarMask(self.rules, self.matcher, self.call, phase)


class Grammars:
    """Compiles what requests ask for, with one tokenizer. It may be called from any thread; compiling takes a while."""

    def __init__(self, tokenizer: Tokenizer, stop_tokens: Sequence[int], calls: CallFormat | None = None) -> None:
        """stop_tokens: what ends an answer, one at least; calls: the chat template's format, else the tokenizer's."""
        if not stop_tokens:
            raise ValueError("a grammar needs a stop token to end an answer with")
        self._control = tokenizer.control_tokens
        self._calls = calls or call_format(self._control)
        self._tokenizer = tokenizer
        self._stop_tokens = tuple(stop_tokens)
        self._lock = threading.Lock()
        self._library: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()

    def constraint(
        self,
        *,
        schema: Mapping[str, Any] | bool | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        choice: Choice | Mapping[str, str] = "auto",
        parallel: bool = True,
        param: str = "response_format",
    ) -> Constraint | None:
        """What a request's fields ask of the answer; None where it is free.

        schema: JSON schema of the content ({"type": "object"} for any JSON object), None for text. tools: as
        `check_tools` returns them; those with "strict" are called with arguments of their schema only. choice: auto,
        none, required, or {"name": NAME}, which one call of that tool answers. parallel: several calls are allowed.
        param: the schema's field, named where it is refused. Raises ApiError("invalid").

        With a choice of required or a name the answer is calls and nothing else. Otherwise, with tools and a schema,
        it is either JSON or calls.
        """
        forced = choice == "required" or isinstance(choice, Mapping)
        if isinstance(choice, Mapping):
            name, parallel = choice["name"], False
            tools = [tool for tool in tools if tool["function"]["name"] == name]
            if not tools:
                raise ApiError(
                    "invalid", f"tool_choice names the tool {name!r}, which is not among tools", "tool_choice"
                )
        if forced and not tools:
            raise ApiError("invalid", f"tool_choice is {choice!r}, and the request has no tools", "tool_choice")
        calling = choice != "none" and bool(tools)
        strict = any(tool["function"].get("strict") for tool in tools)
        if schema is None and not (calling and (forced or strict)):
            return None
        json_rule = None if schema is None or forced else self._json_rule(schema, param)
        if not calling:
            return Constraint(self._rules(parallel), self._compile(f"start: answer\n{json_rule}", param), None)
        self._check_tools(tools)
        try:
            return self._calling(tools, json_rule, forced, parallel, loose=False)
        except ApiError:
            if all(tool["function"].get("strict") for tool in tools):
                raise
            return self._calling(tools, json_rule, forced, parallel, loose=True)

    def _calling(
        self, tools: Sequence[Mapping[str, Any]], json_rule: str | None, forced: bool, parallel: bool, *, loose: bool
    ) -> Constraint:
        """An answer of calls alone, of calls or JSON, or of calls within text."""
        try:
            calls = call_grammar(
                tools, self._control, hermes=self._calls is HERMES, whitespace=_WHITESPACE, loose=loose
            )
        except UnsupportedError as error:
            raise ApiError("invalid", str(error), "tools") from None
        if json_rule is not None:
            text = f"{calls.whole(parallel, alternative='answer')}{json_rule}"
        elif forced:
            text = calls.whole(parallel)
        else:
            rules = self._rules(parallel, opening=self._control[calls.opening])
            return Constraint(rules, None, self._compile(calls.rest_alone(), "tools"))
        return Constraint(self._rules(parallel), self._compile(text, "tools"), None)

    def _rules(self, parallel: bool, opening: int | None = None) -> Rules:
        ending = np.zeros(self._tokenizer.vocab_size, np.bool_)
        ending[list(self._stop_tokens)] = True
        return Rules(self._stop_tokens, ending, ~ending, self._control.get(THINK_CLOSE), opening, parallel)

    def _json_rule(self, schema: Mapping[str, Any] | bool, param: str) -> str:
        if not isinstance(schema, Mapping):
            if schema is not True:
                raise ApiError("invalid", f"{param}: the schema must be an object that allows something", param)
            schema = {}
        check_schema(schema, param)
        return f"answer: %json {json.dumps({**schema, 'x-guidance': _WHITESPACE})}\n"

    def _check_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        for tag in sorted(self._calls.markup):
            if tag not in self._control:
                raise ApiError("invalid", f"this model has no token {tag}, so its calls cannot be enforced", "tools")
        for i, tool in enumerate(tools):
            check_schema(tool["function"].get("parameters") or {}, f"tools[{i}].function.parameters")

    def _compile(self, lark: str, param: str) -> llguidance.LLMatcher:
        if len(lark) > MAX_GRAMMAR:
            raise ApiError("invalid", f"{param}: the schemas are too large together: leave some out", param)
        with self._lock:
            if lark in self._compiled:
                self._compiled.move_to_end(lark)
                return self._compiled[lark]
            if self._library is None:
                self._library = _library_tokenizer(self._tokenizer, self._stop_tokens)
            library = self._library
        matcher = llguidance.LLMatcher(
            library, llguidance.LLMatcher.grammar_from_lark(lark), log_level=0, limits=_LIMITS
        )
        if not matcher.is_error():
            begun = matcher.deep_copy()  # some schemas are refused at their first token only
            begun.compute_bitmask()
        if matcher.is_error() or begun.is_error():
            reason = _reason(matcher if matcher.is_error() else begun)
            raise ApiError("invalid", f"{param}: this schema cannot be enforced ({reason})", param)
        with self._lock:
            self._compiled[lark] = matcher
            if len(self._compiled) > CACHED:
                self._compiled.popitem(last=False)
        return matcher


def check_schema(schema: Any, param: str) -> None:
    """Bounds that every schema has to keep. Raises ApiError("invalid") for what is too large, too deep or too long."""
    stack: list[tuple[Any, int]] = [(schema, 0)]
    while stack:
        value, depth = stack.pop()
        if depth > MAX_SCHEMA_DEPTH:
            raise ApiError("invalid", f"{param}: the schema is nested deeper than {MAX_SCHEMA_DEPTH} levels", param)
        if isinstance(value, Mapping):
            keyed = value.get("patternProperties")
            patterns = [value.get("pattern"), *(keyed if isinstance(keyed, Mapping) else ())]
            if any(isinstance(one, str) and len(one) > MAX_PATTERN for one in patterns):
                raise ApiError("invalid", f"{param}: a pattern is longer than {MAX_PATTERN} characters", param)
            for name in _COUNTS:
                count = value.get(name)
                if isinstance(count, int | float) and count > MAX_REPEAT:
                    raise ApiError("invalid", f"{param}: {name} is above {MAX_REPEAT}", param)
            stack += [(item, depth + 1) for item in value.values()]
        elif isinstance(value, list):
            stack += [(item, depth + 1) for item in value]
    if len(json.dumps(schema)) > MAX_SCHEMA_BYTES:
        raise ApiError("invalid", f"{param}: the schema is larger than {MAX_SCHEMA_BYTES // 1024} KiB", param)


def _reason(matcher: llguidance.LLMatcher) -> str:
    """The library's error as part of a sentence."""
    line = matcher.get_error().strip().splitlines()[0]
    return line if len(line) <= 200 else line[:200] + "…"


class _Wrapped:
    """A tokenizer as the library asks for it."""

    def __init__(self, tokenizer: Tokenizer, stop_tokens: Sequence[int]) -> None:
        self.eos_token_id = stop_tokens[0]
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.control_tokens.values())
        self._tokenizer = tokenizer
        self._bytes = {self.tokens[i]: i for i in range(tokenizer.vocab_size - 1, -1, -1)}

    def __call__(self, text: str | bytes) -> list[int]:
        """Token ids of what a grammar forces: the tokenizer's, where they spell it exactly."""
        if isinstance(text, bytes):
            text = text.decode()
        raw = text.encode()
        ids = self._tokenizer.encode(text, control=False)
        if b"".join(self.tokens[i] for i in ids) != raw:  # normalised on the way
            ids = [self._bytes[bytes([byte])] for byte in raw]
        return ids


def _library_tokenizer(tokenizer: Tokenizer, stop_tokens: Sequence[int]) -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(_Wrapped(tokenizer, stop_tokens)),
        n_vocab=tokenizer.vocab_size,
        eos_token=list(stop_tokens),
        slices=llguidance.LLTokenizer.json_slices(),
    )

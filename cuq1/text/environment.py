"""The Jinja environment that chat templates are written for, as the transformers library sets it up.

The only module that imports Jinja, and itself imported only where a template is
loaded: raw prompts need not pay the tens of milliseconds.
"""

import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cuq1.errors import TextError
from cuq1.text.guard import InputGuard
from cuq1.text.jsontext import refuse_constant

# The name under which a rendering's InputGuard reaches the filters; nothing in it is secret from the template.
_GUARD = "_input_guard"
_DUMPED_ARGUMENTS = re.compile(r"arguments\s*\|\s*tojson")


class _RefusalError(jinja2.TemplateError):
    """The template called raise_exception."""


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks training targets, renders as its body."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own interface)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _ExactNumber(float):
    """A JSON number that Python would round or refuse, with the digits that were written."""

    written: str

    def __new__(cls, written: str) -> "_ExactNumber":
        number = super().__new__(cls, written)
        number.written = written
        return number

    def __str__(self) -> str:
        return self.written


def _integer(written: str) -> int | _ExactNumber:
    try:
        return int(written) if written != "-0" else _ExactNumber(written)
    except ValueError:  # more digits than Python converts
        return _ExactNumber(written)


def _float(written: str) -> float:
    number = float(written)
    return number if repr(number) == written else _ExactNumber(written)


def _read_json(text: str) -> Any:
    """The value of a JSON text, for a template: numbers keep the digits that were written."""
    return json.loads(text, parse_int=_integer, parse_float=_float, parse_constant=refuse_constant)


@jinja2.pass_context
def _fromjson(context: Context, text: str) -> Any:
    """The value of a JSON text. Strings are marked anew: an escape may have hidden a control token until now."""
    guard: InputGuard = context[_GUARD]
    return guard.protect(_read_json(guard.strip(text)))


@jinja2.pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON unsorted, non-ASCII and HTML characters kept, numbers as they were written."""
    guard: InputGuard = context[_GUARD]
    text = json.dumps(
        _numbers_as_marked_strings(value, guard.number_mark),
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    for mark in (guard.mark, guard.number_mark):
        text = text.replace(f"\\u{ord(mark):04x}", mark)
    return re.sub(f'"{guard.number_mark}(.*?){guard.number_mark}"', r"\1", text)


def _numbers_as_marked_strings(value: Any, mark: str) -> Any:
    if isinstance(value, _ExactNumber):
        return f"{mark}{value.written}{mark}"
    if isinstance(value, dict):
        return {key: _numbers_as_marked_strings(item, mark) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_numbers_as_marked_strings(item, mark) for item in value]
    return value


def _raise_exception(message: str) -> NoReturn:
    raise _RefusalError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class Template:
    """A compiled chat template, called `name` in messages."""

    def __init__(self, name: str, source: str) -> None:
        """Raises TextError where `source` is no template."""
        self._name = name
        # It takes a call's arguments for an object, and would put a string with one, as clients send it, into quotes.
        self._wants_objects = _DUMPED_ARGUMENTS.search(source) is not None and "fromjson" not in source
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.filters["fromjson"] = _fromjson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise TextError(f"{name} is no valid chat template ({line}{error}): fetch the file again") from error

    def adapted(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Checked messages, with the arguments of calls in the form that this template can write."""
        if not self._wants_objects:
            return messages
        return [
            {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}
            if message.get("tool_calls")
            else message
            for message in messages
        ]

    def render(self, variables: Mapping[str, Any], guard: InputGuard) -> str:
        """The text of the template, marks of `guard` included. Raises TextError where the template fails."""
        try:
            return self._template.render({**variables, _GUARD: guard})
        except _RefusalError as error:
            problem = _one_line(guard.strip(str(error)))
            raise TextError(f"{self._name} refuses the messages ({problem}): change them accordingly") from error
        except Exception as error:  # a template is a program from elsewhere, and may fail in any way
            problem = _one_line(guard.strip(f"{type(error).__name__}: {error}"))
            raise TextError(
                f"{self._name} fails on these messages ({problem}): change the messages, or repair the template"
            ) from error


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    if not isinstance(function["arguments"], str):
        return call
    return {**call, "function": {**function, "arguments": _read_json(function["arguments"])}}


def _one_line(message: str) -> str:
    """`message` fit to stand inside a sentence."""
    return " ".join(message.split()).rstrip(".")

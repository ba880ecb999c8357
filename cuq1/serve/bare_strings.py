"""The strings that a JSON schema allows, bare instead of quoted, as a terminal of a Lark grammar."""

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import llguidance

ANYTHING = "/(?s:.*)/"
_SURE = r"/[^\x1c-\x1f\x{85}\x{feff}]*/"  # no character that is whitespace for some notations of patterns alone
_DEPTH = 20
_VISITS = 2000  # of parts of a schema, those that are referred to several times counted as often
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,30}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,5}}"
_TO_30, _TO_31 = "(0[1-9]|[12][0-9]|30)", "(0[1-9]|[12][0-9]|3[01])"
_DATE = (
    rf"([1-9][0-9]{{3}}-((0[13578]|1[02])-{_TO_31}|(0[469]|11)-{_TO_30}|02-(0[1-9]|1[0-9]|2[0-8]))"
    "|[1-9][0-9](0[48]|[2468][048]|[13579][26])-02-29)"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_PLAIN = "a-zA-Z0-9._~-"
_FEW = "[0-9]{1,4}"
# Strings of JSON Schema's formats: all that are usual, if not all that there are.
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P({_FEW}W|({_FEW}Y)?({_FEW}M)?{_FEW}D(T{_FEW}S)?|T({_FEW}H)?({_FEW}M)?{_FEW}S)",
    "email": rf"[A-Za-z0-9_+-]{{1,32}}(\.[A-Za-z0-9_+-]{{1,32}}){{0,3}}@{_LABEL}(\.{_LABEL}){{0,3}}\.[A-Za-z]{{2,10}}",
    "hostname": _HOST,
    "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
    "ipv6": "(([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}|([0-9a-f]{1,4}:){1,6}:[0-9a-f]{1,4}|::[0-9a-f]{1,4}|::)",
    "uuid": "[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}",
    "uri": rf"(https?|ftp):\/\/{_HOST}(:[1-9][0-9]{{0,3}})?(\/[{_PLAIN}]{{0,64}}){{0,8}}(\?[=&{_PLAIN}]{{0,200}})?",
}
_UNKNOWN = ("not", "if", "$dynamicRef", "unevaluatedItems", "contentEncoding", "contentSchema")


class UnsupportedError(Exception):
    """What of a schema no grammar expresses, as the rest of a sentence."""


def string_terminal(schema: Any, root: Any, depth: int = 0, visits: list[int] | None = None) -> str | None:
    """The expression of a terminal that matches these strings; None where there are none.

    root: what references point into. Raises UnsupportedError.
    """
    visits = visits or [0]
    visits[0] += 1
    if depth > _DEPTH or visits[0] > _VISITS:
        raise UnsupportedError("its schema refers to itself, or to too much: write the type out")
    if schema is True:
        return ANYTHING
    if not isinstance(schema, Mapping):
        return None
    if found := [key for key in _UNKNOWN if key in schema]:
        raise UnsupportedError(f"{found[0]} cannot be enforced: leave it out")
    if "type" in schema and "string" not in _listed(schema["type"]):
        return None
    parts: list[str | None] = []
    if "enum" in schema:
        parts.append(_literals(schema["enum"]))
    if "const" in schema:
        parts.append(_literals([schema["const"]]))
    if isinstance(schema.get("pattern"), str):
        parts.append(_pattern(schema["pattern"]))
    least, most = _length(schema.get("minLength", 0)), _length(schema.get("maxLength"))
    if least or most is not None:
        parts.append(f"/(?s:.{{{least or 0},{'' if most is None else most}}})/")
    if "format" in schema:
        pattern = FORMATS.get(schema["format"]) if isinstance(schema["format"], str) else None
        if pattern is None:
            raise UnsupportedError(f"the format {schema['format']!r} cannot be enforced: use a pattern")
        parts.append(f"/{pattern}/")
    if "$ref" in schema:
        parts.append(string_terminal(resolve(schema["$ref"], root), root, depth + 1, visits))
    parts += [string_terminal(part, root, depth + 1, visits) for part in _listed(schema.get("allOf", []))]
    for union in ("anyOf", "oneOf"):  # for strings of one schema alone, oneOf's parts seldom overlap
        if union in schema:
            choices = [string_terminal(part, root, depth + 1, visits) for part in _listed(schema[union])]
            known = [choice for choice in choices if choice is not None]
            if union == "oneOf" and len(known) > 1:
                raise UnsupportedError("oneOf of several strings cannot be enforced: use anyOf")
            parts.append(" | ".join(f"({choice})" for choice in known) or None)
    if None in parts:
        return None
    return " & ".join(f"({part})" for part in parts) or ANYTHING


def resolve(reference: Any, root: Any) -> Any:
    """The schema that a JSON pointer within `root` points to. Raises UnsupportedError for any other."""
    if not isinstance(reference, str) or reference[:1] != "#" or reference[1:2] not in ("", "/"):
        raise UnsupportedError(f"the reference {reference!r} leads out of the schema: write the type out")
    target = root
    for step in unquote(reference[1:]).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, Mapping) and name in target:
            target = target[name]
        elif isinstance(target, list) and name.isdecimal() and int(name) < len(target):
            target = target[int(name)]
        else:
            raise UnsupportedError(f"the reference {reference!r} leads nowhere: correct it")
    return target


def _length(value: Any) -> int | None:
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**31):
        return None if value is None else int(value)
    raise UnsupportedError(f"a length of {value!r} cannot be: give a number of characters")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _literals(values: Any) -> str | None:
    """One of these strings."""
    strings = [value for value in _listed(values) if isinstance(value, str)]
    return " | ".join(json.dumps(text).replace("\x7f", "\\u007f") for text in strings) or None


def _pattern(pattern: str) -> str:
    """Strings in which a JSON Schema `pattern` is found: anywhere, unless it is anchored."""
    found = " | ".join(_alternative(part) for part in _split(pattern))
    return f"({found}) & {_SURE}" if re.search(r"\\[sS]", pattern) else found


def _split(pattern: str) -> list[str]:
    """The alternatives of a regular expression. Raises UnsupportedError for lookarounds and the like."""
    parts, depth, in_class, start = [], 0, False, 0
    for match in re.finditer(r"\\.|\[\^?\]?|\]|\(\?:|\(\?|[()|]", pattern, re.DOTALL):
        token = match[0]
        if token[0] == "\\":
            if token[1:] in "bBAZzGk123456789" and not in_class:
                raise UnsupportedError(f"{token} in a pattern cannot be enforced: leave it out")
        elif in_class:
            in_class = token != "]"
        elif token[0] == "[":
            in_class = True
        elif token == "(?":
            raise UnsupportedError("a lookaround or a named group in a pattern cannot be enforced: leave it out")
        elif token[0] == "(":
            depth += 1
        elif token == ")":
            depth -= 1
        elif token == "|" and depth == 0:
            parts.append(pattern[start : match.start()])
            start = match.end()
    return [*parts, pattern[start:]]


def _alternative(pattern: str) -> str:
    """One alternative, with whatever may stand around it."""
    head = tail = ANYTHING
    if pattern.startswith("^"):
        head, pattern = "", pattern[1:]
    if pattern.endswith("$") and (len(pattern) - len(pattern[:-1].rstrip("\\"))) % 2:
        tail, pattern = "", pattern[:-1]
    bare = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "", pattern, flags=re.DOTALL)  # without escapes and classes
    if "^" in bare or "$" in bare:
        raise UnsupportedError("an anchor inside a pattern cannot be enforced: anchor the pattern as a whole")
    try:
        body = f"/({llguidance.regex_to_lark(pattern, 'dw')})/" if pattern else '""'
    except ValueError:
        body = ""
    expression = " ".join(part for part in (head, body, tail) if part)
    if not body or llguidance.LLMatcher.validate_grammar(
        llguidance.LLMatcher.grammar_from_lark(f"start: T\nT: {expression}")
    ):
        raise UnsupportedError("its pattern is no regular expression that can be enforced: simplify it")
    return f"({expression})"

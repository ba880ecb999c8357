"""Recognising JSON without converting it.

A tool argument that is JSON is passed on as the text that the model wrote:
integers of any size and floats stay exact, and neither digits nor nesting are
limited. `json.loads` limits both and reads NaN, so the grammar is here.
"""

import json
import re
from typing import NoReturn

JSON_WHITESPACE = " \t\n\r"

_TOKEN = re.compile(
    r"""[ \t\n\r]*+(?:
        (?P<punctuation>[][{},:])
      | (?P<string>"(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+")
      | (?P<number>-?(?:0|[1-9][0-9]*+)(?P<fraction>\.[0-9]++)?+(?P<exponent>[eE][+-]?[0-9]++)?+)
      | (?P<boolean>true|false)
      | (?P<null>null)
      | (?P<end>\Z)
    )""",
    re.VERBOSE,
)
_OPENED_BY = {"}": "{", "]": "["}
_SCALARS = {"string", "number", "boolean", "null"}


def json_kind(text: str) -> str | None:
    """The JSON Schema type of the JSON value that is `text`, or None where `text` is not JSON (RFC 8259).

    A number written without fraction and exponent is an 'integer', any other
    a 'number'. Time is linear, depth unlimited.
    """
    kind: str | None = None
    open_brackets: list[str] = []
    expected = "value"
    position = 0
    while match := _TOKEN.match(text, position):
        position = match.end()
        token_kind, token = match.lastgroup, match["punctuation"]
        if token_kind == "end":
            return kind if expected == "separator" and not open_brackets else None
        if kind is None:
            kind = _first_kind(match)
        if expected in ("value", "value or ]") and (token in ("{", "[") or token_kind in _SCALARS):
            if token:
                open_brackets.append(token)
            expected = {"{": "key or }", "[": "value or ]"}.get(token or "", "separator")
        elif expected in ("key", "key or }") and token_kind == "string":
            expected = ":"
        elif expected == ":" and token == ":":
            expected = "value"
        elif token in ("}", "]") and expected in ("separator", f"value or {token}", f"key or {token}"):
            if not open_brackets or open_brackets.pop() != _OPENED_BY[token]:
                return None
            expected = "separator"
        elif expected == "separator" and token == "," and open_brackets:
            expected = "key" if open_brackets[-1] == "{" else "value"
        else:
            return None
    return None


def json_members(text: str) -> list[tuple[str, str]] | None:
    """(key, text of the value) of the JSON object that is `text`, in order, repeated keys too; None if it is none."""
    if json_kind(text) != "object":
        return None
    members: list[tuple[str, str]] = []
    key: str | None = None
    depth = start = position = 0
    while (match := _TOKEN.match(text, position)) and match.lastgroup != "end":
        position, token = match.end(), match["punctuation"]
        if depth == 1 and key is None and match["string"]:
            key = json.loads(match["string"])
        elif depth == 1 and token == ":":
            start = position
        elif depth == 1 and token in (",", "}") and key is not None:
            members.append((key, text[start : match.start("punctuation")].strip(JSON_WHITESPACE)))
            key = None
        depth += (token in ("{", "[")) - (token in ("}", "]"))
    return members


def _first_kind(match: re.Match[str]) -> str | None:
    if match["punctuation"]:
        return {"{": "object", "[": "array"}.get(match["punctuation"])
    if match["number"]:
        return "number" if match["fraction"] or match["exponent"] else "integer"
    return match.lastgroup


def refuse_constant(name: str) -> NoReturn:
    """For json.loads' parse_constant: NaN and the infinities are Python's own. Raises ValueError."""
    raise ValueError(f"{name} is not JSON")


def quote(text: str) -> str:
    """`text` as a JSON string, non-ASCII kept."""
    return json.dumps(text, ensure_ascii=False)

"""Tool calls as a grammar, in the model's own markup, so that what cuq1.text reads out of it are calls that fit.

IQuest-Q1 writes an argument that is a string bare, between tags, and any other as JSON:

    <iquest_tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>…</iquest_tool_call>

so the grammar of V follows from the argument's types as `ToolCatalog.argument_json` reads them. Arguments come in the
schema's order, those that are required always; there are no others than the schema's `properties`. Qwen2.5 writes JSON:

    <tool_call>{"name": NAME, "arguments": {…}}</tool_call>

A tool with "strict" is called with arguments that its schema validates, or the request is refused; for the others, what
cannot be expressed is left out.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cuq1.serve.bare_strings import UnsupportedError, string_terminal
from cuq1.text.markup import (
    CALL_CLOSE,
    CALL_OPEN,
    HERMES_CLOSE,
    HERMES_OPEN,
    KEY_CLOSE,
    KEY_OPEN,
    VALUE_CLOSE,
    VALUE_OPEN,
)
from cuq1.text.schema import ANY_TYPE, ParameterTypes

__all__ = ["CallGrammar", "UnsupportedError", "call_grammar"]

MAX_GRAMMAR = 4 * 1024 * 1024  # characters
MOST_CALLS = 16  # of one answer that must be calls
# What else an object's schema can ask of its members; those of `properties` and `required` are all that is expressed.
_OBJECT_KEYWORDS = (
    "allOf", "anyOf", "oneOf", "not", "if", "$ref", "patternProperties", "propertyNames", "minProperties",
    "maxProperties", "dependentRequired", "dependentSchemas", "unevaluatedProperties", "enum", "const",
)  # fmt: skip
_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
# A text of mixed type is a string only where it is no JSON of the other types: these stand for more than that.
_OTHER_JSON = {
    "null": r"/[ \t\n\r]*null[ \t\n\r]*/",
    "boolean": r"/[ \t\n\r]*(true|false)[ \t\n\r]*/",
    "integer": r"/[ \t\n\r]*-?[0-9](?s:.*)/",
    "number": r"/[ \t\n\r]*-?[0-9](?s:.*)/",
    "array": r"/[ \t\n\r]*\[(?s:.*)/",
    "object": r"/[ \t\n\r]*\{(?s:.*)/",
}


@dataclass(frozen=True)
class CallGrammar:
    """Lark rules: `rest` is a call without its opening tag, whose text and number `opening` and `token` are."""

    opening: str
    token: int
    rules: str

    def whole(self, parallel: bool, alternative: str = "") -> str:
        """The grammar of one call or, in parallel, several; or of what the rule `alternative` says."""
        more = f"(nl? call){{0,{MOST_CALLS - 1}}}" if parallel else ""
        other = f" | {alternative}" if alternative else ""
        return f"start: call {more}{other}\ncall: <[{self.token}]> rest\n{self.rules}"

    def rest_alone(self) -> str:
        """The grammar of what follows an opening tag."""
        return f"start: rest\n{self.rules}"


def call_grammar(
    tools: Sequence[Mapping[str, Any]],
    control: Mapping[str, int],
    *,
    hermes: bool,
    whitespace: Mapping[str, Any],
    loose: bool = False,
) -> CallGrammar:
    """The grammar of calls of `tools`, as `check_tools` returns them.

    control: ids of the markup's tokens; whitespace: JSON's, as the library's options; loose: of tools that are not
    strict, only names and types are kept, for where the library refuses more. Raises UnsupportedError: what of a strict
    tool's schema cannot be expressed.
    """
    functions = [_loosened(tool["function"]) if loose else tool["function"] for tool in tools]
    return (_hermes if hermes else _iquest)(functions, control, whitespace)


def _loosened(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """A function whose schema says of each argument which types it may have, and nothing else."""
    if function.get("strict"):
        return function
    parameters = function.get("parameters") or {}
    types = ParameterTypes(parameters)
    properties = {key: {"type": sorted(types.of(key))} for key in parameters.get("properties") or {}}
    kept = {key: parameters[key] for key in ("required",) if key in parameters}
    return {**function, "parameters": {"type": "object", "properties": properties, **kept}}


def _hermes(
    functions: Sequence[Mapping[str, Any]], control: Mapping[str, int], whitespace: Mapping[str, Any]
) -> CallGrammar:
    calls, definitions = [], {}
    for number, function in enumerate(functions):
        parameters = function.get("parameters") or {"type": "object"}
        if not any(key in parameters for key in _OBJECT_KEYWORDS):
            parameters = {**parameters, "additionalProperties": False}  # none twice, which the library would allow
        name = f"tool{number}"
        definitions[name] = _moved(parameters, f"#/$defs/{name}")
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": function["name"]},
                    "arguments": {"allOf": [{"$ref": f"#/$defs/{name}"}, {"type": "object"}]},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    schema = {"anyOf": calls, "$defs": definitions, "x-guidance": dict(whitespace)}
    rules = f'rest: nl? object nl? <[{control[HERMES_CLOSE]}]>\nobject: %json {json.dumps(schema)}\nnl: "\\n"\n'
    return CallGrammar(HERMES_OPEN, control[HERMES_OPEN], rules)


def _iquest(
    functions: Sequence[Mapping[str, Any]], control: Mapping[str, int], whitespace: Mapping[str, Any]
) -> CallGrammar:
    writer = _Writer({tag: f"<[{number}]>" for tag, number in control.items()}, whitespace)
    names = [writer.tool(number, function) for number, function in enumerate(functions)]
    rules = [f"rest: {' | '.join(names)}", *writer.rules, 'nl: "\\n"', "TEXT: /(?s:.*)/", ""]
    return CallGrammar(CALL_OPEN, control[CALL_OPEN], "\n".join(rules))


@dataclass
class _Writer:
    """Collects rules. tags: each tag as the grammar names it."""

    tags: Mapping[str, str]
    whitespace: Mapping[str, Any]
    rules: list[str] = field(default_factory=list)
    size: int = 0

    def tool(self, number: int, function: Mapping[str, Any]) -> str:
        """The rule of one tool's call."""
        strict, parameters = bool(function.get("strict")), function.get("parameters") or {}
        where = f"the strict tool {function['name']!r}"
        properties, required = parameters.get("properties") or {}, parameters.get("required")
        required = [key for key in required if isinstance(key, str)] if isinstance(required, list) else []
        if strict and (found := [key for key in _OBJECT_KEYWORDS if key in parameters]):
            raise UnsupportedError(f"{where}: {found[0]} beside its properties cannot be enforced: leave strict out")
        types, parts = ParameterTypes(parameters), []
        for place, key in enumerate(dict.fromkeys([*properties, *required])):
            if not key:
                if strict:
                    raise UnsupportedError(f"{where} has an argument without a name: name it")
                continue
            name = f"t{number}a{place}"
            try:
                value = self._value(name.upper(), parameters, properties.get(key, True), types.of(key))
            except UnsupportedError as error:
                if strict:
                    raise UnsupportedError(f"{where}, argument {key!r}: {error}") from None
                value = "TEXT" if "string" in types.of(key) else self._json(name, {}, types.of(key))
            tags = self.tags
            self.rules.append(
                f"{name}: nl? {tags[KEY_OPEN]} {literal(key)} {tags[KEY_CLOSE]} nl? "
                f"{tags[VALUE_OPEN]} {value} {tags[VALUE_CLOSE]}"
            )
            parts.append(name if key in required else f"{name}?")
        rule = f"t{number}"
        self.rules.append(f"{rule}: {literal(function['name'])} {' '.join(parts)} nl? {self.tags[CALL_CLOSE]}")
        return rule

    def _value(self, name: str, root: Mapping[str, Any], schema: Any, types: frozenset[str]) -> str:
        """What stands between a value's tags."""
        if schema is not True and not isinstance(schema, Mapping):
            raise UnsupportedError("no value fits its schema" if schema is False else "its schema is no object")
        if types == ANY_TYPE:
            plain = schema is True or (isinstance(schema, Mapping) and schema.keys() <= _ANNOTATIONS)
            return "TEXT" if plain else self._json(name.lower(), schema, ANY_TYPE, root)
        others = types - {"string"}
        if "string" not in types:
            return self._json(name.lower(), schema, ANY_TYPE, root)
        bare = string_terminal(schema, root)
        if not others:
            if bare is None:
                raise UnsupportedError("no string fits its schema")
            return self._terminal(name, bare)
        value = self._json(name.lower(), schema, others, root)
        if bare is None:
            return value
        text = " & ".join([f"({bare})", *(f"~{_OTHER_JSON[kind]}" for kind in sorted(others))])
        return f"({self._terminal(name, text)} | {value})"

    def _terminal(self, name: str, expression: str) -> str:
        self.rules.append(f"{name}S: {expression}")
        return f"{name}S"

    def _json(self, name: str, schema: Any, types: frozenset[str], root: Mapping[str, Any] | None = None) -> str:
        """The rule of JSON of a schema, which may refer to others within `root`."""
        if schema is True:
            schema = {}
        if types != ANY_TYPE:
            schema = {"allOf": [schema, {"type": sorted(types)}]}
        if root is not None and '"$ref"' in json.dumps(schema):
            schema = {**_moved(schema, "#/$defs/root"), "$defs": {"root": _moved(root, "#/$defs/root")}}
        rule = f"{name}j: %json {json.dumps({**schema, 'x-guidance': dict(self.whitespace)})}"
        self.size += len(rule)
        if self.size > MAX_GRAMMAR:
            raise UnsupportedError("the schemas are too large together: leave some out")
        self.rules.append(rule)
        return f"{name}j"


def literal(text: str) -> str:
    """A string of a Lark grammar."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def _moved(schema: Any, root: str) -> Any:
    """A schema whose references into itself begin at `root`."""
    if isinstance(schema, Mapping):
        return {
            key: root + value[1:]
            if key == "$ref" and isinstance(value, str) and value[:1] == "#"
            else _moved(value, root)
            for key, value in schema.items()
        }
    return [_moved(item, root) for item in schema] if isinstance(schema, list) else schema

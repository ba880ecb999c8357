"""Which JSON types a tool's schema allows for an argument."""

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

ANY_TYPE = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})

# Deeper than any schema written by hand or generator; beyond it a schema constrains nothing.
_DEPTH = 100


class ParameterTypes:
    """Types of the arguments of one tool, read from its `parameters` schema.

    Follows `$ref` (JSON pointers into the same schema), `allOf`, `anyOf`,
    `oneOf`, `enum`, `const` and `additionalProperties`. What cannot be
    resolved constrains nothing; cycles and shared subschemas cost nothing.
    """

    def __init__(self, parameters: Any) -> None:
        self._root = parameters
        self._answers: dict[str, tuple[bool, frozenset[str]]] = {}

    def declares(self, key: str) -> bool:
        """True where the schema says anything about an argument of this name."""
        return self._answer(key)[0]

    def of(self, key: str) -> frozenset[str]:
        """JSON Schema types that the argument may have; ANY_TYPE where the schema does not say."""
        return self._answer(key)[1]

    def _answer(self, key: str) -> tuple[bool, frozenset[str]]:
        if key not in self._answers:
            schema = self._property(self._root, key, {}, 0)
            types = self._evaluate(schema, {}, 0)
            self._answers[key] = (schema is not None, types or ANY_TYPE)
        return self._answers[key]

    def _property(self, schema: Any, key: str, memo: dict[int, Any], depth: int) -> Any:
        """The schema that `schema` gives its property `key`, combined from all its parts; None where it gives none."""
        if not isinstance(schema, Mapping) or depth > _DEPTH:
            return None
        if id(schema) in memo:
            return memo[id(schema)]
        memo[id(schema)] = None
        found = []
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and key in properties:
            found.append(properties[key])
        elif isinstance(schema.get("additionalProperties"), Mapping):
            found.append(schema["additionalProperties"])
        inherited = [self._resolve(schema["$ref"])] if "$ref" in schema else []
        for part in inherited + _list(schema, "allOf"):
            found.append(self._property(part, key, memo, depth + 1))
        for union in ("anyOf", "oneOf"):
            choices = [self._property(part, key, memo, depth + 1) for part in _list(schema, union)]
            choices = [choice for choice in choices if choice is not None]
            found.append({"anyOf": choices} if choices else None)
        found = [part for part in found if part is not None]
        if found:
            memo[id(schema)] = found[0] if len(found) == 1 else {"allOf": found}
        return memo[id(schema)]

    def _evaluate(self, schema: Any, memo: dict[int, frozenset[str]], depth: int) -> frozenset[str]:
        """Types that `schema` allows; none on the inside of a cycle, which adds nothing to a union."""
        if not isinstance(schema, Mapping) or depth > _DEPTH:
            return ANY_TYPE
        if id(schema) in memo:
            return memo[id(schema)]
        memo[id(schema)] = frozenset()
        allowed = ANY_TYPE
        if "type" in schema:
            declared = schema["type"]
            allowed &= _named(declared if isinstance(declared, list) else [declared])
        if isinstance(schema.get("enum"), list):
            allowed &= _named(map(_type_of, schema["enum"]))
        if "const" in schema:
            allowed &= _named([_type_of(schema["const"])])
        inherited = [self._resolve(schema["$ref"])] if "$ref" in schema else []
        for part in inherited + _list(schema, "allOf"):
            allowed &= self._evaluate(part, memo, depth + 1)
        for union in ("anyOf", "oneOf"):
            members = [self._evaluate(part, memo, depth + 1) for part in _list(schema, union)]
            if members:
                allowed &= frozenset().union(*members)
        memo[id(schema)] = allowed
        return allowed

    def _resolve(self, reference: Any) -> Any:
        """The subschema that '#/a/b' points to; None for anything else."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            return None
        target = self._root
        for step in unquote(reference[1:]).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, Mapping) and name in target:
                target = target[name]
            elif isinstance(target, list) and name in map(str, range(len(target))):
                target = target[int(name)]
            else:
                return None
        return target


def _list(schema: Mapping[str, Any], name: str) -> list[Any]:
    parts = schema.get(name)
    return parts if isinstance(parts, list) else []


def _named(types: Iterable[Any]) -> frozenset[str]:
    """The set of these type names, integers being numbers too; ANY_TYPE where none of them is known."""
    known = {name for name in types if isinstance(name, str)} & ANY_TYPE
    if "number" in known:
        known.add("integer")
    return frozenset(known) or ANY_TYPE


def _type_of(value: Any) -> str:
    """The JSON Schema type of a Python value that came from JSON."""
    for python_type, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, python_type):
            return name
    return "null" if value is None else "object"

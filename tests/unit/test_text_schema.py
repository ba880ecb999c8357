"""JSON recognition against `json`, and the types that a schema allows against a table."""

import json
import random
import time
from typing import Any

import pytest

from cuq1.text import jsontext
from cuq1.text.jsontext import json_kind
from cuq1.text.schema import ANY_TYPE, ParameterTypes

KINDS = {
    dict: "object",
    list: "array",
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
}


def fresh_random() -> random.Random:
    """New random inputs in every run; a failure's captured output names the seed."""
    seed = random.randrange(2**32)
    print(f"random.Random({seed})")
    return random.Random(seed)


def reference_kind(text: str) -> str | None:
    """`json.loads`, without its extensions to JSON."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        return KINDS[type(json.loads(text, parse_constant=refuse))]
    except ValueError:
        return None


def random_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(7 if depth < 3 else 5)
    if kind == 5:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 6:
        return {rng.choice(["", "a", "é", 'q"']): random_value(rng, depth + 1) for _ in range(rng.randrange(4))}
    return rng.choice([None, True, False, 0, -12, 10**40, 1.5, -2e-9, 1e300, "", 'a\n\\"', "日\u2028", "\x7f/"])


def mutated(rng: random.Random, text: str) -> str:
    """`text` with a character removed, doubled, replaced or inserted, or whitespace added."""
    i = rng.randrange(len(text) + 1)
    junk = rng.choice(
        ['"', ",", ":", "{", "}", "[", "]", " ", "\n", "\t", "0", "-", ".", "e", "\\", "\\u00", "\x00", "\u00a0", "t"]
    )
    return rng.choice([text, text[:i] + text[i + 1 :], text[:i] + junk + text[i:], text[:i] + junk + text[i + 1 :]])


def check_json_kind(rounds: int) -> None:
    rng = fresh_random()
    seen = {True: 0, False: 0}
    for _ in range(rounds):
        text = json.dumps(random_value(rng), ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1]))
        for _ in range(rng.randrange(3)):
            text = mutated(rng, text)
        want = reference_kind(text)
        assert jsontext.json_kind(text) == want, text
        seen[want is None] += 1
    assert min(seen.values()) > rounds // 20


def test_json_is_recognised_as_the_json_module_does() -> None:
    check_json_kind(6000)


@pytest.mark.parametrize("old", ['[^"\\\\\\x00-\\x1f]', "(?:0|[1-9][0-9]*+)", "[0-9a-fA-F]{4}"])
def test_a_laxer_grammar_would_be_noticed(monkeypatch: pytest.MonkeyPatch, old: str) -> None:
    laxer = {'[^"\\\\\\x00-\\x1f]': r'[^"\\]', "(?:0|[1-9][0-9]*+)": "[0-9]+", "[0-9a-fA-F]{4}": "[0-9a-fA-F]{2,4}"}
    pattern = jsontext._TOKEN.pattern
    assert old in pattern
    broken = jsontext.re.compile(pattern.replace(old, laxer[old]), jsontext.re.VERBOSE)
    monkeypatch.setattr(jsontext, "_TOKEN", broken)
    with pytest.raises(AssertionError):
        check_json_kind(20000)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", None),
        (" ", None),
        ("NaN", None),
        ("Infinity", None),
        ("-Infinity", None),
        ("[NaN]", None),
        ("-", None),
        ("01", None),
        ("+1", None),
        ("1.", None),
        (".5", None),
        ("1e", None),
        ("0x1", None),
        ("\u0661", None),
        ("\u00a01", None),
        ("True", None),
        ("'a'", None),
        ("[1,]", None),
        ('{"a":1,}', None),
        ('{"a"}', None),
        ("{1:2}", None),
        ("[1 2]", None),
        ("1 2", None),
        ("1,2", None),
        ("]", None),
        (",", None),
        ("[}", None),
        ('{"a":1]', None),
        ("-0", "integer"),
        (" 12\n", "integer"),
        ("1E+5", "number"),
        ("-0.0", "number"),
        ('"\\ud800"', "string"),
        ("[ ]", "array"),
        ("{ }", "object"),
        ('{"a": [{}, [], ""]}', "object"),
    ],
)
def test_corner_cases_of_the_grammar(text: str, kind: str | None) -> None:
    assert json_kind(text) == kind


def test_neither_digits_nor_depth_nor_length_are_limited() -> None:
    started = time.perf_counter()
    assert json_kind("9" * 200_000) == "integer"
    assert json_kind("[" * 200_000 + "]" * 200_000) == "array"
    assert json_kind('{"a":' * 100_000 + "1" + "}" * 100_000) == "object"
    assert json_kind("[" * 200_000) is None
    assert json_kind('"' + "\\n" * 200_000 + '"') == "string"
    assert json_kind('"' + "a" * 2_000_000) is None
    assert time.perf_counter() - started < 5


STRING = frozenset({"string"})
NUMBER = frozenset({"number", "integer"})


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, STRING),
        ({"type": "number"}, NUMBER),
        ({"type": "integer"}, {"integer"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({}, ANY_TYPE),
        (True, ANY_TYPE),
        ({"type": "text"}, ANY_TYPE),
        ({"type": None}, ANY_TYPE),
        ({"type": [["string"]]}, ANY_TYPE),
        ({"enum": ["1", "2"]}, STRING),
        ({"enum": [1, None, True, 1.5, [], {}]}, ANY_TYPE - STRING),
        ({"const": "x"}, STRING),
        ({"$ref": "#/$defs/text"}, STRING),
        ({"$ref": "#/definitions/old"}, STRING),
        ({"$ref": "#/$defs/alias"}, STRING),
        ({"$ref": "#/$defs/a~1b%20c"}, STRING),
        ({"$ref": "#/$defs/list/1"}, STRING),
        ({"$ref": "#/$defs/list/9"}, ANY_TYPE),
        ({"$ref": "#/$defs/missing"}, ANY_TYPE),
        ({"$ref": "other.json#/$defs/text"}, ANY_TYPE),
        ({"$ref": "#anchor"}, ANY_TYPE),
        ({"$ref": 5}, ANY_TYPE),
        ({"$ref": "#"}, {"object"}),
        ({"$ref": "#/$defs/loop"}, ANY_TYPE),
        ({"$ref": "#/$defs/ping"}, ANY_TYPE),
        ({"$ref": "#/$defs/recursive"}, {"string", "array"}),
        ({"allOf": [{"$ref": "#/$defs/text"}]}, STRING),
        ({"allOf": [{"type": ["string", "null"]}, {"type": ["string", "integer"]}]}, STRING),
        ({"allOf": [{"$ref": "#/$defs/text"}], "description": "d"}, STRING),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        ({"oneOf": [{"$ref": "#/$defs/text"}, {"type": "number"}]}, STRING | NUMBER),
        ({"anyOf": [{"type": "string"}, {}]}, ANY_TYPE),
        ({"type": "string", "anyOf": [{"minLength": 1}, {"pattern": "a"}]}, STRING),
        ({"anyOf": "nonsense"}, ANY_TYPE),
    ],
)
def test_types_that_a_schema_allows(schema: Any, types: set[str]) -> None:
    definitions = {
        "text": {"type": "string"},
        "alias": {"$ref": "#/$defs/middle"},
        "middle": {"allOf": [{"$ref": "#/$defs/text"}]},
        "a/b c": {"type": "string"},
        "list": [{"type": "integer"}, {"type": "string"}],
        "loop": {"$ref": "#/$defs/loop"},
        "ping": {"$ref": "#/$defs/pong"},
        "pong": {"allOf": [{"$ref": "#/$defs/ping"}]},
        "recursive": {"anyOf": [{"type": "string"}, {"type": "array"}, {"$ref": "#/$defs/recursive"}]},
    }
    root = {
        "type": "object",
        "properties": {"x": schema},
        "$defs": definitions,
        "definitions": {"old": {"type": "string"}},
    }
    parameter_types = ParameterTypes(root)
    assert parameter_types.of("x") == types
    assert parameter_types.declares("x")
    assert parameter_types.of("y") == ANY_TYPE
    assert not parameter_types.declares("y")


@pytest.mark.parametrize(
    "root",
    [
        {"$ref": "#/$defs/args"},
        {"allOf": [{"$ref": "#/$defs/args"}, {"properties": {"y": {"type": "integer"}}}]},
        {"anyOf": [{"properties": {"y": {}}}, {"$ref": "#/$defs/args"}]},
        {"additionalProperties": {"type": "string"}, "properties": {"y": {"type": "integer"}}},
    ],
)
def test_properties_are_found_behind_combinations(root: dict[str, Any]) -> None:
    definitions = {"args": {"properties": {"x": {"type": "string"}, "z": {"$ref": "#"}}}}
    assert ParameterTypes(root | {"$defs": definitions}).of("x") == STRING


@pytest.mark.parametrize("root", [None, True, [], "x", {"properties": []}, {"$ref": "#"}, {"allOf": [{"$ref": "#"}]}])
def test_schemas_without_properties_say_nothing(root: Any) -> None:
    assert ParameterTypes(root).of("x") == ANY_TYPE


def test_deep_and_shared_schemas_are_quick() -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(50_000):
        deep = {"anyOf": [deep]}
    chain: dict[str, Any] = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(5000)}
    shared: dict[str, Any] = {"type": "string"}
    for _ in range(60):
        shared = {"allOf": [shared, shared], "oneOf": [shared, shared]}
    root = {
        "properties": {"deep": deep, "chain": chain["d0"], "shared": shared},
        "$defs": chain,
        "allOf": [shared, shared],
    }
    types = ParameterTypes(root)
    started = time.perf_counter()
    assert types.of("deep") == ANY_TYPE
    assert types.of("chain") == ANY_TYPE
    assert types.of("shared") == STRING
    assert time.perf_counter() - started < 2

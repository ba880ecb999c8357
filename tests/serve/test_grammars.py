"""Random ways through grammars are of their schemas, and what no grammar expresses is refused."""

import datetime
import ipaddress
import json
import random
import re
import time
import uuid
from urllib.parse import urlsplit

import numpy as np
import pytest

pytest.importorskip("llguidance")

from cuq1.errors import RequestError, TextError
from cuq1.serve.grammar_mask import Phase
from cuq1.serve.request import ApiError
from cuq1.serve.structured import MAX_PATTERN, MAX_REPEAT, MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH, Grammars
from cuq1.text import Tokenizer, check_tools
from cuq1.text.formats import HERMES
from cuq1.text.output import OutputStream
from tests.serve.grammars import GRAMMARS, STOP, TOKENIZER, valid
from tests.serve.schemas import answer_schema, tool

SEED = random.randrange(10**6)


def random_walk(mask, rng, most=3000):
    """Random tokens that the mask allows, ended by a stop token; often some are tried and taken back before."""
    tokens = []
    while len(tokens) < most:
        allowed = mask.allowed()
        if rng.random() < 0.3:
            tried = rng.randrange(1, 8)
            for _ in range(tried):
                mask.push(pick(mask.allowed(), rng))
            mask.pop(tried)
            again = mask.allowed()
            assert (allowed is None) == (again is None)
            assert allowed is None or (again == allowed).all()
        token = pick(allowed, rng)
        mask.push(token)
        if token in STOP:
            return tokens
        tokens.append(token)
    raise AssertionError("no end")


def pick(allowed, rng):
    if allowed is None:
        return rng.choice([8, 0, 300, 301, 302])
    ids = np.flatnonzero(allowed).tolist()
    tags = [i for i in ids if i < 14]
    return rng.choice(tags if tags and rng.random() < 0.1 else ids)


def parsed(tokens, tools, reasoning=False):
    output = OutputStream(TOKENIZER, tools=tools, reasoning=reasoning)
    for token in tokens:
        output.feed(token)
    output.finish()
    return output.message()


def test_random_ways_through_random_schemas():
    rng = random.Random(SEED)
    for number in range(150):
        schema = answer_schema(rng)
        constraint = GRAMMARS.constraint(schema=schema)
        text = TOKENIZER.decode(random_walk(constraint.mask(False), rng))
        assert valid(text, schema), (SEED, number, schema, text)


@pytest.mark.parametrize("choice", ["required", "named", "auto"])
def test_random_ways_through_random_calls(choice):
    """What the parser reads out of the model's markup are calls whose arguments validate, and nothing else."""
    rng, seen = random.Random(SEED), 0
    for number in range(80):
        tools = check_tools([tool(rng, i) for i in range(rng.randrange(1, 4))])
        name = tools[-1]["function"]["name"]
        asked = {"name": name} if choice == "named" else choice
        constraint = GRAMMARS.constraint(tools=tools, choice=asked)
        message = parsed(random_walk(constraint.mask(False), rng), tools)
        schemas = {one["function"]["name"]: one["function"]["parameters"] for one in tools}
        for call in message.tool_calls:
            assert valid(call.arguments, schemas[call.name]), (SEED, number, schemas[call.name], call)
        seen += len(message.tool_calls)
        if choice == "auto":
            assert "<iquest_tool_call>" not in message.content
        else:
            assert message.content.strip() == ""
            assert message.tool_calls
        if choice == "named":
            assert [call.name for call in message.tool_calls] == [name]
    assert seen > 40


def test_calls_or_json():
    rng = random.Random(SEED)
    tools = check_tools([tool(rng, 1)])
    constraint = GRAMMARS.constraint(
        tools=tools,
        schema={"type": "object", "properties": {"k": {"const": 1}}, "required": ["k"], "additionalProperties": False},
    )
    kinds = set()
    for _ in range(40):
        message = parsed(random_walk(constraint.mask(False), rng), tools)
        kinds.add(bool(message.tool_calls))
        assert message.tool_calls or json.loads(message.content) == {"k": 1}
    assert kinds == {True, False}


def test_one_call_at_the_most_where_they_are_not_parallel():
    rng = random.Random(SEED)
    tools = check_tools([tool(rng, 1)])
    for choice in ("required", "auto"):
        constraint = GRAMMARS.constraint(tools=tools, choice=choice, parallel=False)
        for _ in range(20):
            assert len(parsed(random_walk(constraint.mask(False), rng), tools).tool_calls) <= 1
    several = GRAMMARS.constraint(tools=tools, choice="required")
    assert max(len(parsed(random_walk(several.mask(False), rng), tools).tool_calls) for _ in range(20)) > 1


def test_a_tool_that_is_not_strict_is_called_as_far_as_its_schema_can_be_expressed():
    rng = random.Random(SEED)
    function = {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {
                "at": {"type": "string", "pattern": "^(?=x)"},
                "n": {"not": {"type": "string"}},
                "deep": {"type": "integer"},
            },
            "required": ["at", "deep"],
            "minProperties": 2,
        },
    }
    tools = check_tools([{"type": "function", "function": function}])
    constraint = GRAMMARS.constraint(tools=tools, choice="required", parallel=False)
    for _ in range(10):
        (call,) = parsed(random_walk(constraint.mask(False), rng), tools).tool_calls
        found = json.loads(call.arguments)
        assert isinstance(found["at"], str)
        assert isinstance(found["deep"], int)
    with pytest.raises(ApiError, match="strict tool 'look'"):
        GRAMMARS.constraint(tools=check_tools([{"type": "function", "function": function | {"strict": True}}]))


@pytest.mark.parametrize("thinking", [False, True])
def test_phases(thinking):
    tools = check_tools(
        [{"type": "function", "function": {"name": "go", "strict": True, "parameters": {"type": "object"}}}]
    )
    mask = GRAMMARS.constraint(tools=tools).mask(thinking)
    assert mask._phase is (Phase.REASONING if thinking else Phase.FREE)
    if thinking:
        assert not mask.allowed()[0]
        assert mask.allowed().sum() == 4095
        mask.push(8)  # a call within reasoning is none
        mask.push(7)
    assert mask.allowed() is None
    way = [8, *TOKENIZER.encode("go", control=False), 9]
    for token in way:
        allowed = mask.allowed()
        assert allowed is None or allowed[token]
        mask.push(token)
    assert mask.allowed() is None
    mask.push(0)
    assert np.flatnonzero(mask.allowed()).tolist() == [0]
    mask.push(0)
    mask.pop(len(way) + 2)
    assert mask.allowed() is None


def test_qwen2s_calls_are_json():
    """A tokenizer with Qwen2.5's tags, as far as a grammar sees it."""
    added = {"<tool_call>": 8, "</tool_call>": 9, "<|im_end|>": 0}
    tokenizer = Tokenizer(TOKENIZER._bpe, added, 4096)
    grammars = Grammars(tokenizer, STOP, HERMES)
    rng = random.Random(SEED)
    for number in range(40):
        tools = check_tools([tool(rng, i) for i in range(rng.randrange(1, 3))])
        constraint = grammars.constraint(tools=tools, choice="required")
        tokens = random_walk(constraint.mask(False), rng)
        output = OutputStream(tokenizer, tools=tools, calls=HERMES)
        for token in tokens:
            output.feed(token)
        output.finish()
        message = output.message()
        schemas = {one["function"]["name"]: one["function"]["parameters"] for one in tools}
        assert message.tool_calls, (SEED, number, tokenizer.decode(tokens))
        assert not message.content.strip()
        assert all(valid(call.arguments, schemas[call.name]) for call in message.tool_calls), (SEED, message)


def email_of(text):
    local, _, host = text.partition("@")
    assert re.fullmatch(r"[\w+-]+(\.[\w+-]+)*", local, re.ASCII)
    assert "." in host_of(host)


def host_of(text):
    assert all(re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?", label) for label in text.split("."))
    return text


FORMAT_CHECKS = {
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "date-time": datetime.datetime.fromisoformat,
    "duration": lambda text: re.fullmatch(r"P(?=.)(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(?=.)(\d+H)?(\d+M)?(\d+S)?)?)", text)[0],
    "email": email_of,
    "hostname": host_of,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": uuid.UUID,
    "uri": lambda text: host_of(urlsplit(text).hostname),
}


@pytest.mark.parametrize("name", FORMAT_CHECKS)
def test_formats_of_bare_strings(name):
    rng = random.Random(SEED)
    parameters = {"type": "object", "properties": {"a": {"type": "string", "format": name}}, "required": ["a"]}
    function = {"name": "go", "parameters": parameters, "strict": True}
    tools = check_tools([{"type": "function", "function": function}])
    constraint = GRAMMARS.constraint(tools=tools, choice="required", parallel=False)
    seen = set()
    for _ in range(60):
        (call,) = parsed(random_walk(constraint.mask(False), rng), tools).tool_calls
        text = json.loads(call.arguments)["a"]
        FORMAT_CHECKS[name](text)
        seen.add(text)
    assert len(seen) > 10
    with pytest.raises((ValueError, AssertionError, TypeError, AttributeError)):
        FORMAT_CHECKS[name]("no such thing")
    parameters["properties"]["a"]["format"] = "colour"
    with pytest.raises(ApiError, match="colour"):
        GRAMMARS.constraint(tools=tools, choice="required")


@pytest.mark.parametrize("pattern", [r"^\S+$", r"^[^\s]+$", r"^[\s\S]+$"])
def test_what_is_whitespace_for_some_alone_does_not_come(pattern):
    """Python's patterns count U+001C to U+001F and U+0085 among it, ECMAScript's U+FEFF."""
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]}
    tools = check_tools([{"type": "function", "function": {"name": "go", "parameters": parameters, "strict": True}}])
    begin = "<iquest_tool_call>go\n<arg_key>a</arg_key>\n<arg_value>x"

    def follows(text):
        mask = GRAMMARS.constraint(tools=tools, choice="required").mask(False)
        for token in TOKENIZER.encode(begin + text, control=True):
            if not mask.allowed()[token]:
                return False
            mask.push(token)
        return True

    assert all(map(follows, "y\x1b\x7f\u0301\u200b"))
    assert follows(" ") == (pattern == r"^[\s\S]+$")
    assert not any(map(follows, "\x1c\x1f\x85\ufeff"))


def test_what_asks_for_nothing_is_no_constraint():
    tools = check_tools([{"type": "function", "function": {"name": "go", "parameters": {"type": "object"}}}])
    assert GRAMMARS.constraint() is None
    assert GRAMMARS.constraint(tools=tools) is None
    assert GRAMMARS.constraint(tools=tools, choice="none") is None


def deep(levels):
    schema = {"type": "string"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


REFUSED = {
    "too large": ({"enum": ["x" * 100] * (MAX_SCHEMA_BYTES // 100)}, "larger than 256 KiB"),
    "too deep": (deep(MAX_SCHEMA_DEPTH + 1), "nested deeper"),
    "a long pattern": ({"type": "string", "pattern": "a" * (MAX_PATTERN + 1)}, "longer than 2048 characters"),
    "a pattern of keys": ({"patternProperties": {"a" * (MAX_PATTERN + 1): {}}}, "longer than 2048 characters"),
    "a large count": ({"type": "array", "minItems": MAX_REPEAT + 1}, "minItems is above"),
    "not": ({"not": {"type": "string"}}, "cannot be enforced"),
    "an impossible schema": ({"type": "string", "enum": [3]}, "cannot be enforced"),
    "a lookahead": ({"type": "string", "pattern": "(?=x)y"}, "cannot be enforced"),
    "a broken pattern": ({"type": "string", "pattern": "("}, "cannot be enforced"),
    "a reference to nowhere": ({"$ref": "#/$defs/gone"}, "cannot be enforced"),
    "a reference to elsewhere": ({"$ref": "https://example.com/s.json"}, "cannot be enforced"),
    "an unknown type": ({"type": "text"}, "cannot be enforced"),
    "an unknown format": ({"type": "string", "format": "colour"}, "cannot be enforced"),
    "nothing": (False, "allows something"),
    "a cycle": ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "cannot be enforced"),
    "many unions": (
        {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {"type": "integer"}}} for j in range(8)]} for i in range(8)]},
        "cannot be enforced",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_schemas_that_are_refused(name):
    schema, says = REFUSED[name]
    begun = time.monotonic()
    with pytest.raises(ApiError, match=says) as found:
        GRAMMARS.constraint(schema=schema, param="text.format")
    assert (found.value.kind, found.value.param) == ("invalid", "text.format")
    assert "\n" not in found.value.message
    assert time.monotonic() - begun < 5


def spoiled(rng, value):
    """A copy in which something, anywhere, is something else."""
    wrong = [
        None,
        True,
        False,
        0,
        -1,
        2.5,
        1e300,
        "",
        "string",
        "^(",
        "#/$defs/x",
        [],
        [1, "a"],
        {},
        {"type": "string"},
        [[]],
    ]
    if rng.random() < 0.15 or not isinstance(value, dict | list):
        return rng.choice(wrong) if rng.random() < 0.5 else value
    if isinstance(value, list):
        return [spoiled(rng, item) for item in value]
    out = {key: spoiled(rng, item) for key, item in value.items()}
    if rng.random() < 0.3:
        out[rng.choice(KEYWORDS)] = rng.choice(wrong)
    return out


KEYWORDS = (
    "type", "enum", "const", "pattern", "minLength", "maxLength", "minItems", "maxItems", "items", "prefixItems",
    "properties", "required", "additionalProperties", "anyOf", "oneOf", "allOf", "not", "$ref", "$defs", "format",
    "minimum", "maximum", "multipleOf", "x-guidance", "patternProperties", "minProperties", "$schema", "$id",
)  # fmt: skip


def test_spoiled_schemas_are_refused_in_a_sentence_or_followed():
    """Whatever is sent as a schema, nothing else than a refusal comes of it."""
    rng, sentences, followed = random.Random(SEED), [], 0
    for _ in range(400):
        schema = spoiled(rng, answer_schema(rng)) or {}
        calls = rng.random() < 0.7
        try:
            if calls:
                function = {"name": "go", "parameters": schema, "strict": rng.random() < 0.5}
                tools = check_tools([{"type": "function", "function": function}])
                constraint = GRAMMARS.constraint(tools=tools, choice="required")
            else:
                constraint = GRAMMARS.constraint(schema=schema)
            mask = constraint.mask(False)
            for _ in range(5):
                mask.push(pick(mask.allowed(), rng))
            followed += 1
        except (ApiError, TextError, RequestError) as error:
            sentences.append(str(error))
    assert not [text for text in sentences if "\n" in text]
    assert len(sentences) > 20
    assert followed > 20


@pytest.mark.parametrize("choice", ["required", {"name": "gone"}])
def test_calls_that_cannot_be_are_refused(choice):
    tools = check_tools([{"type": "function", "function": {"name": "go"}}])
    with pytest.raises(ApiError, match="tool_choice"):
        GRAMMARS.constraint(tools=[] if choice == "required" else tools, choice=choice)


def test_a_model_without_tags_is_asked_for_no_calls():
    plain = Grammars(Tokenizer(TOKENIZER._bpe, {"<|end|>": 0}, 4096), STOP)
    tools = check_tools([{"type": "function", "function": {"name": "go"}}])
    with pytest.raises(ApiError, match="no token <"):
        plain.constraint(tools=tools, choice="required")
    with pytest.raises(RequestError, match="reasoning ends without a token"):
        plain.constraint(schema={"type": "object"}).mask(True)


def test_a_grammar_is_compiled_once_and_used_by_many():
    schema = answer_schema(random.Random(SEED))
    one, other = GRAMMARS.constraint(schema=schema), GRAMMARS.constraint(schema=schema)
    assert one.matcher is other.matcher
    first, second = one.mask(False), one.mask(False)
    before = second.allowed()
    random_walk(first, random.Random(1))
    assert (second.allowed() == before).all()


def test_references_that_fan_out_cost_no_more_than_moments():
    """Each definition refers twice to the next: over a million strings in 2 KB."""
    begun = time.monotonic()
    parts = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(18)} | {"d18": {"type": "string"}}
    parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "required": ["a"], "$defs": parts}
    for strict in (True, False):
        function = {"name": "go", "parameters": parameters, "strict": strict}
        tools = check_tools([{"type": "function", "function": function}])
        if strict:
            with pytest.raises(ApiError, match="refers to itself, or to too much"):
                GRAMMARS.constraint(tools=tools, choice="required")
        else:
            assert GRAMMARS.constraint(tools=tools, choice="required") is not None
    large = {
        "type": "object",
        "properties": {f"a{i}": {"$ref": "#/$defs/x"} for i in range(400)},
        "$defs": {"x": {"type": "integer", "title": "x" * 200_000}},
    }
    tools = check_tools([{"type": "function", "function": {"name": "go", "parameters": large, "strict": True}}])
    with pytest.raises(ApiError, match="too large together"):
        GRAMMARS.constraint(tools=tools, choice="required")
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "(a|b)*a(a|b){600}(a|b){600}"},
        {"type": "string", "pattern": "((a{1,50}){1,50}){1,50}"},
        {"type": "array", "minItems": 9999, "items": {"type": "array", "minItems": 9999, "items": {"type": "array"}}},
        {"enum": [f"value {i} {i * i}" for i in range(9000)]},
        {"anyOf": [{"type": "object", "properties": {f"k{i}": {}, "b": {"const": i}}} for i in range(1500)]},
        {"type": "object", "properties": {f"k{i}": {"pattern": f"^a{{{i},{2 * i}}}b+$"} for i in range(900)}},
    ],
)
def test_grammars_that_explode_cost_no_more_than_moments(schema):
    begun, rng = time.monotonic(), random.Random(1)
    mask = GRAMMARS.constraint(schema=schema).mask(False)
    try:
        for _ in range(30):
            mask.push(pick(mask.allowed(), rng))
    except RequestError as error:
        assert "too complex" in str(error)  # noqa: PT017  (either end is right)
    assert time.monotonic() - begun < 5

"""Random JSON schemas whose values are short, and random tools."""

import string

WORDS = ("name", "count", "tags", "unit", "path", "x", "naïve", "größe", "a b", 'say "hi"', "日本", "e\u0301")
PATTERNS = (r"^[a-z]{2,6}$", r"^\d{3}-\d{2}$", r"^(yes|no|maybe)$", r"^[^\s\"]{1,8}$", r"^a|b$", r"^v\d+\.\d$")


def schema(rng, depth=3):
    """A schema of any kind; objects and arrays only where `depth` allows."""
    leaves = [text, whole, real, boolean, fixed, choice, nullable]
    return rng.choice([*leaves, mapping, sequence, union, mapping] if depth else leaves)(rng, depth - 1)


def text(rng, depth=0):
    found = {"type": "string"}
    kind = rng.randrange(4)
    if kind == 0:
        found["pattern"] = rng.choice(PATTERNS)
    if kind == 1:
        found["format"] = rng.choice(["date", "ipv4", "uuid", "time"])
    found["maxLength"] = 40 if kind == 1 else rng.randrange(6, 20)
    if kind == 2:
        found["minLength"] = rng.randrange(6)
    return found


def whole(rng, depth=0):
    low = rng.randrange(-50, 50)
    return {
        "type": "integer",
        **rng.choice(
            [{"minimum": low, "maximum": low + rng.randrange(200)}, {"multipleOf": 5, "minimum": 0, "maximum": 90}]
        ),
    }


def real(rng, depth=0):
    """Without the multiple, a small model goes on with digits for ever."""
    return {"type": "number", "multipleOf": 0.25, "minimum": 0, "exclusiveMaximum": rng.choice([1, 2.5, 1000])}


def boolean(rng, depth=0):
    return {"type": "boolean"}


def fixed(rng, depth=0):
    return {"const": rng.choice(["on", 3, None, True, [1, "b"], {"k": [None]}, "e\u0301", "tab\t\x7f"])}


def choice(rng, depth=0):
    return {
        "enum": rng.sample(
            ["left", "right", 'q"uote', "ümlaut", 7, -2, None, False, "日本語", "e\u0301te"], rng.randrange(2, 5)
        )
    }


def nullable(rng, depth=0):
    return rng.choice([{"type": ["string", "null"], "maxLength": 8}, {"anyOf": [{"type": "null"}, whole(rng)]}])


def mapping(rng, depth):
    keys = rng.sample(WORDS, rng.randrange(1, 4))
    found = {"type": "object", "properties": {key: schema(rng, max(depth, 0)) for key in keys}}
    found["required"] = [key for key in keys if rng.random() < 0.7]
    return found | {"additionalProperties": False}


def sequence(rng, depth):
    if rng.random() < 0.3:
        return {
            "type": "array",
            "prefixItems": [schema(rng, max(depth, 0)) for _ in range(2)],
            "items": False,
            "minItems": 2,
        }
    least = rng.randrange(3)
    return {
        "type": "array",
        "items": schema(rng, max(depth, 0)),
        "minItems": least,
        "maxItems": least + rng.randrange(1, 3),
    }


def union(rng, depth):
    return {"anyOf": [mapping(rng, depth), sequence(rng, depth), text(rng)]}


def referring(rng, depth):
    """For a whole answer alone: a reference begins at the top."""
    return {"$defs": {"it": schema(rng, 0)}, "type": "array", "items": {"$ref": "#/$defs/it"}, "maxItems": 2}


def answer_schema(rng, depth=2):
    """For a whole answer, of that many levels of objects and lists below the top."""
    return rng.choice([mapping, sequence, union, mapping, referring])(rng, depth)


def tool(rng, number):
    """A strict tool of some parameters, required and optional ones."""
    parameters = mapping(rng, 1)
    name = "".join(rng.choices(string.ascii_lowercase + "_", k=5)) + str(number)
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": True}}

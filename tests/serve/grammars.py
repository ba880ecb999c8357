"""Nano's grammars, and whether a text is of a schema."""

import json

import jsonschema

from cuq1.serve.structured import Grammars
from cuq1.text import Tokenizer
from tests.paths import NANO

TOKENIZER = Tokenizer.load(NANO, 4096)
STOP = (0,)
GRAMMARS = Grammars(TOKENIZER, STOP)


def valid(text, schema):
    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True

"""Answers that follow a grammar parse and validate, with drafts and whatever is taken back; without it they do not."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest

pytest.importorskip("llguidance")

from cuq1.errors import RequestError
from cuq1.reference.engine import ReferenceEngine
from cuq1.sampling import MaskPath
from cuq1.serve.grammar_mask import GrammarMask
from cuq1.serve.remote import EngineOptions, RemoteEngine
from cuq1.text import ChatTemplate, check_tools
from cuq1.text.output import OutputStream
from tests.paths import NANO
from tests.serve.grammars import GRAMMARS, STOP, TOKENIZER, valid
from tests.serve.running import DEVICE, ON_CPU, open_nano
from tests.serve.schemas import answer_schema, tool

TEMPLATE = ChatTemplate.load(NANO, TOKENIZER)
SEED = random.randrange(10**6)
SCHEMAS = 200


@pytest.fixture(scope="module")
def engine():
    with open_nano() as opened:
        yield opened


FIELDS = ("content", "reasoning", "tool_calls")


@dataclass
class Answered:
    content: str
    reasoning: str
    tool_calls: tuple
    accepted: int


def answer(engine, constraint, prompt, seed, tools=(), max_tokens=1500, **params):
    """(message, finish reason) of one request."""
    params = replace(engine.default_params, seed=seed, max_tokens=max_tokens, **params)
    engine.prefill(prompt.ids)
    stream = engine.decode(params, mask=constraint and constraint.mask(prompt.in_reasoning))
    output = OutputStream(TOKENIZER, tools=tools or None, reasoning=prompt.in_reasoning)
    accepted = 0
    for step in stream:
        accepted += step.accepted
        for token in step:
            if token not in STOP:
                output.feed(token)
    output.finish()
    return Answered(
        **{name: getattr(output.message(), name) for name in FIELDS}, accepted=accepted
    ), stream.finish_reason


def prompt(text, tools=None, thinking=False):
    return TEMPLATE.prompt([{"role": "user", "content": text}], tools=tools, enable_thinking=thinking)


@pytest.fixture
def engines(engine):
    """Those that compute beside each other: two processes, as servers have them, where that is sooner."""
    if not ON_CPU:
        yield [engine]
        return
    options = EngineOptions(str(NANO), DEVICE)
    with RemoteEngine(options) as one, RemoteEngine(options) as other:
        yield [one, other]


def test_200_random_schemas_with_drafts(engines):
    with ThreadPoolExecutor(len(engines)) as pool:
        counts = list(pool.map(every_other, engines, range(len(engines)), [len(engines)] * len(engines)))
    assert sum(number for number, _, _ in counts) == SCHEMAS
    assert sum(accepted for _, accepted, _ in counts) > SCHEMAS
    assert sum(right for _, _, right in counts) <= 1


def every_other(engine, first, step):
    """(schemas, accepted drafts, answers that were right without a grammar) of one engine's share."""
    asked, schemas, accepted, right_without = prompt("Answer in JSON."), 0, 0, 0
    for number in range(first, SCHEMAS, step):
        schema = answer_schema(random.Random(SEED + number), number // step % 2)
        message, reason = answer(engine, GRAMMARS.constraint(schema=schema), asked, number)
        assert reason == "stop", (SEED + number, schema, message)
        assert valid(message.content, schema), (SEED + number, schema, message)
        schemas += 1
        accepted += message.accepted
        if number < 8:
            right_without += valid(answer(engine, None, asked, number, max_tokens=60)[0].content, schema)
    return schemas, accepted, right_without


@pytest.mark.parametrize("params", [{"draft": "off"}, {"draft": 7}, {"temperature": 0.0}, {"top_k": 0, "top_p": 1.0}])
def test_whatever_the_parameters(engine, params):
    for number in range(3):
        schema = answer_schema(random.Random(SEED + number), 1)
        message, reason = answer(engine, GRAMMARS.constraint(schema=schema), prompt("JSON"), number, **params)
        assert reason == "stop", (SEED + number, schema, message)
        assert valid(message.content, schema), (SEED + number, schema, message)


def broken_pop(self, count):
    del self._history[-count:]


def broken_push(self, token):
    """Goes on from what was committed as if drafts were nothing."""
    self._history.append((self._phase, self._matcher, False))


@pytest.mark.parametrize(("name", "broken"), [("pop", broken_pop), ("push", broken_push)])
def test_a_grammar_that_does_not_follow_the_tokens_is_noticed(engine, monkeypatch, name, broken):
    monkeypatch.setattr(GrammarMask, name, broken)
    wrong = 0
    for number in range(10):
        if wrong > 2:
            return
        schema = answer_schema(random.Random(SEED + number), 1)
        try:
            message, reason = answer(engine, GRAMMARS.constraint(schema=schema), prompt("JSON"), number, max_tokens=200)
            wrong += reason != "stop" or not valid(message.content, schema)
        except RequestError:
            wrong += 1
    assert wrong > 2


@pytest.mark.skipif(not ON_CPU, reason="tests/gpu/test_host_sampling.py has a GPU's")
def test_a_target_without_the_mask_is_noticed(engine, monkeypatch):
    verified = ReferenceEngine._verified

    def unmasked(self, *args):
        masks, self._masks = self._masks, MaskPath()
        try:
            return verified(self, *args)
        finally:
            self._masks = masks

    monkeypatch.setattr(ReferenceEngine, "_verified", unmasked)
    constraint = GRAMMARS.constraint(schema=answer_schema(random.Random(SEED)))
    with pytest.raises(RequestError):
        answer(engine, constraint, prompt("JSON"), 1)


def test_reasoning_comes_before(engine):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["n"]}
    asked = prompt("How many?", thinking=True)
    assert asked.in_reasoning
    reasoned = 0
    for seed in range(60):  # some go on beyond the bound
        message, reason = answer(engine, GRAMMARS.constraint(schema=schema), asked, seed, max_tokens=150)
        if reason == "stop":
            assert valid(message.content, schema)
            reasoned += bool(message.reasoning)
        if reasoned > 1:
            return
    raise AssertionError(reasoned)


def test_json_object(engine):
    for seed in range(4):
        message, reason = answer(
            engine, GRAMMARS.constraint(schema={"type": "object"}), prompt("JSON"), seed, max_tokens=200
        )
        if reason == "stop":
            assert isinstance(json.loads(message.content), dict)


def test_calls_of_the_model(engine):
    rng, free = random.Random(SEED), 0
    for number in range(6):
        tools = check_tools([tool(rng, i) for i in range(2)])
        asked = prompt("Do something", tools)
        schemas = {one["function"]["name"]: one["function"]["parameters"] for one in tools}
        message, reason = answer(engine, GRAMMARS.constraint(tools=tools, choice="required"), asked, number, tools)
        assert reason == "stop", (SEED, message)
        assert message.tool_calls
        assert not message.content.strip()
        assert all(valid(call.arguments, schemas[call.name]) for call in message.tool_calls), (SEED, message, schemas)
        if number < 3:
            message, _ = answer(engine, None, asked, number, tools, max_tokens=60)
            calls = message.tool_calls
            free += bool(calls) and all(valid(one.arguments, schemas[one.name]) for one in calls)
    assert free <= 1

"""A fuzzer over the OpenAPI description, and bodies that are nothing like it: no answer is a defect of the server."""

import json
import random

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from cuq1.serve import chat
from cuq1.serve.openapi import description
from tests.serve.running import LIMIT, nano_service, serving

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

QUIET = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
    database=None,
)
ROUNDS = 3
PATHS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
]


@pytest.fixture(scope="module")
def small():
    """A server whose context is small, so that no answer is long."""
    service = nano_service(context=100)
    with serving(service) as url:
        yield url
    assert service.close(drain=False, timeout=LIMIT)


@pytest.fixture(scope="module")
def operations(small):
    api = schemathesis.openapi.from_url(f"{small}/openapi.json")
    return [found.ok() for found in api.get_all_operations()]


@pytest.mark.parametrize("path", sorted(description()["paths"]))
def test_what_is_described_is_no_defect(operations, path):
    (operation,) = (found for found in operations if found.path == path)
    assert_described(operation)


def assert_described(operation):
    @given(operation.as_strategy())
    @settings(QUIET, max_examples=10)
    def fuzz(case):
        response = case.call(timeout=LIMIT)
        check(response.status_code, response.text)

    fuzz()


SCALARS = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        5,
        2**63,
        2**64,
        10**30,
        0.5,
        -0.0,
        1e300,
        "",
        "a",
        "é\U0001f600",
        "\ud800",
        "\0",
    ),
    *(
        "user",
        "assistant",
        "system",
        "tool",
        "function",
        "json_schema",
        "json_object",
        "text",
        "auto",
        "none",
        "required",
    ),
    *("input_text", "message", "function_call", "function_call_output", "tool_use", "tool_result", "enabled", "any"),
    *("<|iquest_end|>", "<think>", "{", "{}", "[]"),
)
KEYS = (
    *(
        "type",
        "name",
        "content",
        "function",
        "schema",
        "text",
        "id",
        "role",
        "arguments",
        "parameters",
        "call_id",
        "format",
    ),
    *(
        "json_schema",
        "effort",
        "budget_tokens",
        "properties",
        "tool_use_id",
        "input",
        "input_schema",
        "pattern",
        "$ref",
    ),
)


def value(rng, depth=3):
    """Any JSON, of words that mean something here."""
    kind = rng.random()
    if depth == 0 or kind < 0.4:
        return rng.choice(SCALARS)
    if kind < 0.6:
        return [value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    return {rng.choice(KEYS): value(rng, depth - 1) for _ in range(rng.randint(0, 4))}


FIELDS = (
    "messages",
    "tools",
    "tool_choice",
    "response_format",
    "stop",
    "stop_sequences",
    "prompt",
    "input",
    "system",
    "instructions",
    "max_tokens",
    "max_output_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "logprobs",
    "stream",
    "stream_options",
    "chat_template_kwargs",
    "reasoning",
    "thinking",
    "metadata",
    "tokens",
    "text",
    "n",
    "draft",
    "reasoning_effort",
    "output_config",
    "include",
    "model",
    "echo",
    "top_logprobs",
    "client_metadata",
)
GOOD = {
    "messages": [{"role": "user", "content": "a"}],
    "prompt": "a",
    "input": "a",
    "tokens": [1],
    "max_tokens": 2,
    "max_output_tokens": 2,
}


@pytest.mark.parametrize("path", PATHS)
def test_what_is_not_described_is_no_defect_either(small, path):
    fuzz_fields(small + path, ROUNDS)


def fuzz_fields(url, rounds):
    """Each field in turn, with any value, in a good body or alone with another."""
    rng = random.Random(url.rpartition(":")[2].partition("/")[2])
    with httpx.Client(timeout=LIMIT) as client:
        for _ in range(rounds):
            for field in FIELDS:
                body = (GOOD if rng.random() < 0.7 else {}) | {rng.choice(FIELDS): value(rng), field: value(rng)}
                response = client.post(url, content=json.dumps(body))
                check(response.status_code, f"{response.text} to {body}")


@pytest.mark.parametrize("path", PATHS)
def test_what_is_no_json_is_refused(small, path):
    bodies = (
        b"",
        b"\0",
        b"nul",
        b'"a"',
        b"5",
        b"[" * 100_000,
        b'{"a":' * 5000,
        b"\xff\xfe{}",
        b'{"n": ' + b"9" * 9999 + b"}",
    )
    with httpx.Client(timeout=LIMIT) as client:
        for content in bodies:
            response = client.post(small + path, content=content)
            assert 400 <= response.status_code < 500, (content[:20], response.text)
            assert response.json()["error"]["message"]


def check(status, text):
    assert status < 500, text
    assert '"server_error"' not in text  # nor inside of a stream
    assert '"api_error"' not in text


def test_a_defect_is_seen(monkeypatch):
    """The negative control: a handler that fails on one field."""
    service = nano_service(context=100)
    honest = chat.plan

    def broken(body, service):
        if "seed" in body:
            raise KeyError("seed")
        return honest(body, service)

    monkeypatch.setattr(chat, "plan", broken)
    with serving(service) as url, pytest.raises(AssertionError, match="KeyError"):
        fuzz_fields(url + PATHS[0], ROUNDS)
    assert service.close(drain=False, timeout=LIMIT)

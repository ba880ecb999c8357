"""A fuzzer over the OpenAPI description, and bodies that are nothing like it: no answer is a defect of the server."""

import json

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

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
EXAMPLES = 80
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


@pytest.mark.parametrize("path", sorted(description()["paths"]))
def test_what_is_described_is_no_defect(small, path):
    api = schemathesis.openapi.from_url(f"{small}/openapi.json")
    (operation,) = (found.ok() for found in api.get_all_operations() if found.ok().path == path)
    assert_described(operation)


def assert_described(operation):
    @given(operation.as_strategy())
    @settings(QUIET, max_examples=EXAMPLES // 8)
    def fuzz(case):
        response = case.call(timeout=LIMIT)
        check(response.status_code, response.text)

    fuzz()


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from(
        ["user", "assistant", "tool", "function", "json_schema", "text", "<|iquest_end|>", "\ud800", "auto"]
    ),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["type", "name", "content", "function", "schema", "text", "id", "role"]), inner
        )
    ),
    max_leaves=8,
)
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
    fuzz_fields(small + path, EXAMPLES)


def fuzz_fields(url, examples):
    with httpx.Client(timeout=LIMIT) as client:

        @given(st.sampled_from(FIELDS), VALUES, st.sampled_from(FIELDS), VALUES, st.booleans())
        @settings(QUIET, max_examples=examples)
        def fuzz(field, value, another, other, good):
            body = (GOOD if good else {}) | {another: other, field: value}
            response = client.post(url, content=json.dumps(body))
            check(response.status_code, response.text)

        fuzz()


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
    for content in bodies:
        response = httpx.post(small + path, content=content, timeout=LIMIT)
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
        fuzz_fields(url + PATHS[0], EXAMPLES)
    assert service.close(drain=False, timeout=LIMIT)

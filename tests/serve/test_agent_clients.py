"""The official openai and anthropic clients, unmodified, against a running server: Responses and Messages."""

import asyncio
import contextlib
import json
import time
from contextlib import contextmanager

import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel

from cuq1.serve.request import ApiError, CallPiece, Finished, Piece, Queued, Started
from tests.paths import ROOT
from tests.serve.agents import check_messages, check_responses, parse_sse
from tests.serve.running import endless, wait_for

FUNCTIONS = [tool["function"] for tool in json.loads((ROOT / "tools" / "nano_tools.json").read_text())]
FLAT = [{"type": "function", "strict": False, **function} for function in FUNCTIONS]
CUSTOM = [{"name": f["name"], "description": f["description"], "input_schema": f["parameters"]} for f in FUNCTIONS]
WRITE = "Write a Python function `is_even`: Return True for an even number."
LIST = "List the files in src"


@pytest.fixture(scope="module")
def openai_client(base_url):
    return openai.OpenAI(base_url=f"{base_url}/v1", api_key="any", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def anthropic_client(base_url):
    return anthropic.Anthropic(base_url=base_url, api_key="any", max_retries=0, timeout=60)


def respond(client, **options):
    options = {"model": "any", "input": WRITE, "max_output_tokens": 30, "extra_body": {"seed": 5}} | options
    return client.responses.create(**options)


def respond_streamed(client, **options):
    options = {"model": "any", "input": WRITE, "max_output_tokens": 30, "extra_body": {"seed": 5}} | options
    with client.responses.stream(**options) as stream:
        events = list(stream)
        return events, stream.get_final_response()


def items(response):
    return [
        (item.type, [part.text for part in getattr(item, "content", None) or []], getattr(item, "arguments", None))
        for item in response.output
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0},
        {"top_p": 0.5},
        {"reasoning": {"effort": "none"}},
        {"reasoning": {"effort": "high", "summary": "auto"}, "include": ["reasoning.encrypted_content"]},
        {"input": LIST, "tools": FLAT},
        {"input": LIST, "tools": FLAT, "tool_choice": "required"},
        {"input": LIST, "tools": [tool | {"strict": True} for tool in FLAT], "temperature": 0},
        {"input": LIST, "tools": FLAT, "tool_choice": {"type": "function", "name": "run"}},
        {"instructions": "Answer briefly.", "max_output_tokens": 5},
    ],
    ids=str,
)
def test_responses_are_the_same_streamed_and_not(openai_client, options):
    whole = respond(openai_client, **options)
    events, final = respond_streamed(openai_client, **options)
    assert items(whole) == items(final)
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    assert whole.status == final.status
    assert whole.usage.output_tokens == final.usage.output_tokens
    assert whole.usage.output_tokens_details == final.usage.output_tokens_details
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens


def test_another_seed_is_another_response(openai_client):
    """The control of the comparison above."""
    assert len({str(items(respond(openai_client, extra_body={"seed": seed}))) for seed in range(4)}) > 1


def test_reasoning_can_be_left_out_and_summarised(openai_client):
    assert [item.type for item in respond(openai_client, reasoning={"effort": "none"}).output] == ["message"]
    asked = {"reasoning": {"effort": "low", "summary": "auto"}, "temperature": 0}
    thought = respond(openai_client, **asked).output[0]
    assert thought.type == "reasoning"
    assert thought.summary[0].text == thought.content[0].text != ""
    events, _ = respond_streamed(openai_client, **asked)
    assert (
        "".join(e.delta for e in events if e.type == "response.reasoning_summary_text.delta") == thought.summary[0].text
    )


def test_required_and_named_calls_come(openai_client):
    answer = respond(openai_client, input=LIST, tools=FLAT, tool_choice="required", max_output_tokens=200)
    assert "function_call" in [item.type for item in answer.output]
    named = {"type": "function", "name": "run"}
    answer = respond(openai_client, input="Run git diff", tools=FLAT, tool_choice=named, max_output_tokens=200)
    assert [item.name for item in answer.output if item.type == "function_call"] == ["run"]
    answer = respond(openai_client, input=LIST, tools=FLAT, tool_choice="none", temperature=0)
    assert "function_call" not in [item.type for item in answer.output]


def test_one_call_at_a_time_where_it_is_asked_for(openai_client, service):
    calls = [CallPiece(i, f"call_{i}f", "run", "{}", "", (), 7 + i, 2) for i in range(2)]
    with scripted(service, [Started(9, 3), *calls, Finished("tool_calls", None, 11, 2)]):
        both = respond(openai_client, tools=FLAT)
        one = respond(openai_client, tools=FLAT, parallel_tool_calls=False)
    assert [item.call_id for item in both.output] == ["call_0f", "call_1f"]
    assert [item.call_id for item in one.output] == ["call_0f"]
    assert (one.usage.output_tokens, one.usage.output_tokens_details.reasoning_tokens) == (7, 2)
    assert both.usage.output_tokens == 11


class Fact(BaseModel):
    """A schema."""

    name: str
    even: bool


def test_responses_of_a_schema_are_parsed(openai_client):
    answer = openai_client.responses.parse(
        model="any", input="An even number?", text_format=Fact, max_output_tokens=400, extra_body={"seed": 2}
    )
    if answer.status == "completed":
        assert isinstance(answer.output_parsed, Fact)
    assert answer.output_text.lstrip().startswith("{")


def test_logprobs_come_with_the_text(openai_client):
    answer = respond(
        openai_client, include=["message.output_text.logprobs"], top_logprobs=2, reasoning={"effort": "none"}
    )
    part = answer.output[0].content[0]
    assert "".join(entry.token for entry in part.logprobs).startswith(part.text[:20])
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in part.logprobs)


def test_cached_tokens_are_told_in_each_sense(openai_client, anthropic_client):
    first = respond(openai_client, input=[{"role": "user", "content": LIST}], tools=FLAT)
    again = respond(openai_client, input=[{"role": "user", "content": LIST}], tools=FLAT)
    assert again.usage.input_tokens == first.usage.input_tokens
    assert again.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 1
    message = say(anthropic_client, messages=[{"role": "user", "content": LIST}], tools=CUSTOM, thinking=ADAPTIVE)
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == first.usage.input_tokens
    assert usage.cache_creation_input_tokens == 0


# ---- Messages

ADAPTIVE = {"type": "adaptive"}


def say(client, **options):
    options = {"model": "any", "messages": [{"role": "user", "content": WRITE}], "max_tokens": 30} | options
    return client.messages.create(**{"extra_body": {"seed": 5}} | options)


def say_streamed(client, **options):
    options = {"model": "any", "messages": [{"role": "user", "content": WRITE}], "max_tokens": 30} | options
    with client.messages.stream(**{"extra_body": {"seed": 5}} | options) as stream:
        events = list(stream)
        return events, stream.get_final_message()


def blocks(message):
    return [block.model_dump(exclude={"id"}, exclude_none=True) for block in message.content]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"extra_body": {"temperature": 0}},
        {"extra_body": {"top_k": 3, "temperature": 0.7, "seed": 1}},
        {"thinking": ADAPTIVE},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"thinking": {"type": "disabled"}},
        {"messages": [{"role": "user", "content": LIST}], "tools": CUSTOM, "thinking": ADAPTIVE},
        {"messages": [{"role": "user", "content": LIST}], "tools": CUSTOM, "tool_choice": {"type": "any"}},
        {
            "messages": [{"role": "user", "content": LIST}],
            "tools": CUSTOM,
            "tool_choice": {"type": "tool", "name": "run"},
        },
        {"system": "Answer briefly.", "stop_sequences": ["return"]},
        {"max_tokens": 4},
    ],
    ids=str,
)
def test_messages_are_the_same_streamed_and_not(anthropic_client, options):
    whole = say(anthropic_client, **options)
    events, final = say_streamed(anthropic_client, **options)
    assert [{k: v for k, v in block.items() if k != "parsed_output"} for block in blocks(final)] == blocks(whole)
    assert "".join(e.text for e in events if e.type == "text") == "".join(
        block.text for block in whole.content if block.type == "text"
    )
    assert (whole.stop_reason, whole.stop_sequence) == (final.stop_reason, final.stop_sequence)
    assert whole.usage.output_tokens == final.usage.output_tokens
    assert whole.usage.output_tokens_details == final.usage.output_tokens_details
    assert whole.id != final.id


def test_another_seed_is_another_message(anthropic_client):
    """The control of the comparison above."""
    assert len({str(blocks(say(anthropic_client, extra_body={"seed": seed}))) for seed in range(4)}) > 1


def test_thinking_comes_where_it_is_asked_for(anthropic_client):
    calm = {"extra_body": {"temperature": 0}}
    assert [block.type for block in say(anthropic_client, **calm).content] == ["text"]
    thought, said = say(anthropic_client, thinking=ADAPTIVE, **calm).content
    assert (thought.type, said.type) == ("thinking", "text")
    assert thought.thinking
    assert thought.signature


def test_forced_tools_are_used(anthropic_client):
    asked = {"messages": [{"role": "user", "content": LIST}], "tools": CUSTOM, "max_tokens": 200}
    message = say(anthropic_client, tool_choice={"type": "tool", "name": "list_dir"}, **asked)
    assert [block.name for block in message.content if block.type == "tool_use"] == ["list_dir"]
    assert message.stop_reason == "tool_use"


def test_one_tool_at_a_time_where_it_is_asked_for(anthropic_client, service):
    calls = [CallPiece(i, f"call_{i}f", "run", '{"command": "ls"}', "", (), 7 + i, 2) for i in range(2)]
    with scripted(service, [Started(9, 3), *calls, Finished("tool_calls", None, 11, 2)]):
        both = say(anthropic_client, tools=CUSTOM)
        one = say(anthropic_client, tools=CUSTOM, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.id for block in both.content] == ["toolu_0f", "toolu_1f"]
    assert [block.id for block in one.content] == ["toolu_0f"]
    assert (one.stop_reason, one.usage.output_tokens) == ("tool_use", 7)


def test_tokens_are_counted(anthropic_client):
    asked = {"messages": [{"role": "user", "content": LIST}], "tools": CUSTOM, "system": "Be brief."}
    counted = anthropic_client.messages.count_tokens(model="any", **asked).input_tokens
    usage = say(anthropic_client, **asked).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens
    assert counted > anthropic_client.messages.count_tokens(model="any", messages=asked["messages"]).input_tokens


def test_both_clients_list_the_model(openai_client, anthropic_client):
    assert [model.id for model in openai_client.models.list()] == ["nano"]
    assert [model.id for model in anthropic_client.models.list()] == ["nano"]


def test_many_clients_at_once_each_get_their_answer(base_url):
    async def main():
        one = openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="any", max_retries=0, timeout=60)
        other = anthropic.AsyncAnthropic(base_url=base_url, api_key="any", max_retries=0, timeout=60)
        asked = {"model": "any", "max_output_tokens": 12, "reasoning": {"effort": "none"}}
        said = {"model": "any", "max_tokens": 12}
        async with one, other:
            alone = [
                (await one.responses.create(input=WRITE, extra_body={"seed": s}, **asked)).output_text for s in range(4)
            ]
            answers = await asyncio.gather(
                *(one.responses.create(input=WRITE, extra_body={"seed": s}, **asked) for s in range(4)),
                *(
                    other.messages.create(messages=[{"role": "user", "content": WRITE}], extra_body={"seed": s}, **said)
                    for s in range(4)
                ),
            )
        assert [answer.output_text for answer in answers[:4]] == alone
        assert [answer.content[0].text for answer in answers[4:]] == alone

    asyncio.run(main())


# ---- what goes wrong


@contextmanager
def scripted(service, events=(), *, error=None, pause=0.0):
    """A service whose answers are these events, or which refuses."""

    class Script:
        def __init__(self):
            self._events = iter(events)

        def __aiter__(self):
            return self

        async def __anext__(self):
            await asyncio.sleep(pause)
            try:
                return next(self._events)
            except StopIteration:
                raise StopAsyncIteration from None

        async def aclose(self):
            pass

    def generate(_generation):
        if error is not None:
            raise error
        return Script()

    service.generate = generate
    try:
        yield
    finally:
        del service.generate


def test_a_request_that_cannot_be_served_raises_with_the_fields_name(openai_client, anthropic_client):
    with pytest.raises(openai.BadRequestError) as refused:
        respond(openai_client, previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"
    assert refused.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError):
        respond_streamed(openai_client, tool_choice="required")
    with pytest.raises(anthropic.BadRequestError, match="mcp_servers"):
        say(anthropic_client, extra_body={"mcp_servers": [{}]})
    with pytest.raises(anthropic.BadRequestError, match="budget_tokens"):
        say_streamed(anthropic_client, thinking={"type": "enabled", "budget_tokens": 0})


@pytest.mark.parametrize("kind", ["busy", "shutting_down"])
def test_a_busy_server_is_what_each_client_tries_again(openai_client, anthropic_client, service, kind):
    with scripted(service, error=ApiError(kind, "later")):
        for call in (respond, respond_streamed):
            with pytest.raises(openai.InternalServerError) as refused:
                call(openai_client)
            assert refused.value.status_code == 503
    for call in (say, say_streamed):
        with scripted(service, error=ApiError(kind, "later")), pytest.raises(anthropic.APIStatusError) as refused:
            call(anthropic_client)
        assert refused.value.status_code == {"busy": 529, "shutting_down": 503}[kind]
        assert int(refused.value.response.headers["retry-after"]) > 0
        assert refused.value.body["error"] == {"type": "overloaded_error", "message": "later"}


def test_an_engine_that_fails_before_the_end_is_told_in_each_shape(openai_client, anthropic_client, service):
    failed = Finished("error", error=ApiError("failed", "the engine failed"))
    with scripted(service, [Queued(0), Started(5, 0), Piece("content", "Half"), failed]):
        with pytest.raises(openai.InternalServerError, match="the engine failed"):
            respond(openai_client)
        with pytest.raises(anthropic.InternalServerError, match="the engine failed"):
            say(anthropic_client)
        with pytest.raises(anthropic.APIStatusError, match="the engine failed"):
            say_streamed(anthropic_client)
        with openai_client.responses.create(model="any", input="x", stream=True) as stream:
            last = list(stream)[-1]
    assert last.type == "response.failed"
    assert (last.response.error.code, last.response.error.message) == ("server_error", "the engine failed")


def test_waiting_is_heard_by_both_clients(openai_client, anthropic_client, base_url, service):
    events = [*(Queued(3 - i) for i in range(4)), Started(5, 0), Piece("content", "Here."), Finished("stop", None, 3)]
    with scripted(service, events, pause=0.02):
        _, final = respond_streamed(openai_client)
        assert final.output_text == "Here."
        _, message = say_streamed(anthropic_client)
        assert message.content[0].text == "Here."
        body = {"input": "x", "stream": True}
        frames = parse_sse(openai_client._client.post(f"{base_url}/v1/responses", json=body).text)
        check_responses(frames)
        assert [data["type"] for _, data in frames].count("response.in_progress") == 4
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "stream": True}
        frames = parse_sse(anthropic_client._client.post(f"{base_url}/v1/messages", json=body).text)
        check_messages(frames)
        assert [data["type"] for _, data in frames].count("ping") == 4


def test_a_queue_that_moves_keeps_clients_waiting_not_failing(openai_client, anthropic_client, base_url, service):
    """Two real requests, one behind the other: the second hears of it before its answer begins."""

    async def main():
        long = openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="any", timeout=60)
        async with long:
            first = await long.responses.create(model="any", input=WRITE, stream=True, max_output_tokens=60000)
            kinds = []
            begun = time.monotonic()
            second = await long.responses.create(model="any", input="hi", stream=True, max_output_tokens=3)
            async for _ in first:
                if time.monotonic() - begun > 3 * service.keep_alive:
                    break
            await first.close()
            async for event in second:
                kinds.append(event.type)
        return kinds

    with endless(service):
        kinds = asyncio.run(main())
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.in_progress") >= 2


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_stops_the_engine(base_url, service, path, stream):
    body = {"input": WRITE} if path == "/v1/responses" else {"messages": [{"role": "user", "content": WRITE}]}
    body |= {"max_tokens": 60000, "max_output_tokens": 60000, "stream": stream}
    with (
        endless(service),
        httpx.Client(timeout=httpx.Timeout(60, read=0.3)) as client,
        contextlib.suppress(httpx.ReadTimeout),
        client.stream("POST", base_url + path, json=body) as response,
    ):
        next(response.iter_bytes())
        assert service.worker.busy
    wait_for(lambda: not service.worker.busy and not service.worker.waiting, 5)

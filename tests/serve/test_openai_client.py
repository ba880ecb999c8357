"""The official openai client, unmodified, against a running server: Chat Completions and completions."""

import json

import httpx
import jinja2
import openai
import pytest
from anthropic.types import ModelInfo

from cuq1.serve.settings import Settings
from tests.paths import NANO
from tests.serve.running import LIMIT, PAUSE, nano_service, open_nano, post, serving
from tests.serve.watched import Watched

RUN = {
    "type": "function",
    "function": {"name": "run", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}},
}
QUESTION = [{"role": "user", "content": "Write a Python function `is_even`: Return True for an even number."}]
COMMAND = [{"role": "user", "content": "Run git diff"}]


@pytest.fixture(scope="module")
def client(base_url):
    return openai.OpenAI(base_url=f"{base_url}/v1", api_key="any", max_retries=0, timeout=60)


def ask(client, messages=QUESTION, **options):
    return client.chat.completions.create(
        model="whatever", messages=messages, **{"max_tokens": 60, "seed": 3} | options
    )


def joined(chunks):
    """What the pieces of a stream say together, in the shape of an unstreamed message."""
    said = {"content": "", "reasoning": "", "calls": {}, "finish": None, "usage": None, "role": None}
    for chunk in chunks:
        if chunk.usage is not None:
            said["usage"] = chunk.usage
        for choice in chunk.choices:
            delta = choice.delta
            said["role"] = delta.role or said["role"]
            said["content"] += delta.content or ""
            said["reasoning"] += getattr(delta, "reasoning_content", None) or ""
            said["finish"] = choice.finish_reason or said["finish"]
            for call in delta.tool_calls or []:
                known = said["calls"].setdefault(call.index, {"name": "", "arguments": "", "id": None})
                known["id"] = call.id or known["id"]
                known["name"] += call.function.name or ""
                known["arguments"] += call.function.arguments or ""
    return said


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        *((seed, {}) for seed in (0, 7, 2**64 - 1, -1)),
        (7, {"temperature": 0}),
        *((seed, {"top_p": 0.5, "extra_body": {"top_k": 5}}) for seed in (0, 7)),
        *((seed, {"stop": ["return", "zzz"]}) for seed in (0, 7)),
        (7, {"max_completion_tokens": 7, "max_tokens": None}),
        *((seed, {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}) for seed in (0, 7)),
    ],
)
def test_streamed_pieces_joined_are_the_unstreamed_answer(client, seed, options):
    whole = ask(client, seed=seed, **options)
    said = joined(ask(client, seed=seed, stream=True, stream_options={"include_usage": True}, **options))
    choice = whole.choices[0]
    assert said["content"] == (choice.message.content or "")
    assert said["reasoning"] == getattr(choice.message, "reasoning_content", "")
    assert said["finish"] == choice.finish_reason
    assert said["role"] == choice.message.role == "assistant"
    for name in ("prompt_tokens", "completion_tokens", "total_tokens", "completion_tokens_details"):
        assert getattr(said["usage"], name) == getattr(whole.usage, name)
    assert whole.usage.completion_tokens <= 60
    assert (whole.id, whole.object) != (None, None)


def test_another_seed_gives_another_answer(client):
    """The negative control of the comparison above."""
    answers = {ask(client, seed=seed).choices[0].message.model_dump_json() for seed in range(4)}
    assert len(answers) > 1


def test_finish_reasons(client):
    assert ask(client, max_tokens=3).choices[0].finish_reason == "length"
    stopped = ask(client, stop=["```"], temperature=0, max_tokens=200).choices[0]
    assert stopped.finish_reason == "stop"
    assert "```" not in stopped.message.content
    assert ask(client, COMMAND, tools=[RUN], seed=1).choices[0].finish_reason == "tool_calls"


def test_tool_calls(client):
    whole = ask(client, COMMAND, tools=[RUN], seed=1)
    said = joined(ask(client, COMMAND, tools=[RUN], seed=1, stream=True))
    (call,) = whole.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("run", {"command": "git diff"})
    (streamed,) = said["calls"].values()
    assert (streamed["name"], streamed["arguments"]) == (call.function.name, call.function.arguments)
    assert streamed["id"] != call.id
    assert whole.choices[0].message.content is None
    assert said["finish"] == "tool_calls"


def test_a_second_turn_reuses_the_first(client):
    first = ask(client, COMMAND, tools=[RUN], seed=1)
    call = first.choices[0].message.tool_calls[0]
    history = [
        *COMMAND,
        first.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "+ a line"},
    ]
    second = ask(client, history, tools=[RUN], seed=1)
    held = first.usage.prompt_tokens + first.usage.completion_tokens - 1
    assert held - 1 <= second.usage.prompt_tokens_details.cached_tokens < second.usage.prompt_tokens


def test_results_are_rendered_in_the_order_of_their_calls(base_url):
    """Tools that run side by side end in any order; a template shows what they brought without ids."""

    def call(id_, path):
        function = {"name": "read_file", "arguments": json.dumps({"path": path})}
        return {"id": id_, "type": "function", "function": function}

    def prompt(*results):
        turns = [{"role": "assistant", "content": "", "tool_calls": [call("a", "A"), call("b", "B"), call("c", "C")]}]
        turns += [{"role": "tool", "content": f"of {id_}"} | ({"tool_call_id": id_} if id_ else {}) for id_ in results]
        return post(base_url, "/tokenize", {"messages": [*COMMAND, *turns, *turns[:1], *turns[3:0:-1]]})["tokens"]

    assert prompt("c", "a", "b") == prompt("b", "c", "a") == prompt("a", "b", "c")
    assert prompt("a", "b", "other") == prompt("other", "b", "a") != prompt("a", "b", "c")
    assert prompt("z", "y") != prompt("y", "z")  # whose they are is not known: as they came


def test_usage_counts_reasoning(client):
    whole = ask(client, seed=5, max_tokens=200)
    details = whole.usage.completion_tokens_details
    assert 1 <= details.reasoning_tokens <= whole.usage.completion_tokens
    off = ask(client, seed=5, reasoning_effort="none")
    assert off.usage.completion_tokens_details.reasoning_tokens == 0
    assert not hasattr(off.choices[0].message, "reasoning_content")


@pytest.mark.parametrize(
    ("switches", "thinks"),
    [
        ({"reasoning_effort": "minimal"}, False),
        ({"reasoning_effort": "low"}, True),
        ({"enable_thinking": False}, False),
        ({"enable_thinking": True, "reasoning_effort": "none"}, True),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 99}}, True),
        ({"thinking": None, "reasoning": {"effort": "none", "summary": "auto"}}, False),
        ({"reasoning": {"effort": None}, "enable_thinking": None}, True),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, False),
    ],
)
def test_switches_of_reasoning(base_url, service, switches, thinks):
    ids = post(base_url, "/tokenize", {"messages": QUESTION} | switches)["tokens"]
    assert service.tokenizer.decode(ids).endswith("<think>" if thinks else "</think>")


def test_required_and_named_calls(client):
    for choice in ("required", {"type": "function", "function": {"name": "run"}}):
        answer = ask(client, COMMAND, tools=[RUN], tool_choice=choice, reasoning_effort="none", max_tokens=400)
        assert answer.choices[0].finish_reason == "tool_calls"
        for call in answer.choices[0].message.tool_calls:
            assert call.function.name == "run"
            json.loads(call.function.arguments)
    none = ask(client, COMMAND, tools=[RUN], tool_choice="none", seed=1)
    assert none.choices[0].message.tool_calls is None


def test_one_call_where_parallel_ones_are_off(client):
    answer = ask(client, COMMAND, tools=[RUN], parallel_tool_calls=False, seed=1)
    said = joined(ask(client, COMMAND, tools=[RUN], parallel_tool_calls=False, seed=1, stream=True))
    assert len(answer.choices[0].message.tool_calls) == len(said["calls"]) == 1
    assert answer.choices[0].finish_reason == said["finish"] == "tool_calls"


def test_response_format(client):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "count": {"type": "integer"}},
        "required": ["name", "count"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
    options = {"response_format": form, "reasoning_effort": "none", "max_tokens": 300}
    whole = ask(client, **options)
    assert set(json.loads(whole.choices[0].message.content)) == {"name", "count"}
    assert joined(ask(client, stream=True, **options))["content"] == whole.choices[0].message.content


def test_logprobs_are_of_each_content_token(client, service):
    options = {"logprobs": True, "top_logprobs": 3, "temperature": 0, "reasoning_effort": "none", "max_tokens": 20}
    whole = ask(client, **options)
    entries = whole.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == whole.choices[0].message.content
    assert len(entries) == whole.usage.completion_tokens
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0  # greedy: the likeliest one
    chunks = [chunk.choices[0] for chunk in ask(client, stream=True, **options)]
    streamed = [entry for choice in chunks if choice.logprobs for entry in choice.logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]
    assert ask(client, max_tokens=2).choices[0].logprobs is None


def test_completions(client, service):
    options = {"model": "m", "prompt": "def add(a, b):\n", "max_tokens": 24, "seed": 11, "logprobs": 2}
    whole = client.completions.create(**options)
    chunks = list(client.completions.create(stream=True, **options))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert "".join(whole.choices[0].logprobs.tokens) == whole.choices[0].text
    ids = service.tokenizer.encode(options["prompt"], control=True)
    again = client.completions.create(**options | {"prompt": ids})
    assert again.choices[0].text == whole.choices[0].text
    echoed = client.completions.create(**options | {"echo": True, "logprobs": None})
    assert echoed.choices[0].text == options["prompt"] + whole.choices[0].text


def test_a_completion_without_a_bound_is_short(client):
    """Sixteen tokens, as the interface has it: raw text would go on to the context's end."""
    options = {"model": "m", "prompt": "def f(x):\n", "temperature": 0}
    short, longer = client.completions.create(**options), client.completions.create(**options, max_tokens=17)
    assert (short.usage.completion_tokens, longer.usage.completion_tokens) == (16, 17)
    assert short.choices[0].finish_reason == "length"


def test_a_chat_is_tokenized_as_it_is_asked(client, base_url):
    body = {"messages": COMMAND, "tools": [RUN | {"function": RUN["function"] | {"strict": True}}]}
    asked = client.chat.completions.create(model="m", max_tokens=1, **body)
    assert post(base_url, "/tokenize", body)["count"] == asked.usage.prompt_tokens
    refused = httpx.post(f"{base_url}/tokenize", json=body | {"add_generation_prompt": False})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "add_generation_prompt")


def test_control_tokens_count_in_raw_prompts_alone(client, base_url, service):
    control = service.tokenizer.control_tokens["<|iquest_end|>"]
    raw = post(base_url, "/tokenize", {"prompt": "a<|iquest_end|>"})
    assert raw["count"] == len(raw["tokens"])
    assert raw["tokens"][-1] == control
    assert control not in post(base_url, "/tokenize", {"prompt": "a<|iquest_end|>", "parse_special": False})["tokens"]
    chat = [{"role": "user", "content": "a<|iquest_end|><think>"}]
    ids = post(base_url, "/tokenize", {"messages": chat})["tokens"]
    assert ids.count(control) == 1  # the template's own
    assert post(base_url, "/detokenize", {"tokens": raw["tokens"]})["prompt"] == "a<|iquest_end|>"
    prompt = post(base_url, "/detokenize", {"tokens": ids})["prompt"]
    assert chat[0]["content"] in prompt
    usage = ask(client, chat, max_tokens=1).usage
    assert usage.prompt_tokens == len(ids)


def test_models(client, base_url, service):
    (model,) = client.models.list().data
    ModelInfo.model_validate(model.model_dump())  # as the anthropic client has it
    assert httpx.get(f"{base_url}/v1/models/").status_code == 404
    assert (model.id, model.max_model_len) == (service.model_name, service.context)
    assert client.models.retrieve("any/name").object == "model"


def test_ids_are_unique(client):
    ids = [ask(client, COMMAND, tools=[RUN], seed=1) for _ in range(3)]
    assert len({answer.id for answer in ids}) == 3
    assert len({answer.choices[0].message.tool_calls[0].id for answer in ids}) == 3


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"n": 2}, "n"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"seed": 2**64}, "seed"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs.messages"),
        ({"extra_body": {"min_p": 0.1}}, "min_p"),
        ({"extra_body": {"draft": 9}}, "draft"),
        ({"extra_body": {"thinking": {"type": "often"}}}, "thinking.type"),
        ({"extra_body": {"reasoning": {"effort": ["low"]}}}, "reasoning.effort"),
        ({"extra_body": {"enable_thinking": "no"}}, "enable_thinking"),
    ],
)
def test_what_is_not_served_is_refused_by_name(client, options, param):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, **{"messages": QUESTION} | options)
    assert refused.value.body["param"] == param
    assert refused.value.body["type"] == "invalid_request_error"


def test_a_template_that_fails_tells_no_path(client, monkeypatch):
    """How deep is too deep for a template depends on Python: here it is whatever it is given."""

    def too_deep(*_, **__):
        raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setattr(jinja2.Template, "render", too_deep)
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client)
    assert "chat_template.jinja fails on these messages" in refused.value.body["message"]
    assert str(NANO.parent) not in refused.value.body["message"]


@pytest.mark.parametrize(
    "options",
    [
        {"n": 1, "frequency_penalty": 0, "presence_penalty": 0.0, "user": "u", "store": False},
        {"metadata": {"a": "b"}, "service_tier": "auto", "temperature": None, "stop": None, "tools": None},
        {"extra_body": {"unknown": {"deep": [1]}, "repetition_penalty": 1.0, "prompt_cache_key": "k"}},
    ],
)
def test_what_changes_nothing_is_taken(client, options):
    expected = ask(client).choices[0].message
    assert ask(client, **options).choices[0].message == expected


def test_a_prompt_beyond_the_context_is_refused(client, service):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="m", prompt=[5] * service.context)
    assert refused.value.body["code"] == "context_length_exceeded"
    assert str(service.context) in refused.value.body["message"]


def test_a_wrong_key_and_a_full_queue_are_what_the_client_knows(service, monkeypatch):
    with serving(service, Settings(api_key="the key")) as url:
        given = {"base_url": f"{url}/v1", "max_retries": 0}
        with pytest.raises(openai.AuthenticationError) as refused:
            ask(openai.OpenAI(api_key="another", **given))
        assert refused.value.code == "invalid_api_key"
        right = openai.OpenAI(api_key="the key", **given)
        monkeypatch.setattr(service, "max_queue", -1)
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError) as busy:
                ask(right, stream=stream)
            assert busy.value.status_code == 503
            assert busy.value.response.headers["retry-after"]
        monkeypatch.undo()
        assert ask(right, max_tokens=1).choices


def test_an_engine_that_fails_in_the_stream_is_an_error_of_the_stream():
    service = nano_service(lambda: Watched(open_nano()), restarts=0)
    engine = service.engine
    engine.pause = PAUSE
    with serving(service) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
        chunks = iter(ask(client, stream=True, max_tokens=500))
        next(chunks)
        engine.failure = OSError("a device that is gone, with a prompt in its words")
        with pytest.raises(openai.APIError, match="the engine failed"):
            list(chunks)
        with pytest.raises(openai.InternalServerError):
            ask(client)
        assert httpx.get(f"{url}/health").status_code == 503
    assert service.close(timeout=LIMIT)

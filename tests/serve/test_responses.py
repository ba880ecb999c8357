"""/v1/responses: what items become, what events become, and every request that an agent was seen to send."""

import json

import httpx
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from cuq1.serve.agents import opened, sealed
from cuq1.serve.request import ApiError, CallPiece, Finished, Piece, Queued, Started, TokenInfo, TopToken
from cuq1.serve.responses_input import Names, read_choice, read_input, read_schema, read_tools
from cuq1.serve.responses_output import ResponseWriter
from tests.serve.agents import RuleBroken, check_responses, parse_sse, recorded
from tests.serve.running import NO_CERTIFICATES, ON_CPU, post

REQUESTS = recorded(path="/v1/responses")
EVENT = TypeAdapter(ResponseStreamEvent)


def by_name(name):
    return next(one for one in REQUESTS if one.name == name).body


def messages_of(body):
    return read_input(body, read_tools(body)[1])


def call(call_id, name="exec_command", arguments='{"cmd": "ls -la"}'):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


# ---- from the wire


def test_instructions_and_roles_come_in_order():
    messages = messages_of(by_name("codex_turn1"))
    assert [message["role"] for message in messages] == ["system", "developer", "user", "user"]
    parts = by_name("codex_turn1")["input"][0]["content"]
    assert messages[1]["content"] == f"{parts[0]['text']}\n\n{parts[1]['text']}"


def test_a_string_is_a_user_message():
    assert messages_of({"input": "hi"}) == [{"role": "user", "content": "hi"}]


def test_tools_in_namespaces_are_offered_and_others_left_out():
    tools, names = read_tools(by_name("codex_turn1"))
    assert [tool["function"]["name"] for tool in tools] == ["exec_command", "close_agent", "wait_agent"]
    assert names.told("close_agent") == ("multi_agent_v1", "close_agent")
    assert names.told("exec_command") == (None, "exec_command")


def test_tools_of_one_name_in_two_namespaces_are_told_apart():
    function = {"type": "function", "name": "go", "parameters": {"type": "object"}}
    body = {
        "tools": [
            function,
            {"type": "function", "name": "b__go"},
            {"type": "namespace", "name": "a", "tools": [function]},
            {"type": "namespace", "name": "b", "tools": [function, {"type": "web_search"}]},
        ]
    }
    tools, names = read_tools(body)
    shown = [tool["function"]["name"] for tool in tools]
    assert len(set(shown)) == 4
    assert [names.told(name) for name in shown] == [(None, "go"), (None, "b__go"), ("a", "go"), ("b", "go")]
    assert [names.shown(*names.told(name)) for name in shown] == shown


def test_a_call_and_its_result_are_a_turn_and_a_message():
    messages = messages_of(by_name("codex_turn2"))
    assert messages[-2] == {"role": "assistant", "content": "", "tool_calls": [call("call_0")]}
    assert messages[-1]["role"] == "tool"
    assert messages[-1]["tool_call_id"] == "call_0"


def test_text_and_call_are_one_turn():
    turn = messages_of(by_name("codex_turn2_text_then_call"))[-2]
    assert turn == {"role": "assistant", "content": "Looking.", "tool_calls": [call("call_0")]}


def test_reasoning_belongs_to_the_turn_that_follows():
    turn = messages_of(by_name("codex_turn2_reasoning"))[-2]
    assert turn["reasoning_content"] == "Raw thought."
    assert turn["tool_calls"] == [call("call_0")]


def test_a_call_in_a_namespace_is_known_again():
    turn = messages_of(by_name("codex_turn2_namespace_call"))[-2]
    assert turn["tool_calls"] == [call("call_0", "close_agent", '{"target": "x"}')]


def test_parallel_calls_are_one_turn_and_results_come_in_their_order():
    body = json.loads(json.dumps(by_name("codex_turn2_parallel_calls")))
    assert messages_of(body)[-3]["tool_calls"] == [call("call_0"), call("call_1")]
    outputs = body["input"][-2:]
    outputs[0]["output"], outputs[1]["output"] = "zero", "one"
    body["input"][-2:] = outputs[::-1]
    assert [message["content"] for message in messages_of(body)[-2:]] == ["zero", "one"]


def test_an_image_says_that_it_cannot_be_seen():
    result = messages_of(by_name("codex_turn2_image"))[-1]
    assert result["role"] == "tool"
    assert "cannot see" in result["content"]


def test_two_answers_in_a_row_are_two_turns():
    def said(text):
        return {"role": "assistant", "content": [{"type": "output_text", "text": text}]}

    assert [m["content"] for m in messages_of({"input": [said("a"), said("b")]})] == ["a", "b"]


def test_arguments_come_back_byte_for_byte():
    arguments = '{ "n":1.50,\n"é":"\\u00e9"}'
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    assert messages_of({"input": [item]})[0]["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize("arguments", ["", "not json", "[1]", '{"half": "\\ud83d"}'])
def test_arguments_that_no_template_could_take_do_not_end_the_conversation(service, arguments):
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    service.renderer.prompt(messages_of({"input": [{"role": "user", "content": "x"}, item]}), [])


@pytest.mark.parametrize("kind", ["web_search_call", "image_generation_call", "compaction"])
def test_items_of_tools_that_run_elsewhere_are_left_out(kind):
    body = {"input": [{"type": kind, "id": "x"}, {"role": "user", "content": "hi"}]}
    assert messages_of(body) == [{"role": "user", "content": "hi"}]


def test_items_of_other_tools_of_the_client_are_kept():
    body = {
        "input": [
            {"type": "custom_tool_call", "call_id": "a", "name": "apply_patch", "input": "*** Begin"},
            {"type": "custom_tool_call_output", "call_id": "a", "output": "done"},
            {"type": "local_shell_call", "call_id": "b", "action": {"command": ["ls"]}},
            {"type": "local_shell_call_output", "id": "b", "output": "out"},
        ]
    }
    assert [message["role"] for message in messages_of(body)] == ["assistant", "tool", "assistant", "tool"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"type": "compaction"}]}, "input"),
        ({"input": [{"type": "message", "role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "nothing"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "video"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": "x", "instructions": 3}, "instructions"),
    ],
)
def test_malformed_input_is_refused_by_name(body, param):
    with pytest.raises(ApiError) as caught:
        messages_of(body)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ("x", "tools"),
        (["x"], "tools[0]"),
        ([{"type": "function"}], "tools[0].name"),
        ([{"type": "namespace", "tools": []}], "tools[0].name"),
        ([{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}], "tools[0].tools[0].name"),
        ([{"type": 3, "name": "f"}], "tools[0].type"),
        ([{"name": "f"}, {"name": "f"}], "tools[1].name"),
    ],
)
def test_malformed_tools_are_refused_by_name(tools, param):
    with pytest.raises(ApiError) as caught:
        read_tools({"tools": tools})
    assert caught.value.param == param


def test_tool_choices():
    tools, names = read_tools(by_name("codex_turn1"))

    def chosen(choice):
        found, left = read_choice({"tool_choice": choice}, tools, names)
        return found, [tool["function"]["name"] for tool in left]

    everything = ["exec_command", "close_agent", "wait_agent"]
    assert chosen(None) == ("auto", everything)
    assert chosen("none") == ("none", [])
    assert chosen("required") == ("required", everything)
    assert chosen({"type": "function", "name": "exec_command"}) == ({"name": "exec_command"}, everything)
    named = {"type": "function", "name": "close_agent", "namespace": "multi_agent_v1"}
    assert chosen(named) == ({"name": "close_agent"}, everything)
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "exec_command"}]}
    assert chosen(allowed) == ("required", ["exec_command"])
    for wrong in ("all", 3, {"type": "web_search"}, {"type": "function", "name": "x"}, {"type": "function"}):
        with pytest.raises(ApiError) as caught:
            chosen(wrong)
        assert caught.value.param.startswith("tool_choice")


def test_formats():
    def schema(format_):
        return read_schema({"text": {"format": format_}})

    assert schema(None) is None
    assert schema({"type": "text"}) is None
    assert schema({"type": "json_object"}) == {"type": "object"}
    assert schema({"type": "json_schema", "name": "n", "schema": {"type": "array"}}) == {"type": "array"}
    for wrong in ({"type": "grammar"}, {"type": "json_schema"}, {"type": "json_schema", "schema": 3}, {"x": 1}):
        with pytest.raises(ApiError) as caught:
            schema(wrong)
        assert caught.value.param.startswith("text.format")


def test_sealed_reasoning_can_be_opened_and_a_strangers_cannot():
    assert opened(sealed("Gedanke é\n")) == "Gedanke é\n"
    for foreign in (None, 3, "", "b3BhcXVl", "cuq1:***", "cuq1:/w=="):
        assert opened(foreign) == ""
    item = {"type": "reasoning", "summary": [], "encrypted_content": sealed("hidden")}
    turn = messages_of({"input": [item, {"role": "assistant", "content": "x"}]})[0]
    assert turn["reasoning_content"] == "hidden"


# ---- to the wire

NAMES = read_tools(by_name("codex_turn1"))[1]
THOUGHT, WORD, LAST = Piece("reasoning", "Hm, "), Piece("content", "It is "), Piece("content", "so.\n")
CALL = CallPiece(0, "call_ab", "exec_command", '{"cmd": "ls"}', "raw")
OTHER = CallPiece(1, "call_cd", "close_agent", '{"target": "x"}', "raw")


START = (Queued(0), Started(100, 40))
TOOL = {"type": "function", "name": "f", "parameters": {}, "strict": False}
ECHO = {"model": "m", "tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": True}


def written(*events, reason="stop", summary=False, envelope=False, start=START, error=None):
    """All events, checked, and the response that they end with."""
    writer = ResponseWriter(ECHO, NAMES, summary=summary, envelope=envelope)
    data = writer.begin()
    for event in (*start, *events, Finished(reason, None, 20, 5, error=error)):
        data += writer.feed(event)
    final = check_responses([(one["type"], one) for one in data])
    assert final == writer.response
    return data, final


def kinds(data):
    return [one["type"].removeprefix("response.") for one in data]


def test_text_has_the_events_of_the_recorded_sequence():
    data, final = written(WORD, LAST)
    expected = ["created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"]
    expected += ["output_text.delta", "output_text.done", "content_part.done", "output_item.done", "completed"]
    assert kinds(data) == expected
    assert final["output"][0]["content"][0]["text"] == "It is so.\n"
    assert final["status"] == "completed"
    assert final["incomplete_details"] is None
    assert final["usage"] == {
        "input_tokens": 100,
        "input_tokens_details": {"cached_tokens": 40, "cache_write_tokens": 0},
        "output_tokens": 20,
        "output_tokens_details": {"reasoning_tokens": 5},
        "total_tokens": 120,
    }


def test_calls_carry_their_namespace_where_they_have_one():
    _, final = written(CALL, OTHER, reason="tool_calls")
    first, second = final["output"]
    assert first["name"] == "exec_command"
    assert "namespace" not in first
    assert (second["namespace"], second["name"]) == ("multi_agent_v1", "close_agent")
    assert first["call_id"] == "call_ab"
    assert first["arguments"] == CALL.arguments
    assert len({item["id"] for item in final["output"]}) == 2


def test_reasoning_is_an_item_of_its_own_and_a_summary_where_one_is_asked_for():
    data, final = written(THOUGHT, THOUGHT, WORD)
    assert [item["type"] for item in final["output"]] == ["reasoning", "message"]
    assert final["output"][0]["content"] == [{"type": "reasoning_text", "text": "Hm, Hm, "}]
    assert final["output"][0]["summary"] == []
    assert "encrypted_content" not in final["output"][0]
    assert kinds(data).count("reasoning_text.delta") == 2
    data, final = written(THOUGHT, WORD, summary=True, envelope=True)
    assert final["output"][0]["summary"] == [{"type": "summary_text", "text": "Hm, "}]
    assert opened(final["output"][0]["encrypted_content"]) == "Hm, "
    assert "reasoning_summary_text.delta" in kinds(data)
    assert "reasoning_text.delta" not in kinds(data)


def test_whitespace_around_calls_is_no_message_and_before_a_word_it_stays():
    space = Piece("content", "\n\n")
    _, final = written(space, CALL, space, OTHER, space, reason="tool_calls")
    assert [item["type"] for item in final["output"]] == ["function_call", "function_call"]
    _, final = written(space, WORD, CALL, LAST)
    assert [item["type"] for item in final["output"]] == ["message", "function_call", "message"]
    assert final["output"][0]["content"][0]["text"] == "\n\nIt is "
    assert final["output"][2]["content"][0]["text"] == "so.\n"
    _, final = written(THOUGHT, space)
    assert final["output"][1]["content"][0]["text"] == "\n\n"


def test_an_answer_of_nothing_is_an_empty_message():
    _, final = written()
    assert final["output"][0]["content"][0]["text"] == ""


def test_an_answer_cut_by_its_length_is_completed_and_says_so():
    data, final = written(WORD, reason="length")
    assert kinds(data)[-1] == "completed"
    assert final["status"] == "incomplete"
    assert final["incomplete_details"] == {"reason": "max_output_tokens"}
    assert final["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("failed", "server_error"),
        ("shutting_down", "server_error"),
        ("too_long", "context_length_exceeded"),
        ("invalid", "invalid_prompt"),
        ("busy", "server_is_overloaded"),
    ],
)
def test_a_failure_ends_as_agents_show_it(kind, code):
    data, final = written(WORD, CALL, reason="error", error=ApiError(kind, "why"))
    assert final["status"] == "failed"
    assert final["error"] == {"code": code, "message": "why"}
    assert [item["type"] for item in final["output"]] == ["message", "function_call"]
    assert kinds(data)[-1] == "failed"


def test_waiting_is_data_and_says_little():
    data, _ = written(WORD, start=(Queued(2), Queued(1), Queued(0), Started(5, 0)))
    assert kinds(data)[:4] == ["created", "in_progress", "in_progress", "in_progress"]
    assert data[1]["response"]["tools"] == []
    assert data[-1]["response"]["tools"] == [TOOL]
    # Between the events of an item, too.
    data, _ = written(WORD, Queued(0), LAST)
    assert "in_progress" in kinds(data)[4:]


def test_every_id_is_new():
    ids = [id_ for _ in range(50) for id_ in _ids(written(THOUGHT, WORD, CALL)[1])]
    assert len(set(ids)) == len(ids) == 200


def _ids(response):
    return [response["id"], *(item["id"] for item in response["output"])]


def test_logprobs_are_where_the_client_looks_for_them():
    token = TokenInfo(7, b"It", -0.5, (TopToken(7, b"It", -0.5), TopToken(8, b"\xff", -1.5)))
    data, final = written(Piece("content", "It", (token,)))
    part = final["output"][0]["content"][0]
    assert part["logprobs"][0]["token"] == "It"
    assert [top["logprob"] for top in part["logprobs"][0]["top_logprobs"]] == [-0.5, -1.5]
    delta = next(one for one in data if one["type"].endswith("output_text.delta"))
    assert delta["logprobs"] == part["logprobs"]


def test_the_official_types_read_every_event():
    data, final = written(THOUGHT, WORD, CALL, OTHER, LAST, Queued(0), summary=True, envelope=True)
    for one in data:
        EVENT.validate_python(one, strict=False)
    Response.model_validate(final)
    # The control: they refuse what is no such event.
    broken = dict(data[2])
    del broken["output_index"]
    with pytest.raises(ValueError, match="output_index"):
        EVENT.validate_python(broken)


# ---- every recorded request, on nano


def asked(one, **more):
    return one.body | {"max_output_tokens": 12, "temperature": 0} | more


@pytest.mark.parametrize("one", REQUESTS, ids=lambda one: one.name)
def test_recorded_requests_are_answered_streamed_and_not(base_url, one):
    url = f"{base_url}{one.path}?{one.query}"
    headers = {k: v for k, v in one.headers.items() if k.lower() not in ("accept-encoding",)}
    if not ON_CPU:  # where the rows that are computed at once decide a long prompt's rounding: both find it held
        httpx.post(url, json=asked(one, max_output_tokens=1), headers=headers, timeout=60)
    response = httpx.post(url, json=asked(one, stream=True), headers=headers, timeout=60, verify=NO_CERTIFICATES)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    streamed = check_responses(parse_sse(response.text))
    whole = post(url, "", asked(one, stream=False), headers=headers)
    Response.model_validate(whole)
    assert texts(whole) == texts(streamed)
    assert whole["usage"]["output_tokens"] == streamed["usage"]["output_tokens"]
    assert whole["usage"]["input_tokens"] == streamed["usage"]["input_tokens"]
    assert whole["model"] == one.body["model"]
    assert whole["id"] != streamed["id"]


def texts(response):
    """What an answer says, without ids."""
    shown = []
    for item in response["output"]:
        content = "".join(part["text"] for part in item.get("content", []))
        shown.append((item["type"], content, item.get("name"), item.get("arguments")))
    return shown


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"background": True}, "background"),
        ({"n": 2}, "n"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"temperature": -1}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"stream": "yes"}, "stream"),
        ({"include": "all"}, "include"),
        ({"model": 7}, "model"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(base_url, fields, param):
    response = httpx.post(f"{base_url}/v1/responses", json={"input": "hi", "max_output_tokens": 4} | fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param.split(".")[0] in error["message"]


def test_what_would_not_is_accepted(base_url):
    body = {"input": "hi", "max_output_tokens": 4, "store": True, "metadata": {"a": "b"}, "service_tier": "auto"}
    body |= {"client_metadata": {"x": 1}, "include": ["reasoning.encrypted_content"], "truncation": "auto", "user": "u"}
    body |= {"previous_response_id": None, "n": 1, "prompt_cache_key": "k", "a_field_of_next_year": [1]}
    response = httpx.post(f"{base_url}/v1/responses", json=body, timeout=60)
    assert response.status_code == 200, response.text
    assert response.json()["store"] is False
    assert response.json()["metadata"] == {"a": "b"}


def test_a_prompt_beyond_the_context_is_refused_as_each_client_shows_it(base_url, service):
    body = {"input": "word " * (service.context // 2)}
    response = httpx.post(f"{base_url}/v1/responses", json=body, timeout=60)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    response = httpx.post(f"{base_url}/v1/responses", json=body | {"stream": True}, timeout=60)
    assert response.status_code == 200
    failed = check_responses(parse_sse(response.text))
    assert failed["error"]["code"] == "context_length_exceeded"


def test_broken_sequences_would_have_been_noticed():
    data, _ = written(WORD, CALL)
    for at in range(len(data)):
        if kinds(data)[at] in ("in_progress", "output_text.done", "content_part.done", "function_call_arguments.done"):
            continue
        rest = [dict(one, sequence_number=n) for n, one in enumerate(data[:at] + data[at + 1 :])]
        with pytest.raises(RuleBroken):
            check_responses([(one["type"], one) for one in rest])


def test_the_writer_needs_no_names():
    writer = ResponseWriter({}, Names())
    writer.begin()
    for event in (Started(1, 0), CALL, Finished("tool_calls")):
        writer.feed(event)
    assert writer.response["output"][0]["name"] == "exec_command"

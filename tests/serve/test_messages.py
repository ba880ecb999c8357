"""/v1/messages: what blocks become, what events become, and every request that an agent was seen to send."""

import copy

import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from cuq1.serve.messages import ASKED_AGAIN, _room
from cuq1.serve.messages_input import (
    conversation,
    read_choice,
    read_messages,
    read_schema,
    read_thinking,
    read_tools,
)
from cuq1.serve.messages_output import MessageWriter, parsed
from cuq1.serve.request import ApiError, CallPiece, Finished, Piece, Queued, Started
from tests.serve.agents import RuleBroken, check_messages, parse_sse, recorded
from tests.serve.running import NO_CERTIFICATES, ON_CPU, post

REQUESTS = recorded(path="/v1/messages")
COUNTS = recorded(path="/v1/messages/count_tokens")
EVENT = TypeAdapter(RawMessageStreamEvent)


def by_name(name):
    return copy.deepcopy(next(one for one in REQUESTS if one.name == name).body)


def user(*content):
    return {"role": "user", "content": list(content)}


def text(value):
    return {"type": "text", "text": value}


# ---- from the wire


def test_the_billing_line_is_dropped_and_what_moves_every_turn_has_no_effect():
    first, second = by_name("claude_turn1"), by_name("claude_turn2")
    assert first["system"][0]["text"] != second["system"][0]["text"]
    before, after = read_messages(first), read_messages(second)
    assert after[: len(before)] == before
    assert before[0] == {
        "role": "system",
        "content": f"{first['system'][1]['text']}\n\n{first['system'][2]['text']}",
    }
    assert "billing" not in str(before)
    # The control: another system text is another prompt.
    second["system"][2]["text"] += "!"
    assert read_messages(second)[0] != before[0]


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("x-anthropic-billing-header: cch=1;\nBe brief.", "Be brief."),
        ("x-anthropic-billing-header: cch=1;", None),
        ([text("x-anthropic-billing-header: cch=1;\nBe brief.")], "Be brief."),
        ([text("About x-anthropic-billing-header: it is a line.")], "About x-anthropic-billing-header: it is a line."),
        ([text("a"), text("b")], "a\n\nb"),
        (None, None),
        ([], None),
    ],
)
def test_system_texts(system, expected):
    messages = read_messages({"system": system, "messages": [{"role": "user", "content": "hi"}]})
    assert messages[-1] == {"role": "user", "content": "hi"}
    assert [message["content"] for message in messages[:-1]] == ([] if expected is None else [expected])


def test_results_are_put_into_the_order_of_their_calls():
    body = by_name("claude_turn2_parallel_calls")
    one, zero = body["messages"][-1]["content"]
    one["content"], zero["content"] = "one", "zero"
    messages = read_messages(body)
    assert [call["id"] for call in messages[-3]["tool_calls"]] == ["toolu_0", "toolu_1"]
    assert [(m["tool_call_id"], m["content"]) for m in messages[-2:]] == [("toolu_0", "zero"), ("toolu_1", "one")]
    body["messages"][-1]["content"] = [zero, one]
    assert read_messages(body) == messages


def test_text_with_results_comes_after_them():
    messages = read_messages(by_name("claude_compaction"))
    assert [message["role"] for message in messages[-3:]] == ["assistant", "tool", "user"]
    body = by_name("claude_compaction")
    body["messages"][-1]["content"].reverse()
    assert read_messages(body) == messages


def test_a_turn_has_its_thinking_text_and_calls():
    turn = read_messages(by_name("claude_turn2_thinking"))[-2]
    assert turn["reasoning_content"] == "Let me look."
    assert turn["content"] == "I will list the files."
    assert turn["tool_calls"][0]["function"] == {
        "name": "Bash",
        "arguments": {"command": "ls -la", "description": "List files"},
    }


def test_an_image_says_that_it_cannot_be_seen():
    assert "cannot see" in read_messages(by_name("claude_turn2_image"))[-1]["content"]
    shown = read_messages({"messages": [user(text("What is this?"), {"type": "image", "source": {}})]})
    assert shown[0]["content"].startswith("What is this?")
    assert "cannot see" in shown[0]["content"]


def test_a_failed_tool_says_so():
    def result(content, **fields):
        block = {"type": "tool_result", "tool_use_id": "t", "content": content} | fields
        return read_messages({"messages": [user(block)]})[0]["content"]

    assert result("no such file", is_error=True) == "Error: no such file"
    assert result("<error>no</error>", is_error=True) == "<error>no</error>"
    assert result("fine", is_error=False) == result("fine") == "fine"
    assert result([text("a"), text("b")]) == "a\n\nb"
    assert result(None) == ""


def test_documents_are_read_where_they_are_text():
    def document(source, **fields):
        return read_messages({"messages": [user({"type": "document", "source": source} | fields)]})[0]["content"]

    assert document({"type": "text", "data": "It says."}, title="T") == "T\n\nIt says."
    assert document({"type": "content", "content": [text("a"), text("b")]}) == "a\n\nb"
    assert "cannot see" in document({"type": "base64", "media_type": "application/pdf", "data": ""})


def test_tools_of_the_provider_are_left_out():
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "properties": {}}
    tools = [
        {"name": "Bash", "description": "d", "input_schema": schema, "cache_control": {"type": "ephemeral"}},
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "custom", "name": "Read", "input_schema": schema, "strict": True},
    ]
    found = [tool["function"] for tool in read_tools({"tools": tools})]
    assert found[0] == {"name": "Bash", "description": "d", "parameters": {"type": "object", "properties": {}}}
    assert found[1]["name"] == "Read"
    assert found[1]["strict"] is True
    assert len(found) == 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [user({"type": "audio"})]}, "messages[0].content[0].type"),
        ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text"),
        ({"messages": [user({"type": "tool_result"})]}, "messages[0].content[0].tool_use_id"),
        (
            {"messages": [user({"type": "tool_result", "tool_use_id": "t", "is_error": "no"})]},
            "messages[0].content[0].is_error",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": 1}]}
                ]
            },
            "messages[0].content[0].input",
        ),
        ({"system": 3, "messages": [user(text("x"))]}, "system"),
    ],
)
def test_malformed_messages_are_refused_by_name(body, param):
    with pytest.raises(ApiError) as caught:
        read_messages(body)
    assert caught.value.param == param


def test_tool_choices():
    tools = read_tools(by_name("claude_turn1"))

    def chosen(choice):
        found, left, parallel = read_choice({"tool_choice": choice}, tools)
        return found, len(left), parallel

    assert chosen(None) == ("auto", 2, True)
    assert chosen({"type": "auto", "disable_parallel_tool_use": True}) == ("auto", 2, False)
    assert chosen({"type": "any"}) == ("required", 2, True)
    assert chosen({"type": "none"}) == ("none", 0, True)
    assert chosen({"type": "tool", "name": "Read"}) == ({"name": "Read"}, 2, True)
    for wrong in ({"type": "tool"}, {"type": "tool", "name": "x"}, {"type": "some"}, {"name": "Read"}, "auto"):
        with pytest.raises(ApiError) as caught:
            chosen(wrong)
        assert caught.value.param.startswith("tool_choice")


def test_thinking_is_asked_for():
    assert read_thinking({})[0] is False
    assert read_thinking({"thinking": {"type": "disabled"}})[0] is False
    assert read_thinking({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}})[0] is True
    assert read_thinking({"thinking": {"type": "enabled", "budget_tokens": 2048, "display": "omitted"}})[0] is True
    assert read_thinking({"chat_template_kwargs": {"enable_thinking": True, "x": 1}}) == (True, {"x": 1})
    for body, param in (
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"thinking": {"budget_tokens": 1}}, "thinking.type"),
        ({"output_config": {"effort": "lots"}}, "output_config.effort"),
    ):
        with pytest.raises(ApiError) as caught:
            read_thinking(body)
        assert caught.value.param == param


def test_schemas():
    title = by_name("claude_title")
    assert read_schema(title) == title["output_config"]["format"]["schema"]
    assert read_schema({"output_format": {"type": "json_schema", "schema": {}}}) == {}
    assert read_schema({"output_config": {"effort": "low"}}) is None
    with pytest.raises(ApiError) as caught:
        read_schema({"output_config": {"format": {"type": "json_schema"}}})
    assert caught.value.param == "output_config.format.schema"


def test_titles_and_sub_agents_are_conversations_of_their_own():
    def of(name, **headers):
        return conversation(by_name(name), headers)

    main = of("claude_turn1")
    assert main
    assert main == of("claude_turn2")
    assert len({main, of("claude_title"), of("claude_turn1", **{"x-claude-code-agent-id": "a"})}) == 3
    assert conversation({}, {}) == ""


@pytest.mark.parametrize("asked", [1, ASKED_AGAIN])
def test_room(asked):
    assert _room(100, asked, 100 + ASKED_AGAIN) == asked


def test_room_that_is_short_is_said_in_the_words_that_agents_look_for():
    with pytest.raises(ApiError) as caught:
        _room(500, 32_000, 4500)
    assert caught.value.message.startswith("input length and `max_tokens` exceed context limit: 500 + 32000 > 4500, ")
    # What Claude Code then asks for is served.
    assert _room(500, 4500 - 500 - 1000, 4500) == 3000
    # Where it would not ask again, what is left is all there is.
    assert _room(501, 32_000, 4500) == 3999
    with pytest.raises(ApiError) as caught:
        _room(4096, 1, 4096)
    assert caught.value.message == "prompt is too long: 4096 tokens > 4095 maximum"
    assert caught.value.status == 400


# ---- to the wire

THOUGHT, WORD, LAST = Piece("reasoning", "Hm, "), Piece("content", "It is "), Piece("content", "so.\n")
SPACE = Piece("content", " \n")
CALL = CallPiece(0, "call_ab", "Bash", '{"command": "ls"}', "raw")
OTHER = CallPiece(1, "call_cd", "Read", "{}", "raw")


def written(*events, reason="stop", stop_string=None, hide_thinking=False):
    """All events, checked, and the message, which is the same unstreamed."""
    writer = MessageWriter("m", hide_thinking=hide_thinking)
    data = []
    for event in (Queued(0), Started(100, 40), *events, Finished(reason, stop_string, 20, 5)):
        data += writer.feed(event)
    message = check_messages([(one["type"], one) for one in data])
    assert message == writer.message
    return data, message


def test_text_has_the_events_of_the_recorded_sequence():
    data, message = written(WORD, LAST)
    assert [one["type"] for one in data] == [
        *("message_start", "ping", "content_block_start", "content_block_delta", "content_block_delta"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert message["content"] == [text("It is so.\n")]
    assert message["stop_reason"] == "end_turn"


def test_tokens_are_counted_once():
    _, message = written(WORD)
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"] == 100
    assert usage["cache_read_input_tokens"] == 40
    assert usage["output_tokens"] == 20


def test_thinking_text_and_calls_are_blocks():
    _, message = written(THOUGHT, WORD, CALL, OTHER, reason="tool_calls")
    thinking, said, first, second = message["content"]
    assert thinking["thinking"] == "Hm, "
    assert thinking["signature"]
    assert said == text("It is ")
    assert first == {"type": "tool_use", "id": "toolu_ab", "name": "Bash", "input": {"command": "ls"}}
    assert second == {"type": "tool_use", "id": "toolu_cd", "name": "Read", "input": {}}
    assert message["stop_reason"] == "tool_use"


def test_whitespace_around_calls_is_no_block_and_before_a_word_it_stays():
    _, message = written(THOUGHT, SPACE, CALL, SPACE, OTHER, SPACE, reason="tool_calls")
    assert [block["type"] for block in message["content"]] == ["thinking", "tool_use", "tool_use"]
    _, message = written(SPACE, WORD, CALL, LAST, reason="tool_calls")
    assert message["content"][0] == text(" \nIt is ")
    _, message = written(SPACE)
    assert message["content"] == [text(" \n")]
    _, message = written()
    assert message["content"] == [text("")]


def test_thinking_that_is_left_out_comes_back_by_its_signature():
    data, message = written(THOUGHT, THOUGHT, WORD, hide_thinking=True)
    thinking = message["content"][0]
    assert thinking["thinking"] == ""
    assert "Hm" not in str(data)
    turn = read_messages({"messages": [{"role": "assistant", "content": message["content"]}]})[0]
    assert turn["reasoning_content"] == "Hm, Hm, "
    thinking["signature"] = "a stranger's"
    turn = read_messages({"messages": [{"role": "assistant", "content": message["content"]}]})[0]
    assert not turn.get("reasoning_content")


@pytest.mark.parametrize(
    ("reason", "stop_string", "expected"),
    [
        ("stop", None, "end_turn"),
        ("length", None, "max_tokens"),
        ("stop_string", "END", "stop_sequence"),
        ("tool_calls", None, "tool_use"),
    ],
)
def test_stop_reasons(reason, stop_string, expected):
    _, message = written(WORD, reason=reason, stop_string=stop_string)
    assert (message["stop_reason"], message["stop_sequence"]) == (expected, stop_string)


def test_waiting_pings():
    writer = MessageWriter("m")
    assert writer.feed(Queued(3)) == []  # at once, and the answer may come as soon
    assert writer.feed(Queued(2)) == [{"type": "ping"}]
    assert writer.feed(Started(1, 0))[0]["type"] == "message_start"
    assert writer.feed(Queued(0)) == [{"type": "ping"}]


def test_a_failure_is_an_error_event():
    writer = MessageWriter("m")
    writer.feed(Started(1, 0))
    assert writer.feed(Finished("error", error=ApiError("failed", "why"))) == [
        {"type": "error", "error": {"type": "api_error", "message": "why"}}
    ]


def test_every_message_has_an_id_of_its_own():
    assert len({written(WORD)[1]["id"] for _ in range(100)}) == 100


def test_arguments_are_sent_as_json_that_exists():
    huge = f'{{"a": 1e999, "b": -1e999, "c": {"9" * 5000}, "d": "\\ud83d", "e": 1.5}}'
    value = parsed(huge)
    assert value["a"] == -value["b"] == 1.7976931348623157e308
    assert value["d"] == "\ufffd"
    assert value["e"] == 1.5
    assert parsed('{"n": 12345678901234567890}') == {"n": 12345678901234567890}


def test_the_official_types_read_every_event():
    data, message = written(THOUGHT, WORD, CALL, OTHER, LAST, reason="tool_calls")
    for one in data:
        if one["type"] != "ping":  # which the client leaves out before it parses
            EVENT.validate_python(one)
    Message.model_validate(message)
    with pytest.raises(ValueError, match="index"):
        EVENT.validate_python({"type": "content_block_stop"})


def test_broken_sequences_would_have_been_noticed():
    data, _ = written(WORD, CALL, reason="tool_calls")
    for at, one in enumerate(data):
        if one["type"] in ("ping", "content_block_delta"):
            continue
        with pytest.raises(RuleBroken):
            check_messages([(one["type"], one) for one in data[:at] + data[at + 1 :]])


# ---- every recorded request, on nano


def asked(one, **more):
    return one.body | {"max_tokens": 12, "temperature": 0} | more


def sent(base_url, one, body):
    headers = {k: v for k, v in one.headers.items() if k.lower() != "accept-encoding"}
    url = f"{base_url}{one.path}?{one.query}"
    return httpx.post(url, json=body, headers=headers, timeout=60, verify=NO_CERTIFICATES)


@pytest.mark.parametrize("one", REQUESTS, ids=lambda one: one.name)
def test_recorded_requests_are_answered_streamed_and_not(base_url, one):
    if not ON_CPU:  # where the rows that are computed at once decide a long prompt's rounding: both find it held
        sent(base_url, one, asked(one, max_tokens=1))
    response = sent(base_url, one, asked(one, stream=True))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    streamed = check_messages(parse_sse(response.text))
    whole = sent(base_url, one, asked(one, stream=False)).json()
    Message.model_validate(whole)
    assert without_ids(whole) == without_ids(streamed)
    assert whole["usage"]["output_tokens"] == streamed["usage"]["output_tokens"]
    assert total(whole) == total(streamed)
    assert whole["model"] == one.body["model"]
    assert whole["id"] != streamed["id"]


def without_ids(message):
    return [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]


def total(message):
    return sum(message["usage"][name] for name in ("input_tokens", "cache_read_input_tokens"))


@pytest.mark.parametrize("one", COUNTS, ids=lambda one: one.name)
def test_recorded_counts_are_those_of_the_prompt(base_url, one):
    response = sent(base_url, one, one.body)
    assert response.status_code == 200
    assert response.json().keys() == {"input_tokens"}
    answer = post(base_url, "/v1/messages", one.body | {"max_tokens": 1})
    assert response.json()["input_tokens"] == total(answer)


def test_counting_takes_the_assistant_last(base_url):
    body = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    assert httpx.post(f"{base_url}/v1/messages/count_tokens", json=body).json()["input_tokens"] > 0


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "x"}}, "thinking.type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "messages"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(base_url, fields, named):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4} | fields
    response = httpx.post(f"{base_url}/v1/messages", json=body)
    assert response.status_code == 400
    error = response.json()
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert named in error["error"]["message"]


def test_what_would_not_is_accepted(base_url):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "service_tier": "auto", "top_k": 5}
    body |= {"metadata": {"user_id": "u"}, "context_management": {"edits": []}, "inference_geo": "x", "of_next_year": 1}
    headers = {"anthropic-version": "2031-01-01", "anthropic-beta": "unheard-of-2031-01-01", "x-api-key": "none"}
    response = httpx.post(f"{base_url}/v1/messages?beta=true&x=y", json=body, headers=headers, timeout=60)
    assert response.status_code == 200, response.text


def test_stop_sequences_and_length_end_an_answer(base_url):
    body = {
        "messages": [{"role": "user", "content": "Write a Python function `is_even`: Return True for an even number."}]
    }
    body |= {"max_tokens": 60, "temperature": 0, "stop_sequences": ["def "]}
    answer = httpx.post(f"{base_url}/v1/messages", json=body, timeout=60).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "def ")
    answer = httpx.post(
        f"{base_url}/v1/messages", json=body | {"max_tokens": 3, "stop_sequences": []}, timeout=60
    ).json()
    assert answer["stop_reason"] == "max_tokens"
    assert answer["usage"]["output_tokens"] == 3


def test_a_title_follows_its_schema_while_the_model_does_not_know_how(base_url):
    one = next(one for one in REQUESTS if one.name == "claude_title")
    answer = sent(base_url, one, asked(one, max_tokens=200, stream=False)).json()
    if answer["stop_reason"] == "end_turn":
        title = parsed(answer["content"][0]["text"])
        assert list(title) == ["title"]
    assert answer["content"][0]["text"].startswith("{")


def test_over_long_requests_are_refused_in_the_words_that_agents_look_for(base_url, service):
    body = {"messages": [{"role": "user", "content": "word " * (service.context // 2)}], "max_tokens": 10}
    response = httpx.post(f"{base_url}/v1/messages", json=body, timeout=60)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("prompt is too long: ")
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": service.context}
    response = httpx.post(f"{base_url}/v1/messages", json=body, timeout=60)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("input length and `max_tokens` exceed context limit: ")


def test_the_base_url_answers_a_head(base_url):
    assert httpx.head(base_url).status_code in (200, 404)

"""The rules themselves: sequences that satisfied clients pass, and what clients were seen to miss does not."""

import copy

import pytest

from tests.serve.agents import RuleBroken, check_messages, check_responses, events_file

RESPONSES = {name: events for name, events in events_file("responses").items() if "minimal" not in name}
MESSAGES = {name: events for name, events in events_file("messages").items() if name != "error_in_stream"}


@pytest.mark.parametrize("name", ["tool_call", "text", "reasoning_then_tool_call"])
def test_responses_that_satisfied_clients_satisfy_the_rules(name):
    assert check_responses(RESPONSES[name])["output"]


@pytest.mark.parametrize("name", list(MESSAGES))
def test_messages_that_satisfied_clients_satisfy_the_rules(name):
    assert check_messages(MESSAGES[name])["content"]


def renumbered(events):
    """Sequence numbers from 0, so that only what was left out is missed."""
    events = copy.deepcopy(events)
    for number, (_, data) in enumerate(events):
        data["sequence_number"] = number
    return events


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("tool_call", "response.created"),
        ("tool_call", "response.output_item.added"),
        ("tool_call", "response.function_call_arguments.delta"),
        ("tool_call", "response.output_item.done"),
        ("tool_call", "response.completed"),
        ("text", "response.content_part.added"),
        ("text", "response.output_text.delta"),
        ("text", "response.output_item.done"),
        ("reasoning_then_tool_call", "response.output_item.done"),
    ],
)
def test_a_response_without_an_event_that_clients_need_is_refused(name, kind):
    at = next(i for i, (_, data) in enumerate(RESPONSES[name]) if data["type"] == kind)
    with pytest.raises(RuleBroken):
        check_responses(renumbered(RESPONSES[name][:at] + RESPONSES[name][at + 1 :]))


def changed(events, kind, change):
    events = copy.deepcopy(events)
    change(next(data for _, data in events if data["type"] == kind))
    return events


@pytest.mark.parametrize(
    ("name", "kind", "change"),
    [
        ("tool_call", "response.created", lambda data: data["response"].pop("output")),
        ("tool_call", "response.output_item.done", lambda data: data["item"].pop("call_id")),
        ("tool_call", "response.output_item.done", lambda data: data["item"].update(arguments='{"city": "Rome"}')),
        ("tool_call", "response.completed", lambda data: data["response"].update(id="resp_2")),
        ("tool_call", "response.completed", lambda data: data["response"].update(output=[])),
        ("tool_call", "response.completed", lambda data: data.update(type="response.incomplete")),
        ("text", "response.output_item.done", lambda data: data["item"]["content"][0].update(text="")),
        ("text", "response.completed", lambda data: data["response"]["usage"].update(total_tokens=1)),
        ("text", "response.output_text.delta", lambda data: data.update(sequence_number=9)),
    ],
)
def test_a_response_that_says_something_else_is_refused(name, kind, change):
    with pytest.raises(RuleBroken):
        check_responses(changed(RESPONSES[name], kind, change))


@pytest.mark.parametrize(
    "kind",
    ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"],
)
@pytest.mark.parametrize("name", ["text", "tool_use"])
def test_a_message_without_an_event_that_clients_need_is_refused(name, kind):
    at = next(i for i, (_, data) in enumerate(MESSAGES[name]) if data["type"] == kind)
    with pytest.raises(RuleBroken):
        check_messages(MESSAGES[name][:at] + MESSAGES[name][at + 1 :])


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("message_start", lambda data: data["message"].pop("usage")),
        ("message_start", lambda data: data["message"].pop("id")),
        ("message_delta", lambda data: data["delta"].update(stop_reason=None)),
        ("content_block_start", lambda data: data.update(index=1)),
        ("content_block_delta", lambda data: data["delta"].update(type="thinking_delta", thinking="?")),
    ],
)
def test_a_message_that_says_something_else_is_refused(kind, change):
    with pytest.raises(RuleBroken):
        check_messages(changed(MESSAGES["text"], kind, change))


def test_a_message_without_event_lines_is_refused():
    with pytest.raises(RuleBroken):
        check_messages([(None, data) for _, data in MESSAGES["text"]])

"""A prompt begins with the last one and what the model wrote, whatever an agent makes of that in between."""

import asyncio
import copy
import json
import random
from array import array

import pytest

from cuq1.serve import messages, responses
from cuq1.serve.request import CallPiece, Finished, Generation, Piece
from cuq1.serve.turns import Call, TurnMemory, resembles
from cuq1.text import check_messages
from tests.paths import ROOT
from tests.serve.agents import recorded

NANO_TOOLS = json.loads((ROOT / "tools" / "nano_tools.json").read_text())
CALL_TEXT = (
    ' Let me.<iquest_tool_call>\n put <arg_key> n </arg_key>\n<arg_value>{{ "a": 1.0, "b":[ ]}}</arg_value>'
    "</iquest_tool_call>\n<iquest_tool_call>put<arg_key>n</arg_key><arg_value>{number}</arg_value></iquest_tool_call> "
)
TOOLS = [{"type": "function", "function": {"name": "put", "parameters": {"type": "object", "properties": {"n": {}}}}}]


# ---- the memory


def remembered(service, number="0.10"):
    """(memory, ids, message) of a turn with calls that no template would write so."""
    memory = TurnMemory(service.tokenizer)
    body = CALL_TEXT.format(number=number)
    ids = service.tokenizer.encode(f"Hm.</think>{body}", control=True)
    calls = [Call("call_aa", "put", '{"n": { "a": 1.0, "b":[ ]}}'), Call("call_bb", "put", f'{{"n": {number}}}')]
    memory.remember(calls, " Let me.\n ", "Hm.", ids, in_reasoning=True)
    message = {
        "role": "assistant",
        "content": " Let me.\n ",
        "reasoning_content": "Hm.",
        "tool_calls": [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ],
    }
    return memory, ids, message


def restored(memory, message):
    out, written = memory.restore(check_messages([{"role": "user", "content": "x"}, message]))
    return out[1], written.get(1)


def reparsed(message, prefix="toolu_"):
    """As an agent written in JavaScript sends a turn back."""
    message = copy.deepcopy(message)
    message["content"] = message["content"].strip()
    for call in message["tool_calls"]:
        call["id"] = prefix + call["id"].removeprefix("call_")
        value = json.loads(
            call["function"]["arguments"], parse_float=lambda t: int(float(t)) if t == "1.0" else float(t)
        )
        call["function"]["arguments"] = value
    return message


@pytest.mark.parametrize("number", ["0.10", "12345678901234567890", "1e2", "-0", "[1,2 ,3]", '{"2": 1, "1": 2}'])
def test_a_turn_that_comes_back_parsed_is_known(service, number):
    memory, ids, message = remembered(service, number)
    close = ids.index(service.tokenizer.control_tokens["</think>"])
    for form in (message, reparsed(message), reparsed(message, "call_")):
        turn, written = restored(memory, form)
        assert list(written.reasoning) == ids[:close]
        assert list(written.answer) == ids[close + 1 :]
        calls = [call["function"]["arguments"] for call in message["tool_calls"]]
        assert [call["function"]["arguments"] for call in turn["tool_calls"]] == calls


def test_a_turn_that_was_changed_is_not_repeated(service):
    memory, _, message = remembered(service)

    def change(apply):
        changed = reparsed(message)
        apply(changed)
        return restored(memory, changed)

    edited, written = change(lambda m: m["tool_calls"][1]["function"].update(arguments={"n": 7}))
    assert written is None
    assert edited["tool_calls"][1]["function"]["arguments"] == {"n": 7}
    # The other call still is what was written.
    assert edited["tool_calls"][0]["function"]["arguments"] == message["tool_calls"][0]["function"]["arguments"]
    assert change(lambda m: m["tool_calls"][0]["function"].update(name="get"))[1] is None
    assert change(lambda m: m["tool_calls"].reverse())[1] is None
    assert change(lambda m: m["tool_calls"].pop())[1] is None
    assert change(lambda m: m.update(content="Something else."))[1] is None
    assert change(lambda m: m["tool_calls"][0].update(id="toolu_cc"))[1] is None
    assert change(lambda m: m["tool_calls"][0].pop("id"))[1] is None
    # Without its reasoning, which agents may leave out, the rest is.
    assert change(lambda m: m.pop("reasoning_content"))[1].reasoning is None
    assert change(lambda _: None)[1] is not None


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"a": 1.0}, {"a": 1}),
        ({"a": [1, {"b": 2.5e0}]}, {"a": [1.0, {"b": 2.5}]}),
        ({"b": 1, "a": 2, "2": 3, "1": 4}, {"1": 4, "2": 3, "b": 1, "a": 2}),
        # What Claude Code made of calls to its tools.
        (
            {"file_path": "hello.txt", "old_string": "hello", "new_string": "bye  \nx  \n\n"},
            {"replace_all": False, "file_path": "hello.txt", "old_string": "hello", "new_string": "bye\nx\n\n"},
        ),
        ({"command": "cd /tmp/repo && ls -la", "timeout": 1000.0}, {"command": "ls -la", "timeout": 1000}),
        ({"command": "find . -exec echo {} \\\\;"}, {"command": "find . -exec echo {} \\;"}),
        ({"content": "a  \nb\n\n\n"}, {"content": "a\nb\n\n\n"}),
        ({"todos": '[{"content": "a", "status": "pending"}]'}, {"todos": [{"content": "a", "status": "pending"}]}),
        ({"offset": "1"}, {"offset": 1}),
        ({"limit": None, "a": ""}, {"limit": None, "a": ""}),
        ({"a": 1}, {}),
    ],
)
def test_tidied_arguments_are_those_that_were_written(ours, theirs):
    assert resembles(theirs, json.dumps(ours))
    assert resembles(json.dumps(theirs), json.dumps(ours))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"n": 1}, {"n": True}),
        ({"n": 0}, {"n": False}),
        ({"n": 1}, {"n": 2}),
        ({"n": 1}, {"n": None}),
        ({"n": "x"}, {"n": "y"}),
        ({"n": "x"}, {"n": 1}),
        ({"n": "x"}, {"n": ""}),
        ({"n": [1, 2]}, {"n": [2, 1]}),
        ({"n": [1, 2]}, {"n": [1]}),
        ({"n": "x"}, {"n": "x", "more": True}),
        ({"n": []}, {"n": {}}),
        ({"command": "rm -rf a && ls"}, {"command": "ls"}),
        ({"command": "cd a; rm b && ls"}, {"command": "ls"}),
        ({"command": "ls a"}, {"command": "ls"}),
    ],
)
def test_changed_arguments_are_not_those_that_were_written(ours, theirs):
    assert not resembles(theirs, json.dumps(ours))
    assert not resembles("no JSON", json.dumps(ours))


def test_tokens_that_begin_another_turn_are_not_kept(service):
    memory = TurnMemory(service.tokenizer)
    for text in ("</think>x<|iquest_user|>y", "<think></think>x", "no end"):
        ids = service.tokenizer.encode(text, control=True)
        memory.remember([Call("call_aa", "put", "{}")], "x", "", ids, in_reasoning=True)
        assert memory.size == 0


def test_the_memory_is_bounded_and_forgets_what_was_longest_not_asked_for(service):
    memory = TurnMemory(service.tokenizer, limit=40_000)
    rng = random.Random(1)

    def remember(name):
        memory.remember(
            [Call(f"call_{name}", "put", "{}")], "", "", array("I", [90] * rng.randint(1, 400)), in_reasoning=False
        )
        assert memory.size <= 40_000

    def known(name):
        call = {"id": f"toolu_{name}", "type": "function", "function": {"name": "put", "arguments": "{}"}}
        return bool(memory.restore([{"role": "assistant", "content": "", "tool_calls": [call]}])[1])

    remember("first")
    for i in range(500):
        remember(i)
        assert known("first")
    assert not known(0)
    assert known(499)
    assert len(memory._first) == len(memory._turns)


# ---- prompts of two turns


def prompt_of(service, module, body):
    return module.read_request(body, {}, service).generation.prompt


def cut_before_the_answer(body):
    """The request before the last answer, as agents only ever add to a conversation."""
    body = copy.deepcopy(body)
    name = "input" if "input" in body else "messages"
    items = body[name]
    first = next(i for i, item in enumerate(items) if _is_the_assistants(item))
    body[name] = items[:first]
    return body


def _is_the_assistants(item):
    return item.get("role") == "assistant" or item.get("type") in ("function_call", "reasoning")


SECOND = [
    one
    for one in (*recorded(path="/v1/responses"), *recorded(path="/v1/messages"))
    if any(_is_the_assistants(item) for item in one.body.get("messages") or one.body["input"] if isinstance(item, dict))
]


@pytest.mark.parametrize("one", SECOND, ids=lambda one: one.name)
def test_a_recorded_second_turn_begins_with_the_first(service, one):
    module = messages if one.path == "/v1/messages" else responses
    first = cut_before_the_answer(one.body)
    if "system" in first:  # what differs in every request
        first["system"][0]["text"] = first["system"][0]["text"].replace("cch=", "cch=0")
        first["messages"][-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
    first["client_metadata"] = {"turn_id": "another"}
    before, after = prompt_of(service, module, first).ids, prompt_of(service, module, one.body).ids
    assert after[: len(before)] == before
    assert len(after) > len(before)


@pytest.mark.parametrize("name", ["codex", "claude"])
def test_recorded_turns_of_one_session_share_their_prefix(service, name):
    module = messages if name == "claude" else responses
    first, second = (
        next(one.body for one in recorded(f"{name}_turn{i}") if one.name == f"{name}_turn{i}") for i in (1, 2)
    )
    before, after = prompt_of(service, module, first).ids, prompt_of(service, module, second).ids
    assert after[: len(before)] == before


# ---- two turns on nano


def answer_of(service, generation: Generation):
    """The events of an answer."""

    async def follow():
        return [event async for event in service.generate(generation)]

    return asyncio.run(follow())


def texts_of(events):
    return {
        kind: "".join(event.text for event in events if isinstance(event, Piece) and event.kind == kind)
        for kind in ("reasoning", "content")
    }


def as_anthropic(tools):
    return [
        {
            "name": t["function"]["name"],
            "description": t["function"]["description"],
            "input_schema": t["function"]["parameters"],
        }
        for t in tools
    ]


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_second_turn_of_messages_repeats_the_first_answer(service, thinking, seed):
    question = {"role": "user", "content": [{"type": "text", "text": "List the files in src"}]}
    body = {"messages": [question], "tools": as_anthropic(NANO_TOOLS), "max_tokens": 80, "seed": seed}
    body["thinking"] = {"type": "adaptive" if thinking else "disabled"}
    first = messages.read_request(body, {}, service).generation
    events = answer_of(service, first)
    calls = [event for event in events if isinstance(event, CallPiece)]
    assert calls
    writer = messages.MessageWriter("m")
    for event in events:
        writer.feed(event)
    content = json.loads(json.dumps(writer.message["content"]))
    results = [{"type": "tool_result", "tool_use_id": b["id"], "content": "a.py"} for b in content if "input" in b]
    body["messages"] += [{"role": "assistant", "content": content}, {"role": "user", "content": results}]
    second = messages.read_request(body, {}, service).generation.prompt
    end = events[-1]
    assert isinstance(end, Finished)
    said = [*first.prompt.ids, *end.ids]
    assert second.ids[: len(said)] == said


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_second_turn_of_responses_repeats_the_first_answer(service, seed):
    tools = [{"type": "function", **tool["function"]} for tool in NANO_TOOLS[:1]]
    tools += [
        {"type": "namespace", "name": "files", "tools": [{"type": "function", **t["function"]} for t in NANO_TOOLS[1:]]}
    ]
    body = {"input": [{"role": "user", "content": "List the files in src"}], "tools": tools, "seed": seed}
    asked = responses.read_request(body | {"max_output_tokens": 80}, {}, service)
    events = answer_of(service, asked.generation)
    writer = responses.ResponseWriter(asked.echo, asked.names)
    writer.begin()
    for event in events:
        writer.feed(event)
    items = json.loads(json.dumps(writer.response["output"]))
    call = next(item for item in items if item["type"] == "function_call")
    assert call["namespace"] == "files"
    for item in items:  # as Codex keeps them
        item.pop("id")
        item.pop("status")
    body["input"] += [*items, {"type": "function_call_output", "call_id": call["call_id"], "output": "a.py"}]
    second = responses.read_request(body, {}, service).generation.prompt
    said = [*asked.generation.prompt.ids, *events[-1].ids]
    assert second.ids[: len(said)] == said

"""What agents sent, as recorded, and what their README demands of the events that they get back.

The rules are those that clients were seen to need; `tests/fixtures/agents/README.md` has them in words.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "fixtures" / "agents"

Event = tuple[str | None, dict[str, Any]]


@dataclass(frozen=True)
class Recorded:
    """One request."""

    name: str
    path: str
    query: str
    headers: dict[str, str]
    body: dict[str, Any]


def recorded(*prefixes: str, path: str | None = None) -> list[Recorded]:
    """The requests whose names begin so, or all, to `path`."""
    found = []
    for file in sorted(FOLDER.glob("*.json")):
        value = json.loads(file.read_text(encoding="utf-8"))
        if "body" not in value or not file.stem.startswith(prefixes or ("",)):
            continue
        if path is None or value["path"] == path:
            found.append(Recorded(file.stem, value["path"], value["query"], value["headers"], value["body"]))
    assert found
    return found


def events_file(dialect: str) -> dict[str, list[Event]]:
    """The event sequences that satisfied the clients."""
    value = json.loads((FOLDER / f"events_{dialect}.json").read_text(encoding="utf-8"))
    return {
        name: [(one.get("event"), one["data"]) for one in events] for name, events in value.items() if name != "about"
    }


def parse_sse(text: str) -> list[Event]:
    """Events of a body, comments left out."""
    events: list[Event] = []
    for block in text.replace("\r\n", "\n").split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if not lines:
            continue
        fields = [line.partition(": ")[::2] for line in lines]
        data = "\n".join(value for name, value in fields if name == "data")
        events.append((next((value for name, value in fields if name == "event"), None), json.loads(data)))
    return events


class RuleBroken(Exception):  # noqa: N818
    """A sequence that some client would not read."""


def _need(condition: object, problem: str) -> None:
    if not condition:
        raise RuleBroken(problem)


def check_responses(events: Iterable[Event]) -> dict[str, Any]:
    """Raises RuleBroken unless Codex and the official client can read the events; returns the final response."""
    listed = list(events)
    _need(listed, "no events")
    for name, data in listed:
        _need(isinstance(data.get("type"), str), "data has a type")
        _need(name in (None, data["type"]), "the event line repeats the type")
    kinds = [data["type"] for _, data in listed]
    _need(kinds[0] == "response.created", "response.created comes first")
    _need(listed[0][1]["response"].get("output") == [], "response.created has an empty output")
    _need(kinds[-1] in ("response.completed", "response.failed"), "response.completed or .failed comes last")
    _need(sum(kind in ("response.completed", "response.failed") for kind in kinds) == 1, "there is one end")
    _need("response.incomplete" not in kinds and "error" not in kinds, "what agents take for a disconnect")
    numbers = [data["sequence_number"] for _, data in listed]
    _need(numbers == list(range(len(numbers))), "sequence numbers count")
    final: dict[str, Any] = listed[-1][1]["response"]
    _need(final.get("id"), "the end has the response's id")
    ids = {data["response"]["id"] for _, data in listed if "response" in data}
    _need(len(ids) == 1, "one response, one id")
    done = _check_items(listed)
    if kinds[-1] == "response.failed":
        _need(final["error"]["code"] and final["error"]["message"], "a failure has code and message")
        return final
    _need([done[index] for index in sorted(done)] == final["output"], "the response has the items that were done")
    usage = final["usage"]
    _need(usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"], "the total is a sum")
    _need(usage["input_tokens_details"]["cached_tokens"] <= usage["input_tokens"], "cached tokens are among the input")
    reasoned = usage["output_tokens_details"]["reasoning_tokens"]
    _need(reasoned <= usage["output_tokens"], "reasoning tokens are among the output")
    return final


def _check_items(events: list[Event]) -> dict[int, dict[str, Any]]:
    """The items that were done, by index."""
    added: dict[int, dict[str, Any]] = {}
    parts: set[tuple[int, int]] = set()
    texts: dict[int, str] = {}
    done: dict[int, dict[str, Any]] = {}
    for _, data in events:
        kind, index = data["type"], data.get("output_index")
        if kind == "response.output_item.added":
            _need(index == len(added) == len(done), "items are added in order, one open at a time")
            added[index] = data["item"]
            texts[index] = ""
        elif kind == "response.content_part.added":
            _need(index in added and index not in done, "a part belongs to an open item")
            parts.add((index, data["content_index"]))
        elif kind.endswith(".delta"):
            _need(index in added and index not in done, "a delta belongs to an open item")
            _need(data["item_id"] == added[index]["id"], "a delta names its item")
            if kind == "response.output_text.delta":
                _need((index, data["content_index"]) in parts, "the part is added before its delta")
            if "summary" not in kind or added[index]["type"] != "reasoning":
                texts[index] += data["delta"]
        elif kind == "response.output_item.done":
            _need(index in added and index not in done, "an item is added before it is done")
            _check_item(data["item"], added[index], texts[index])
            done[index] = data["item"]
    _need(added.keys() == done.keys() or events[-1][1]["type"] == "response.failed", "every item is done")
    return done


def _check_item(item: dict[str, Any], added: dict[str, Any], text: str) -> None:
    _need(item["type"] == added["type"] and item["id"] == added["id"], "an item stays the same")
    if item["type"] == "function_call":
        _need(item.get("call_id") and item.get("name"), "a call has id and name")
        _need(item["call_id"] == added["call_id"] and item["name"] == added["name"], "a call stays the same")
        _need(isinstance(json.loads(item["arguments"]), dict), "arguments are the text of an object")
        _need(item["arguments"] == text, "arguments are what was streamed")
    elif item["type"] == "message":
        _need(item["role"] == "assistant", "a message is the assistant's")
        _need(all(part["type"] == "output_text" for part in item["content"]), "its parts are text")
        _need("".join(part["text"] for part in item["content"]) == text, "its text is what was streamed")
    else:
        _need(item["type"] == "reasoning", "an item is a message, a call or reasoning")
        _need(isinstance(item["summary"], list), "reasoning has a summary, be it empty")
        content = "".join(part["text"] for part in item.get("content", []))
        _need(text in ("", content), "reasoning is what was streamed")


def check_messages(events: Iterable[Event]) -> dict[str, Any]:
    """Raises RuleBroken unless Claude Code and the official client can read the events; returns the whole message."""
    everything = list(events)
    for name, data in everything:
        _need(name == data["type"], "the event line is there, and repeats the type")
    listed = [data for _, data in everything if data["type"] != "ping"]
    _need(listed and listed[0]["type"] == "message_start", "message_start comes first")
    message: dict[str, Any] = json.loads(json.dumps(listed[0]["message"]))
    _need(message.get("id") and message["role"] == "assistant" and message["content"] == [], "the message begins empty")
    _need("input_tokens" in message.get("usage", {}), "message_start has usage")
    _need([data["type"] for data in listed[-2:]] == ["message_delta", "message_stop"], "the end is complete")
    is_open = False
    for data in listed[1:-2]:
        kind = data["type"]
        _need(kind.startswith("content_block_"), "blocks come between start and end")
        if kind == "content_block_start":
            _need(not is_open and data["index"] == len(message["content"]), "blocks begin in order, one at a time")
            block = json.loads(json.dumps(data["content_block"]))
            if block["type"] == "tool_use":
                _need(
                    block.get("id") and block.get("name") and block["input"] == {}, "tool_use begins with empty input"
                )
                block["input"] = ""
            message["content"].append(block)
            is_open = True
            continue
        _need(is_open and data["index"] == len(message["content"]) - 1, "the block is open")
        block = message["content"][-1]
        if kind == "content_block_stop":
            is_open = False
            if block["type"] == "tool_use":
                block["input"] = json.loads(block["input"] or "{}")
                _need(isinstance(block["input"], dict), "the input is an object")
            continue
        delta = data["delta"]
        into = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}.get(delta["type"])
        if into is None:
            _need(delta["type"] == "input_json_delta" and block["type"] == "tool_use", "a delta fits its block")
            block["input"] += delta["partial_json"]
        else:
            _need(into in block, "a delta fits its block")
            block[into] += delta[into]
    _need(not is_open, "every block is stopped")
    end = listed[-2]
    _need(end["delta"].get("stop_reason"), "message_delta has the stop reason")
    _need("output_tokens" in end["usage"], "message_delta has usage")
    message["usage"] |= end["usage"]
    message |= {name: end["delta"].get(name) for name in ("stop_reason", "stop_sequence")}
    return message

"""An agent's loop with real tools in a scratch folder, over each interface that agents speak.

nano was trained on single questions that one tool answers. It does a task of several steps where the agent asks for a
call at the start of each (tool_choice), and leaves it free then.
"""

import json
import shlex
import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import anthropic
import openai
import pytest

from cuq1.serve.request import Finished
from tests.paths import ROOT
from tests.serve.running import LIMIT, nano_service, open_nano, serving

FUNCTIONS = [tool["function"] for tool in json.loads((ROOT / "tools" / "nano_tools.json").read_text())]
STEPS = ("Write `print(1)` to src/main.py", "Read the file `src/main.py`.", "List the files in src", "Run pwd")


class Tools:
    """What the model may do, in one folder."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "src").mkdir()
        self.used = []

    def __call__(self, name, arguments):
        self.used.append(name)
        try:
            return getattr(self, name)(**arguments)
        except (OSError, ValueError, TypeError) as error:
            return f"error: {type(error).__name__}"

    def _inside(self, path):
        found = (self.folder / path).resolve()
        if not found.is_relative_to(self.folder.resolve()):
            raise ValueError(path)
        return found

    def read_file(self, path):
        return self._inside(path).read_text()

    def write_file(self, path, content):
        self._inside(path).write_text(content)
        return f"wrote {len(content)} characters"

    def list_dir(self, path):
        return "\n".join(sorted(entry.name for entry in self._inside(path).iterdir()))

    def run(self, command):
        words = shlex.split(command)
        if words != ["pwd"]:
            raise ValueError(command)
        return subprocess.run(words, cwd=self.folder, capture_output=True, text=True, timeout=10, check=False).stdout


class Chat:
    """Over Chat Completions."""

    def __init__(self, url):
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.messages = []

    def user(self, text):
        self.messages.append({"role": "user", "content": text})

    def result(self, call_id, text):
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def ask(self, choice):
        """(text, calls, prompt tokens, cached tokens); calls are (id, name, arguments)."""
        answer = self.client.chat.completions.create(
            model="any",
            messages=self.messages,
            tools=[{"type": "function", "function": function} for function in FUNCTIONS],
            tool_choice=choice,
            max_tokens=120,
            temperature=0,
        )
        message = answer.choices[0].message
        self.messages.append(message.model_dump(exclude_none=True))
        calls = [(c.id, c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or []]
        usage = answer.usage
        return message.content or "", calls, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens


class Responses:
    """Over OpenAI Responses, streamed; what comes back has lost its ids, as with Codex."""

    def __init__(self, url):
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.input = []

    def user(self, text):
        self.input.append({"role": "user", "content": text})

    def result(self, call_id, text):
        self.input.append({"type": "function_call_output", "call_id": call_id, "output": text})

    def ask(self, choice):
        with self.client.responses.stream(
            model="any",
            input=self.input,
            tools=[{"type": "function", "strict": False, **function} for function in FUNCTIONS],
            tool_choice=choice,
            max_output_tokens=120,
            temperature=0,
        ) as stream:
            answer = stream.get_final_response()
        for item in answer.output:
            kept = item.model_dump(exclude_none=True, exclude={"id", "status", "parsed_arguments"})
            self.input.append(json.loads(json.dumps(kept)))
        calls = [(i.call_id, i.name, json.loads(i.arguments)) for i in answer.output if i.type == "function_call"]
        usage = answer.usage
        return answer.output_text, calls, usage.input_tokens, usage.input_tokens_details.cached_tokens


class Messages:
    """Over Anthropic Messages, streamed; calls come back parsed, and results in another order."""

    def __init__(self, url):
        self.client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        self.messages = []
        self.requests = 0

    def user(self, text):
        self._add({"type": "text", "text": text})

    def result(self, call_id, text):
        self._add({"type": "tool_result", "tool_use_id": call_id, "content": text})

    def _add(self, block):
        if not self.messages or self.messages[-1]["role"] != "user":
            self.messages.append({"role": "user", "content": []})
        self.messages[-1]["content"].insert(0, block)

    def ask(self, choice):
        self.requests += 1
        billing = f"x-anthropic-billing-header: cc_version=2; cch={self.requests:05x};"
        with self.client.messages.stream(
            model="any",
            system=[{"type": "text", "text": billing}],
            messages=self.messages,
            tools=[
                {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]} for f in FUNCTIONS
            ],
            tool_choice={"type": "any" if choice == "required" else "auto"},
            thinking={"type": "adaptive"},
            max_tokens=120,
            extra_body={"temperature": 0},
        ) as stream:
            answer = stream.get_final_message()
        blocks = [block.model_dump(exclude_none=True) for block in answer.content]
        self.messages.append(
            {"role": "assistant", "content": [{k: v for k, v in b.items() if k in KEPT} for b in blocks]}
        )
        calls = [(block.id, block.name, block.input) for block in answer.content if block.type == "tool_use"]
        text = "".join(block.text for block in answer.content if block.type == "text")
        usage = answer.usage
        return text, calls, usage.input_tokens + usage.cache_read_input_tokens, usage.cache_read_input_tokens


KEPT = ("type", "text", "thinking", "signature", "id", "name", "input")


class Heard:
    """An answer that notes its tokens."""

    def __init__(self, answer, held):
        self._answer, self._held = answer, held

    def __aiter__(self):
        return self

    async def __anext__(self):
        event = await self._answer.__anext__()
        if isinstance(event, Finished):
            self._held.extend(event.ids)
        return event

    async def aclose(self):
        await self._answer.aclose()


@contextmanager
def noting(service):
    """What the service's engine holds after each request, and each request's prompt."""
    prompts, held = [], []
    generate = service.generate

    def noted(generation):
        prompts.append(generation.prompt.ids)
        held.append(list(generation.prompt.ids))
        return Heard(generate(generation), held[-1])

    service.generate = noted
    try:
        yield prompts, held
    finally:
        del service.generate


def run(agent, tools, steps=STEPS):
    """All steps; [(text, calls, prompt tokens, cached tokens)] of all requests."""
    turns = []
    for step in steps:
        agent.user(step)
        choice = "required"
        for _ in range(4):
            turns.append(agent.ask(choice))
            _, calls, *_ = turns[-1]
            choice = "auto"
            if not calls:
                break
            for call_id, name, arguments in calls:
                agent.result(call_id, tools(name, arguments))
    return turns


def common(one, other):
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@dataclass
class Task:
    """All steps over one interface, on a service that reuses what it holds."""

    tools: Tools
    turns: list
    prompts: list
    held: list


@pytest.fixture(scope="module")
def task_over(service, base_url, tmp_path_factory):
    @cache
    def task_over(interface):
        tools = Tools(tmp_path_factory.mktemp("task"))
        with noting(service) as (prompts, held):
            return Task(tools, run(interface(base_url), tools), prompts, held)

    return task_over


@pytest.mark.parametrize("interface", [Chat, Responses, Messages])
def test_a_task_of_several_steps_is_done_and_every_turn_begins_where_the_last_one_ended(task_over, interface):
    task = task_over(interface)
    tools, turns, prompts, held = task.tools, task.turns, task.prompts, task.held
    assert (tools.folder / "src" / "main.py").read_text() == "print(1)"
    assert tools.used == ["write_file", "read_file", "list_dir", "run"]
    assert len(turns) == 2 * len(STEPS)
    assert "print(1)" in turns[3][0]
    assert "main.py" in turns[5][0]
    for i, (_, _, prompt_tokens, cached) in enumerate(turns):
        assert prompt_tokens == len(prompts[i])
        if i:
            # A turn with calls is repeated token by token; one without is spelled as the tokenizer does.
            shared = common(held[i - 1], prompts[i])
            assert shared == len(held[i - 1]) or (not turns[i - 1][1] and shared >= len(prompts[i - 1]))
            assert shared - 1 <= cached <= shared  # the token where a sequence is cut may be computed again


@pytest.fixture(scope="module")
def forgetful_url():
    service = nano_service(Forgetful)
    with serving(service) as url:
        yield url
    assert service.close(drain=False, timeout=LIMIT)


@pytest.mark.parametrize("interface", [Chat, Responses, Messages])
def test_answers_are_the_same_without_reuse(task_over, forgetful_url, tmp_path, interface):
    again = run(interface(forgetful_url), Tools(tmp_path), STEPS[:2])
    assert len(again) == 4
    assert [said(turn) for turn in again] == [said(turn) for turn in task_over(interface).turns[:4]]
    assert not any(cached for *_, cached in again)


class Interrupted(Messages):
    """An agent that asks for a title on another connection whenever it has been answered."""

    def ask(self, choice):
        answer = super().ask(choice)
        self.client.messages.create(
            model="a-smaller-one",
            system=[{"type": "text", "text": "Write a title."}],
            messages=[{"role": "user", "content": STEPS[0]}],
            max_tokens=8,
        )
        return answer


def test_a_second_request_takes_nothing_from_the_conversation(task_over, base_url, tmp_path):
    alone = task_over(Messages).turns[:4]
    service = nano_service(snapshots=(1 << 28, 0))
    try:
        with serving(service) as url, noting(service) as (prompts, held):
            turns = run(Interrupted(url), Tools(tmp_path), STEPS[:2])
    finally:
        assert service.close(drain=False, timeout=LIMIT)
    assert [said(turn) for turn in turns] == [said(turn) for turn in alone]
    assert len(prompts) == 2 * len(turns)
    for i, (*_, cached) in enumerate(turns):
        if i:  # what is kept is the end of the last prompt: what was answered is computed again
            shared = common(held[2 * i - 2], prompts[2 * i])
            assert len(prompts[2 * i - 2]) - 1 <= cached <= shared
    # The control: where no snapshots are kept, hardly anything is left.
    shutil.rmtree(tmp_path / "src")
    without = run(Interrupted(base_url), Tools(tmp_path), STEPS[:1])
    assert [said(turn) for turn in without] == [said(turn) for turn in alone[:2]]
    assert all(cached < 50 for *_, cached in without[1:])


class Forgetful:
    """An engine that holds nothing from one request to the next."""

    def __init__(self):
        self._engine = open_nano()
        self._used = False

    def __getattr__(self, name):
        if self._used and name in ("held", "prefill"):
            self._engine.rewind(0)
            self._used = False
        self._used = self._used or name == "decode"
        return getattr(self._engine, name)


def said(turn):
    text, calls, *_ = turn
    return text, [call[1:] for call in calls]

"""Many clients at once against a server of nano: every answer is checked against the same request asked alone.

    python -m tools.soak_serve --clients 64 --seconds 300

Clients ask, streamed and not, leave at random, and send bodies that are none. It fails where an answer is wrong, a
request takes too long, a malformed body gets anything but a 4xx, the queue exceeds its bound, or memory grows.
"""

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

LIMIT_SECONDS = 120.0
MAX_QUEUE = 16
GROWTH = 32 << 20  # bytes that memory may grow by after the first seconds
MALFORMED: tuple[tuple[str, bytes], ...] = (
    ("/v1/chat/completions", b"{"),
    ("/v1/chat/completions", b"[]"),
    ("/v1/chat/completions", b'{"messages": 5}'),
    ("/v1/chat/completions", b'{"messages": [{"role": "user"}]}'),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}'),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "tools": [{}]}'),
    ("/v1/completions", b'{"prompt": [99999999]}'),
    ("/v1/completions", b'{"prompt": "\xff"}'),
    ("/v1/responses", b'{"input": 5}'),
    ("/v1/messages", b'{"messages": [], "max_tokens": 5}'),
    ("/v1/messages", b"[" * 5000),
    ("/tokenize", b"{}"),
    ("/nowhere", b"{}"),
)
QUESTIONS = ("Write a function.", "Sort a list.", "Run git diff", "Read a file, then count its lines.", "def f(x):")


@dataclass
class Case:
    """One request, and what is said in answer to it when it is asked alone."""

    path: str
    body: dict[str, Any]
    expected: str = ""


@dataclass
class Report:
    """What happened, by kind, and what was wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0
    most_waiting: int = 0
    memory: list[int] = field(default_factory=list)

    def problems(self, *, grown: int = GROWTH, max_queue: int = MAX_QUEUE) -> list[str]:
        """Everything that a server must not do."""
        found = list(self.wrong)
        if self.most_waiting > max_queue:
            found.append(f"{self.most_waiting} requests waited, and the bound is {max_queue}")
        if len(self.memory) >= 4:
            settled = self.memory[len(self.memory) // 4 :]
            growth = max(settled[-3:]) - min(settled[:3])
            if growth > grown:
                found.append(f"memory grew by {growth / 2**20:.1f} MiB")
        return found


def cases(seed: int, count: int) -> list[Case]:
    """Requests of every dialect, each with a seed of its own."""
    rng = random.Random(seed)
    made: list[Case] = []
    for _ in range(count):
        text, tokens, own = rng.choice(QUESTIONS), rng.randint(1, 24), rng.randrange(1 << 32)
        chat = [{"role": "user", "content": text}]
        made.append(
            rng.choice(
                (
                    Case("/v1/chat/completions", {"messages": chat, "max_tokens": tokens, "seed": own}),
                    Case("/v1/completions", {"prompt": text, "max_tokens": tokens, "seed": own}),
                    Case("/v1/responses", {"input": text, "max_output_tokens": tokens, "seed": own, "model": "m"}),
                    Case("/v1/messages", {"messages": chat, "max_tokens": tokens, "seed": own, "model": "m"}),
                )
            )
        )
    return made


def said(value: Any) -> str:
    """All that an answer says, whatever its dialect: reasoning, then texts in order, then calls; without ids."""
    if isinstance(value, dict):
        return "".join(said(value[name]) for name in _SAYING if name in value)
    if isinstance(value, list):
        return "".join(map(said, value))
    return value if isinstance(value, str) else ""


_SAYING = (
    *("choices", "message", "output", "reasoning_content", "thinking", "summary", "content", "text"),
    *("tool_calls", "function", "arguments", "input"),
)
_PIECES = ("delta", "text", "thinking", "partial_json", "reasoning_content", "content", "choices")


def said_in_stream(received: str) -> str:
    """The pieces of a stream together."""
    pieces: list[str] = []
    for block in received.split("\n\n"):
        data = next((line[6:] for line in block.split("\n") if line.startswith("data: {")), None)
        if data is None:
            continue
        event = json.loads(data)
        kind = event.get("type", "")
        if kind.endswith((".done", "_start", ".completed", ".created", ".in_progress", ".added")):
            continue
        pieces.append(_piece(event))
    return "".join(pieces)


def _piece(value: Any) -> str:
    if isinstance(value, dict):
        return "".join(_piece(item) for name, item in value.items() if name in _PIECES)
    if isinstance(value, list):
        return "".join(map(_piece, value))
    return value if isinstance(value, str) else ""


async def solo(url: str, asked: Sequence[Case]) -> None:
    """Ask each case alone."""
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_SECONDS) as client:
        for case in asked:
            response = await client.post(case.path, json=case.body)
            response.raise_for_status()
            case.expected = said(response.json())


async def soak(url: str, asked: Sequence[Case], clients: int, seconds: float, seed: int, pid: int | None) -> Report:
    """All clients at once, for so long; then until nothing runs."""
    report = Report()
    end = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=clients * 2, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_SECONDS, limits=limits) as client:
        watch = asyncio.create_task(_watch(client, report, pid))
        async with asyncio.TaskGroup() as group:
            for index in range(clients):
                group.create_task(_client(client, asked, report, end, random.Random(seed * 1000 + index)))
        left = time.monotonic() + LIMIT_SECONDS
        while (health := (await client.get("/health")).json())["running"] or health["waiting"]:
            if time.monotonic() > left:
                report.wrong.append("a request is stuck")
                break
            await asyncio.sleep(0.05)
        watch.cancel()
    return report


async def _watch(client: httpx.AsyncClient, report: Report, pid: int | None) -> None:
    while True:
        health = (await client.get("/health")).json()
        report.most_waiting = max(report.most_waiting, health["waiting"])
        if pid is not None:
            report.memory.append(sum(map(_resident, (pid, *_children(pid)))))
        await asyncio.sleep(0.5)


def _resident(pid: int) -> int:
    """Bytes of a process' memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _children(pid: int) -> list[int]:
    """A process' own processes: the engine's."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text(encoding="ascii").split()]


async def _client(
    client: httpx.AsyncClient, asked: Sequence[Case], report: Report, end: float, rng: random.Random
) -> None:
    while time.monotonic() < end:
        begun = time.monotonic()
        try:
            kind = await _one(client, asked, report, rng)
        except httpx.HTTPError as error:
            kind = f"error {type(error).__name__}"
            report.wrong.append(kind)
        report.counts[kind] += 1
        report.slowest = max(report.slowest, time.monotonic() - begun)
        if kind == "busy":
            await asyncio.sleep(rng.uniform(0.1, 0.5))


async def _one(client: httpx.AsyncClient, asked: Sequence[Case], report: Report, rng: random.Random) -> str:
    """One thing that a client does; returns what it was."""
    chance = rng.random()
    if chance < 0.2:
        path, content = rng.choice(MALFORMED)
        response = await client.post(path, content=content)
        if not 400 <= response.status_code < 500:
            report.wrong.append(f"{path} answered {response.status_code} to {content[:60]!r}")
        return "malformed"
    case, stream = rng.choice(asked), rng.random() < 0.5
    body = case.body | {"stream": stream}
    if chance < 0.5:
        try:
            async with asyncio.timeout(rng.expovariate(1.0)):
                await client.post(case.path, json=body)
        except TimeoutError:
            return "left"
        return "stayed"
    response = await client.post(case.path, json=body)
    if response.status_code in (429, 503, 529):
        return "busy"
    found = said_in_stream(response.text) if stream else said(response.json())
    if response.status_code != 200 or found != case.expected:
        report.wrong.append(f"{case.path} {case.body} stream={stream}: {found!r} is not {case.expected!r}")
    return "streamed" if stream else "whole"


class LocalServer:
    """python -m cuq1.serve on a free port; `url` and `pid`."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "cuq1.serve", "--port", "0", *options]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        assert self._process.stderr is not None
        self.url = ""
        for line in self._process.stderr:
            if found := re.search(r"ready: (http://\S+)", line):
                self.url = found[1]
                break
        threading.Thread(target=self._process.stderr.read, daemon=True).start()

    def __enter__(self) -> "LocalServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)


def run(clients: int, seconds: float, seed: int, *options: str) -> Report:
    """Start a server, ask everything alone, then all at once."""
    asked = cases(seed, 24)
    with LocalServer(*options) as server:
        if not server.url:
            raise RuntimeError("the server did not start")
        asyncio.run(solo(server.url, asked))
        return asyncio.run(soak(server.url, asked, clients, seconds, seed, server.pid))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--max-queue", type=int, default=MAX_QUEUE, help="requests that may wait (default: %(default)s)"
    )
    options = parser.parse_args()
    few = ("--snapshots", "0.03", "--host-snapshots", "0.03")  # full soon, so that growth is of something else
    given = ("--device", options.device, "--max-queue", str(options.max_queue))
    report = run(options.clients, options.seconds, options.seed, *given, *few)
    print(f"{dict(report.counts)}; slowest {report.slowest:.1f} s; at most {report.most_waiting} waiting")
    if report.memory:
        settled = report.memory[len(report.memory) // 4 :]
        print(f"server memory {min(settled) / 2**20:.1f} to {max(settled) / 2**20:.1f} MiB after the first quarter")
    problems = report.problems(max_queue=options.max_queue)
    if not report.counts["busy"]:
        problems.append(f"no request was refused: the bound of {options.max_queue} was not tried, choose a lower one")
    for problem in problems[:20]:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

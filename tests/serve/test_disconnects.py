"""Clients that leave at every stage: the engine stops at once, the next answer is right, and nothing is left behind."""

import gc
import json
import random
import socket
import time

import pytest

from cuq1.serve import http
from cuq1.serve.job import Job
from tests.serve.running import LIMIT, PAUSE, endless, nano_service, open_nano, post, serving, wait_for
from tests.serve.watched import Watched

SHORT = [{"role": "user", "content": "Write a function."}]
SOON = 10.0  # seconds, on a machine that does other things too
LONG = "def f(x):\n    return x + 1\n\n" * 400  # more tokens than any step


@pytest.fixture(scope="module")
def watched():
    service = nano_service(lambda: Watched(open_nano()), max_queue=100)
    with endless(service):
        yield service
    assert service.close(drain=False, timeout=LIMIT)


@pytest.fixture(scope="module")
def engine(watched):
    return watched.engine


@pytest.fixture(scope="module")
def url(watched):
    with serving(watched) as url:
        yield url


def body(messages=SHORT, **options):
    return {"messages": messages, "seed": 5, "max_tokens": 20000, "stream": True} | options


class Client:
    """A request over a plain socket, which can be left at any byte."""

    def __init__(self, url, path="/v1/chat/completions", **options):
        host, port = url.removeprefix("http://").split(":")
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        self._socket.settimeout(LIMIT)
        self._socket.connect((host, int(port)))
        data = json.dumps(body(**options)).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {len(data)}\r\n\r\n"
        self._socket.sendall(head.encode() + data)
        self.received = b""

    def read_until(self, marker, count=1):
        while self.received.count(marker) < count:
            data = self._socket.recv(1 << 16)
            assert data, self.received
            self.received += data
        return self

    def leave(self, *, abruptly=False):
        if abruptly:  # a reset in place of an orderly end
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self._socket.close()


def running_job(service):
    """The job that has just been asked for, not one before it whose end is still being noted."""
    wait_for(lambda: (job := service.worker._running) is not None and not job.done)
    return service.worker._running


def is_free(service, engine, job):
    """The engine takes at most one step more once the job is cancelled, which is soon."""
    left = time.monotonic()
    wait_for(lambda: job.cancelled, SOON)
    steps = engine.steps
    wait_for(lambda: not service.worker.busy and job.done, SOON)
    assert engine.steps - steps <= 1
    assert time.monotonic() - left < SOON


def is_prompt_and_right(url, expected):
    begun = time.monotonic()
    assert answer(url) == expected
    assert time.monotonic() - begun < SOON


def answer(url):
    found = post(url, "/v1/chat/completions", body(stream=False, max_tokens=4))
    return found["choices"][0]["message"]


@pytest.fixture(scope="module")
def expected(url):
    return answer(url)


def test_left_while_it_is_queued(url, watched, engine, expected):
    engine.gate.clear()
    first = Client(url)
    job = running_job(watched)
    others = [Client(url, stream=index % 2 == 0) for index in range(80)]
    wait_for(lambda: watched.worker.waiting == 80)
    random.Random(1).shuffle(others)
    for left, client in enumerate(others, 1):
        if left % 2:
            client.leave(abruptly=left % 4 == 1)
            wait_for(lambda left=left: watched.worker.waiting <= 80 - left, SOON)
        else:
            client.leave()
            wait_for(lambda left=left: watched.worker.waiting == 80 - left, SOON)
    assert not job.cancelled
    first.leave()
    wait_for(lambda: job.cancelled)
    engine.gate.set()
    wait_for(lambda: not watched.worker.busy)
    is_prompt_and_right(url, expected)


@pytest.mark.parametrize("stream", [True, False])
def test_left_while_the_prompt_is_computed(url, watched, engine, expected, stream, monkeypatch):
    monkeypatch.setattr(engine, "pause", PAUSE)
    for number in range(6):
        engine.gate.clear()
        before = engine.steps
        client = Client(url, messages=[{"role": "user", "content": f"{number} {LONG}"}], stream=stream)
        job = running_job(watched)
        engine.gate.set()
        wait_for(lambda before=before: engine.steps > before)
        client.leave()
        is_free(watched, engine, job)
        assert job.measures.first_token is None
    is_prompt_and_right(url, expected)


@pytest.mark.parametrize(("chunks", "times"), [(1, 44), (2, 32), (8, 24)])
def test_left_in_the_stream(url, watched, engine, expected, chunks, times):
    """After the first event, the first token, and in the middle."""
    for index in range(times):
        client = Client(url, seed=index)
        job = running_job(watched)
        client.read_until(b"data: ", chunks)
        client.leave(abruptly=index % 2 == 0)
        is_free(watched, engine, job)
        is_prompt_and_right(url, expected)


def test_left_without_a_stream(url, watched, engine, expected):
    for index in range(20):
        client = Client(url, seed=index, stream=False)
        job = running_job(watched)
        wait_for(lambda job=job: job.measures.first_token is not None)
        client.leave()
        is_free(watched, engine, job)
        is_prompt_and_right(url, expected)


def test_nothing_is_left_behind(url, watched, engine):
    """Neither jobs nor what they hold, nor tasks; the same check sees a job that somebody keeps."""
    wait_for(lambda: not watched.worker.busy)
    wait_for(lambda: gc.collect() >= 0 and not jobs(), 5)
    wait_for(lambda: not url.server.server_state.tasks and not url.server.server_state.connections)
    client = Client(url).read_until(b"data: ", 2)
    kept = running_job(watched)
    client.leave()
    wait_for(lambda: not watched.worker.busy)
    gc.collect()
    assert jobs() == [kept]


def jobs():
    return [found for found in gc.get_objects() if type(found) is Job]


def test_a_reader_that_stops_holds_nobody_up(watched, expected):
    options = {"max_tokens": 150, "seed": 2, "logprobs": True, "top_logprobs": 20}
    options["chat_template_kwargs"] = {"enable_thinking": False}
    with serving(watched, send_buffer=1 << 14) as url:
        slow = Client(url, **options)
        job = running_job(watched)
        wait_for(lambda: job.done)
        is_prompt_and_right(url, expected)
        held = len(job._events)
        slow.read_until(b"[DONE]")
        free = Client(url, **options).read_until(b"[DONE]")
        assert held > 0  # the reader was really behind
        assert len(free.received) > 1 << 17
        assert text(slow.received) == text(free.received)
        slow.leave()
        free.leave()


def piece(line):
    if not line.startswith(b"data: {"):
        return ""
    choices = json.loads(line[6:])["choices"]
    delta = choices[0]["delta"] if choices else {}
    return delta.get("reasoning_content", "") + (delta.get("content") or "")


def text(received):
    return "".join(map(piece, received.split(b"\n")))


def test_an_engine_that_looks_at_nobody_is_caught(url, watched, engine, monkeypatch):
    """The negative control: a worker that does not look whether anybody still reads."""
    monkeypatch.setattr(Job, "cancelled", property(lambda job: False))
    monkeypatch.setattr(engine, "pause", PAUSE)
    client = Client(url, seed=1, max_tokens=100)
    job = running_job(watched)
    client.read_until(b"data: ", 2)
    client.leave()
    wait_for(lambda: job._cancelled)
    steps = engine.steps
    wait_for(lambda: not watched.worker.busy)
    assert engine.steps - steps > 1


def test_a_reader_that_takes_nothing_for_long_is_let_go(watched, monkeypatch):
    monkeypatch.setattr(http, "SEND_SECONDS", 0.3)
    with serving(watched, send_buffer=1 << 14) as url:
        options = {"max_tokens": 200, "seed": 2, "logprobs": True, "top_logprobs": 20, "reasoning_effort": "none"}
        slow, quick = Client(url, **options), Client(url, **options)
        wait_for(lambda: watched.worker.busy)
        quick.read_until(b"[DONE]")  # which has waited behind the other
        wait_for(lambda: not url.server.server_state.tasks)
        with pytest.raises((AssertionError, OSError)):
            slow.read_until(b"[DONE]")  # what was under way still comes, and then the end

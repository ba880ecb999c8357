"""The server as a process: what it refuses, what it says, how it stops, and what it does when its engine dies."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from cuq1.serve import run
from cuq1.serve.__main__ import main
from cuq1.serve.settings import Settings
from tests.paths import ROOT
from tests.serve.running import LIMIT, NO_CERTIFICATES, ON_CPU, Process, serving, wait_for

KEY = "sk-very-secret-key-0123456789"
SECRET_WORDS = "the purple armadillo hides underneath"
# an answer that does not end by itself for a long while
LIST = {"type": "array", "items": {"type": "boolean"}, "minItems": 9000}
ENDLESS = {
    "stream": True,
    "response_format": {"type": "json_schema", "json_schema": {"name": "list", "schema": LIST}},
    "max_tokens": 10000,
}


def chat(url, text=SECRET_WORDS, headers=None, **options):
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "seed": 1} | options
    url += "/v1/chat/completions"
    return httpx.post(url, json=body, headers=headers or {}, timeout=LIMIT, verify=NO_CERTIFICATES)


def refused(*options, env=None):
    """The one line that a command line is refused with."""
    environment = {k: v for k, v in os.environ.items() if k != "CUQ1_API_KEY"} | (env or {})
    command = [sys.executable, "-m", "cuq1.serve", "--port", "0", *options]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    return sentence(done.returncode, done.stderr)


def sentence(status, stderr):
    """The one line that says what is wrong."""
    assert status == 2
    assert stderr.startswith("cuq1.serve: ")
    (line,) = stderr.splitlines()
    return line


@pytest.fixture
def refused_here(monkeypatch, capsys):
    """As `refused`, in this process: for what is refused before anything is loaded."""
    monkeypatch.delenv("CUQ1_API_KEY", raising=False)
    monkeypatch.setattr(run, "serve", lambda *_: pytest.fail("it would be served"))
    return lambda *options: sentence(main(["--port", "0", *options]), capsys.readouterr().err)


def test_other_machines_are_let_in_with_a_key_alone(guarded, refused_here):
    assert "--api-key" in refused("--host", "0.0.0.0")
    for host in ("::", "192.0.2.1", ""):
        assert "--api-key" in refused_here("--host", host)
    assert "ready: http://0.0.0.0:" in guarded.log
    assert httpx.get(f"{guarded.url}/health").status_code == 200


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--port", "70000"], "--port"),
        (["--max-queue", "-1"], "--max-queue"),
        (["--context", "1"], "--context"),
        (["--context", "100000"], "65536"),
        (["--api-key", ""], "key"),
        (["--api-key", "two words "], "key"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--host", "no.such.host.invalid"], "--host"),
        (["--drain", "nan"], "--drain"),
        (["--colour", "red"], "--colour"),
    ],
)
def test_bad_options_are_one_sentence(refused_here, options, word):
    assert word in refused_here(*options)


def test_good_options_are_served(refused_here):
    """The control of the refusals."""
    with pytest.raises(pytest.fail.Exception, match="would be served"):
        refused_here("--max-queue", "0")


@pytest.mark.parametrize(("options", "word"), [(["--tp", "7"], "7"), (["--max-queue", "-1"], "--max-queue")])
def test_a_process_that_is_refused_says_no_more(options, word):
    assert word in refused(*options)


@pytest.mark.parametrize("options", [("--device", "cuda"), ("--device", "cuda", "--tp", "2"), ("--activations", "fp8")])
def test_a_device_that_is_not_there(options):
    """The engine's process finds out, and the server says it, once."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "cuq1.serve", "--port", "0", *options]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 2
    *told, line = done.stderr.splitlines()
    assert re.match("cuq1.serve: .*cuda", line)
    assert all("loading" in other for other in told)


def test_a_port_that_is_taken(refused_here):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert "--port" in refused_here("--port", str(other.getsockname()[1]))


@pytest.fixture(scope="module")
def guarded():
    with Process("--max-body", "1", "--host", "0.0.0.0", key=KEY) as server:
        server.url = server.url.replace("0.0.0.0", "127.0.0.1")
        yield server


def test_the_start_is_told(guarded):
    for word in (
        "loading layers: 6/6" if ON_CPU else "loading layers: 7/7",  # the draft's too
        "iquest-q1-nano",
        "device cpu" if ON_CPU else "device NVIDIA",
        "GiB",
        "context 65536",
        "ready: http://",
    ):
        assert word in guarded.log


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer wrong"}, {"x-api-key": KEY[:-1]}, {"Authorization": KEY}]
)
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/metrics", "/v1/models", "/x"]
)
def test_a_wrong_key(guarded, headers, path):
    response = httpx.post(guarded.url + path, json={"secret": SECRET_WORDS}, headers=headers, verify=NO_CERTIFICATES)
    assert response.status_code == 401
    assert response.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    "headers", [{"Authorization": f"Bearer {KEY}"}, {"X-Api-Key": KEY}, {"authorization": f"bearer  {KEY}"}]
)
def test_the_right_key(guarded, headers):
    assert chat(guarded.url, headers=headers).status_code == 200
    assert httpx.get(guarded.url + "/v1/models?beta=true", headers=headers).status_code == 200


def test_what_needs_no_key(guarded):
    for path in ("/", "/health", "/openapi.json"):
        assert httpx.get(guarded.url + path).status_code == 200
    assert httpx.head(guarded.url).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large(guarded, chunked):
    text = json.dumps({"messages": [{"role": "user", "content": "x" * (2 << 20)}]}).encode()
    content = (text[i : i + 65536] for i in range(0, len(text), 65536)) if chunked else text
    with httpx.Client() as client:
        for path in ("/v1/chat/completions", "/v1/messages"):
            content = (text[i : i + 65536] for i in range(0, len(text), 65536)) if chunked else text
            try:
                response = client.post(guarded.url + path, content=content, headers={"x-api-key": KEY})
            except httpx.WriteError:
                continue  # the connection was closed while the body was still under way
            assert response.status_code == 413
    assert chat(guarded.url, "x" * 1000, {"x-api-key": KEY}).status_code == 200  # and one that is not


def test_the_log_tells_numbers_and_no_words(guarded):
    headers = {"x-api-key": KEY}
    assert chat(guarded.url, headers=headers).status_code == 200
    assert chat(guarded.url, headers=headers, n=SECRET_WORDS).status_code == 400
    httpx.get(f"{guarded.url}/{SECRET_WORDS}?key={KEY}", headers=headers)
    with httpx.stream(
        "POST", f"{guarded.url}/v1/completions", json={"prompt": SECRET_WORDS} | ENDLESS, headers=headers
    ):
        pass
    wait_for(lambda: "POST /v1/completions" in guarded.log)
    line = next(line for line in reversed(guarded.log.splitlines()) if "/v1/chat/completions 200" in line)
    for word in ("prompt=", "cached=", "completion=8", "first=", "tok/s", "accepted=", "end=length"):
        assert word in line
    assert "GET other 404" in guarded.log
    for secret in (KEY, SECRET_WORDS, *SECRET_WORDS.split()[1:3]):
        assert secret not in guarded.log


def test_other_sites_pages_are_not_served(base_url):
    assert chat(base_url).status_code == 200
    assert chat(base_url, headers={"Origin": base_url}).status_code == 200
    assert chat(base_url, headers={"Origin": "http://evil.example"}).status_code == 403
    assert chat(base_url, headers={"Host": "evil.example"}).status_code == 403
    for host in ("localhost", "LOCALHOST:1", "[::1]:8000", "127.0.0.1:9"):
        assert chat(base_url, headers={"Host": host}).status_code == 200
    for host in ("[", "a:b:c", "", "127.0.0.1.evil.example", "[::2]"):
        assert chat(base_url, headers={"Host": host}).status_code in (400, 403)


def takes_nothing(url):
    """Whether the port is closed. Until it is, requests have to be refused."""
    try:
        response = chat(url)
    except httpx.TransportError:
        return True
    assert response.status_code == 503
    assert "Retry-After" in response.headers
    return False


def test_it_drains_and_ends():
    with Process("--served-model-name", "a model", "--max-queue", "3") as server:
        texts, threads = {}, []

        def stream(index):
            body = {"messages": [{"role": "user", "content": "Write."}]} | ENDLESS | {"max_tokens": 150}
            with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=LIMIT) as response:
                texts[index] = response.read().decode()

        for index in range(3):
            threads.append(threading.Thread(target=stream, args=(index,)))
            threads[-1].start()
        health = {"running": 0}
        wait_for(lambda: health.update(httpx.get(f"{server.url}/health").json()) or health["waiting"] == 2)
        with httpx.Client() as client:  # a connection that stands already
            assert client.get(f"{server.url}/health").json()["model"] == "a model"
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: "stopping" in server.log)
        wait_for(lambda: takes_nothing(server.url))
        for thread in threads:
            thread.join(LIMIT)
        assert server.wait() == 0
        assert len(texts) == 3
        assert all(text.endswith("data: [DONE]\n\n") for text in texts.values())


def test_a_second_signal_ends_what_runs():
    with Process() as server:
        body = {"messages": [{"role": "user", "content": "Write."}]} | ENDLESS
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=LIMIT) as response:
            server.process.send_signal(signal.SIGINT)
            wait_for(lambda: "stopping" in server.log)
            begun = time.monotonic()
            server.process.send_signal(signal.SIGINT)
            said = "".join(response.iter_text())
        assert "shutting down" in said
        assert server.wait() == 0
        assert time.monotonic() - begun < 15


def engine_process(server):
    """The child of the server's process: whichever of its threads has started it."""
    tasks = Path(f"/proc/{server.process.pid}/task").iterdir()
    return max(int(child) for task in tasks for child in (task / "children").read_text().split())


def test_a_dead_engine_is_started_again_once():
    with Process("--max-queue", "5") as server:

        def health():
            return httpx.get(f"{server.url}/health").status_code

        expected = chat(server.url).json()["choices"]
        first = engine_process(server)
        answers = []
        body = {"messages": [{"role": "user", "content": "Write."}]} | ENDLESS

        def ask(stream):
            answers.append(
                httpx.post(f"{server.url}/v1/chat/completions", json=body | {"stream": stream}, timeout=LIMIT)
            )

        threads = [threading.Thread(target=ask, args=(index % 2 == 0,)) for index in range(3)]
        for thread in threads:
            thread.start()
        wait_for(lambda: httpx.get(f"{server.url}/health").json()["waiting"] == 2)
        os.kill(first, signal.SIGKILL)
        for thread in threads:
            thread.join(LIMIT)
        assert len(answers) == 3
        for answer in answers:
            assert "engine failed" in answer.text
            assert answer.status_code == 500 or answer.headers["content-type"].startswith("text/event-stream")
        wait_for(lambda: health() == 200)
        assert chat(server.url).json()["choices"] == expected
        assert "cuq1_engine_restarts_total 1.0" in httpx.get(f"{server.url}/metrics").text
        os.kill(engine_process(server), signal.SIGKILL)  # while nothing is asked of it
        wait_for(lambda: health() == 503)
        assert chat(server.url).status_code == 503
        assert httpx.get(f"{server.url}/health").json()["status"] == "failed"
        assert "engine restarting" in server.log
        assert "the engine failed: the engine's process ended with status -9" in server.log
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0


def test_a_body_that_comes_too_slowly(service):
    with serving(service, Settings(body_seconds=0.3)) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=LIMIT) as slow:
            slow.sendall(f"POST /tokenize HTTP/1.1\r\nHost: {host}\r\nContent-Length: 20\r\n\r\n{{".encode())
            assert slow.recv(4096).startswith(b"HTTP/1.1 408 ")
        assert httpx.post(f"{url}/tokenize", json={"prompt": "a"}).status_code == 200


def test_a_drain_has_an_end():
    with Process("--drain", "0.4") as server:
        body = {"messages": [{"role": "user", "content": "Write."}]} | ENDLESS
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=LIMIT) as response:
            server.process.send_signal(signal.SIGTERM)
            begun = time.monotonic()
            said = "".join(response.iter_text())
        assert "shutting down" in said
        assert server.wait() == 0
        assert 0.35 < time.monotonic() - begun < 15

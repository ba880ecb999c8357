"""The engine in a process of its own: the same answers, the same errors, and what happens when the process dies."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from cuq1.errors import DeviceError, LaunchError, RequestError
from cuq1.sampling import DecodeParams
from cuq1.serve import remote as remote_module
from cuq1.serve.remote import EngineOptions, RemoteEngine
from tests.paths import NANO, ROOT
from tests.serve.fake_rank import PROGRAM
from tests.serve.running import DEVICE, open_nano, wait_for
from tests.unit.fake_ranks import FakeEngine

PROMPT = [5, 9, 200, 301, 77, 12]


@pytest.fixture(scope="module")
def own():
    with open_nano() as engine:
        yield engine


@pytest.fixture(scope="module")
def remote():
    seen = []
    with RemoteEngine(EngineOptions(str(NANO), DEVICE), lambda done, total: seen.append((done, total))) as engine:
        assert seen[-1][0] == seen[-1][1] > 0
        yield engine
    assert engine.process.returncode == 0


def rounds(engine, seed, mask=None):
    engine.prefill(PROMPT)
    stream = engine.decode(DecodeParams(seed=seed, max_tokens=16, logprobs=2), mask=mask)
    return list(stream), stream.finish_reason, stream.seed, engine.tokens


class Even:
    """A mask that allows even tokens, and notes what it is told."""

    def __init__(self, vocab):
        self._allowed = np.arange(vocab) % 2 == 0
        self.told = []

    def allowed(self):
        return self._allowed

    def push(self, token):
        self.told.append(token)

    def pop(self, count):
        del self.told[-count:]


@pytest.mark.parametrize("seed", [0, 1])
def test_it_answers_as_an_engine_in_this_process(own, remote, seed):
    assert (remote.vocab_size, remote.context) == (own.vocab_size, own.context)
    assert remote.default_params == own.default_params
    assert remote.memory > 1 << 20
    expected = rounds(own, seed)
    assert rounds(remote, seed) == expected
    assert rounds(remote, seed + 1) != expected
    assert np.array_equal(remote.score(PROMPT), own.score(PROMPT))
    assert remote.prefill([*PROMPT, 3]) == own.prefill([*PROMPT, 3])


def test_its_mask_stays_here(own, remote):
    masks = Even(own.vocab_size), Even(own.vocab_size)
    expected = rounds(own, 3, masks[0])
    assert rounds(remote, 3, masks[1]) == expected
    assert masks[0].told == masks[1].told
    assert all(token % 2 == 0 for token in remote.tokens[len(PROMPT) :])
    assert any(token % 2 for token in rounds(remote, 3)[3][len(PROMPT) :])


def test_a_mask_that_gives_up_is_the_requests_fault(remote):
    class Lost(Even):
        def allowed(self):
            raise RequestError("the grammar is lost")

    with pytest.raises(RequestError, match="the grammar is lost"):
        rounds(remote, 1, Lost(remote.vocab_size))
    assert rounds(remote, 1)[1] is not None


def test_a_request_can_be_left_and_is_superseded(own, remote):
    for engine in (own, remote):
        engine.prefill(PROMPT)
        stream = engine.decode(DecodeParams(seed=1, max_tokens=40))
        next(stream)
        stream.close()
        assert list(stream) == []
    assert remote.tokens == own.tokens
    stream = remote.decode(DecodeParams(seed=1, max_tokens=40))
    next(stream)
    remote.prefill(PROMPT)
    with pytest.raises(RequestError):
        next(stream)
    assert rounds(remote, 4) == rounds(own, 4)


def test_errors_come_as_what_they_are(remote):
    with pytest.raises(RequestError, match="empty"):
        remote.prefill([])
    with pytest.raises(RequestError, match="outside the vocabulary"):
        remote.prefill([10**6])


def test_what_cannot_be_opened_says_why(tmp_path):
    with pytest.raises(Exception, match=r"config\.json"):
        RemoteEngine(EngineOptions(str(tmp_path), DEVICE))


def test_a_server_that_is_gone_before_its_engine_is_open(tmp_path):
    """Killed while it loads: its engine's process ends, and has nothing to say of it."""
    with socket.socket(socket.AF_UNIX) as address:
        address.bind(str(tmp_path / "left"))  # and nobody listens
        run = subprocess.run(
            [sys.executable, "-m", "cuq1.serve.engine_process", json.dumps(asdict(EngineOptions(str(NANO), DEVICE)))],
            env=os.environ | {remote_module.SOCKET: str(tmp_path / "left"), remote_module.SECRET: "00"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    assert (run.returncode, run.stdout, run.stderr) == (1, "", "")


def test_a_process_that_dies_is_a_device_that_failed():
    engine = RemoteEngine(EngineOptions(str(NANO), DEVICE))
    engine.prefill(PROMPT)
    stream = engine.decode(DecodeParams(seed=1))
    next(stream)
    os.kill(engine.process.pid, signal.SIGKILL)
    with pytest.raises(DeviceError, match="ended with status -9"):
        list(stream)
    engine.close()


def test_it_ends_with_the_server_and_not_by_signals():
    engine = RemoteEngine(EngineOptions(str(NANO), DEVICE))
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(engine.process.pid, number)  # which arrive before the next message is read
    assert engine.prefill(PROMPT) == 0
    engine._connection.close()  # as when the server is killed
    assert engine.process.wait(20) == 0


@pytest.fixture
def ranks(monkeypatch, capfd):
    """An engine of two ranks, and their process ids by rank."""
    monkeypatch.setattr(remote_module, "PROGRAM", PROGRAM)
    monkeypatch.chdir(ROOT)
    engine = RemoteEngine(EngineOptions(str(NANO), "cuda", tp=2))
    said = ""

    def told():
        nonlocal said
        said += capfd.readouterr().err
        return said.count(" is ") >= 2

    wait_for(told)
    yield engine, {int(rank): int(pid) for rank, pid in re.findall(r"rank (\d) is (\d+)", said)}
    engine.close()


def test_ranks_answer_as_one(ranks):
    engine, pids = ranks
    alone = FakeEngine(0, 1)
    for one in (engine, alone):
        assert one.prefill([1, 2, 3]) == 0
        one.keep_snapshots(1000, 0)
        one.remember("a")
    params = DecodeParams(max_tokens=12, seed=4)
    expected = list(alone.decode(params))
    assert list(engine.decode(params)) == expected
    stream = engine.decode(params)
    next(stream)
    stream.close()
    assert engine.prefill([*engine.tokens, 9]) > 0
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(engine.process.pid, number)  # the server's to act on, here too
    time.sleep(0.2)
    assert len(list(engine.decode(params))) == 12
    engine.close()
    assert engine.process.returncode == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_ends_the_engine(ranks, victim):
    engine, pids = ranks
    ended = []
    engine.watch(lambda: ended.append(time.monotonic()))
    engine.prefill([1, 2, 3])
    stream = engine.decode(DecodeParams(max_tokens=100000, seed=4))
    next(stream)
    begun = time.monotonic()
    os.kill(pids[victim], signal.SIGKILL)
    with pytest.raises((DeviceError, LaunchError), match="ended"):
        list(stream)
    wait_for(lambda: ended)
    assert time.monotonic() - begun < 15
    engine.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())

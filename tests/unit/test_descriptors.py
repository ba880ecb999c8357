"""File descriptors between ranks: who gets them, who does not, and that waits end."""

import fcntl
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cuq1.errors import LaunchError
from cuq1.parallel import descriptors
from tests.paths import ROOT
from tests.unit.test_rendezvous import SECRET, serving, together

WORDS = b"what rank 0 has"


def memory():
    found = os.memfd_create("shared")
    os.write(found, WORDS)
    return found


def pass_on(meeting):
    """What each rank reads through its descriptor, and whether a program that it starts would have it."""
    if meeting.rank == 0:
        descriptor = memory()
        descriptors.hand_out(meeting, "some memory", descriptor)
    else:
        descriptor = descriptors.fetch(meeting, "some memory")
    try:
        return os.pread(descriptor, 100, 0), bool(fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC)
    finally:
        os.close(descriptor)


def offered():
    """Names of sockets that are open for ranks on this machine."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return [name[1:] for line in lines if (name := line.rpartition(" ")[2]).startswith("@cuq1-")]


def open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("world", [1, 2, 5])
def test_every_rank_gets_its_own(world):
    before = open_descriptors()
    with serving(world) as served:
        assert together(served, world, pass_on) == [(WORDS, True)] * world
    assert open_descriptors() == before


OTHER = """
import os, sys
from cuq1.parallel import Rendezvous, descriptors
with Rendezvous(1, 2, sys.argv[1], sys.argv[2]) as meeting:
    descriptor = descriptors.fetch(meeting, "some memory")
    sys.stdout.buffer.write(os.pread(descriptor, 100, 0))
"""


def test_another_process_gets_it():
    with serving(2) as served:
        command = [sys.executable, "-c", OTHER, served.address, SECRET]
        other = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        (mine,) = together(served, 2, pass_on, ranks=[0])
        assert other.communicate(timeout=20)[0] == WORDS
    assert mine == (WORDS, True)


def with_stranger(monkeypatch, say):
    """What ranks get where a stranger comes first and says something: (what the stranger got, results)."""
    got = []

    class Meeting:
        def __init__(self, meeting):
            self.rank, self.world, self._meeting = meeting.rank, meeting.world, meeting

        def broadcast(self, name, data):
            given = self._meeting.broadcast(name, data)
            if self.rank == 1:
                (name,) = offered()
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                    stranger.settimeout(5)
                    stranger.connect(f"\0{name}")
                    if say is not None:
                        stranger.send(say)
                    got.append(socket.recv_fds(stranger, 10, 1)[1])
            return given

    with serving(2) as served:
        results = together(served, 2, lambda meeting: pass_on(Meeting(meeting)))
    return got, results


@pytest.mark.parametrize("say", [b"1 " + b"0" * 64, b"", b"\xff\xfe", b"1", None])
def test_a_stranger_gets_nothing_and_does_not_disturb(monkeypatch, say):
    monkeypatch.setattr(descriptors, "PATIENCE", 0.2)
    got, results = with_stranger(monkeypatch, say)
    assert got == [[]]
    assert results == [(WORDS, True)] * 2


def test_who_knows_the_word_gets_it(monkeypatch):
    """The control: the stranger's way of asking works, but for the word."""
    monkeypatch.setattr(descriptors.hmac, "compare_digest", lambda given, word: True)
    got, results = with_stranger(monkeypatch, b"1 anything")
    assert len(got[0]) == 1
    os.close(got[0][0])
    assert any(isinstance(one, LaunchError) for one in results)


def test_another_user_gets_nothing(monkeypatch):
    monkeypatch.setattr(descriptors, "SECONDS", 0.3)
    real = descriptors._user
    monkeypatch.setattr(descriptors, "_user", lambda connection: real(connection) + 1)
    with serving(2) as served:
        first, second = together(served, 2, pass_on)
    assert "rank 1 did not fetch some memory from rank 0 within 0.3 s" in str(first)
    assert "some memory is offered by another user: rank 0's process has gone" in str(second)


def test_ranks_that_never_fetch_are_named(monkeypatch):
    monkeypatch.setattr(descriptors, "SECONDS", 0.3)
    done = threading.Event()

    def act(meeting):
        if meeting.rank == 0:
            try:
                pass_on(meeting)
            finally:
                done.set()
        else:
            meeting.broadcast("some memory", None)
            done.wait(5)

    with serving(3) as served:
        first, *_ = together(served, 3, act)
    assert str(first) == "ranks 1 and 2 did not fetch some memory from rank 0 within 0.3 s"
    assert offered() == []


def test_nobody_there_and_nothing_sent_are_one_sentence(monkeypatch):
    def act(meeting):
        if meeting.rank == 0:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind("\0cuq1-test-nothing")
                listener.listen()
                meeting.broadcast("first", b'["cuq1-test-nothing", "word"]')
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1000)
                    connection.send(b"+")
                meeting.broadcast("second", b'["cuq1-test-nobody", "word"]')
            return None
        found = []
        for name in ("first", "second"):
            try:
                descriptors.fetch(meeting, name)
            except LaunchError as error:
                found.append(str(error))
        return found

    with serving(2) as served:
        _, (nothing, nobody) = together(served, 2, act)
    assert nothing == "rank 0 did not hand first to rank 1"
    assert nobody.startswith("rank 1 cannot fetch second from rank 0 (Connection refused): both need one host")

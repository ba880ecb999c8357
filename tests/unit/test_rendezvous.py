"""The rendezvous: what ranks get from each other, whom errors name, and who is kept out."""

import re
import selectors
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuq1.errors import LaunchError
from cuq1.parallel import Rendezvous, rendezvous, server
from cuq1.parallel.server import Fault, Server
from cuq1.parallel.wire import MAX_PAYLOAD, PREFIX, Decoder, FrameError, pack, proof

SECRET = "the run's own"


@contextmanager
def serving(world, kind=Server, **limits):
    """A server that another thread drives, as the launcher's loop does."""
    with selectors.DefaultSelector() as selector:
        served = kind(selector, world, SECRET, **{"timeout": 20.0, "heartbeat": 20.0, **limits})
        stop = threading.Event()

        def serve():
            while not stop.is_set():
                for key, mask in selector.select(0.02):
                    key.data(mask)
                served.tick()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield served
        finally:
            stop.set()
            thread.join()
            served.close()


def join(served, rank, world, secret=SECRET, lost=lambda reason: None):
    return Rendezvous(rank, world, served.address, secret, on_lost=lost)


def together(served, world, act, ranks=None):
    """What `act(meeting)` gives on each rank, or its LaunchError, each on a thread of its own."""

    def one(rank):
        try:
            with join(served, rank, world) as meeting:
                return act(meeting)
        except LaunchError as error:
            return error

    ranks = range(world) if ranks is None else ranks
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


def stranger(served):
    """A bare connection, past the challenge."""
    host, port = rendezvous.split_address(served.address)
    sock = socket.create_connection((host, port), timeout=10)
    return sock, next(iter(Decoder(1024, 0).feed(sock.recv(4096)))).header["challenge"]


def hello(challenge, rank, world, secret=SECRET):
    shown = proof(secret, "rank", challenge, "aa", rank, world)
    return pack({"answer": "aa", "rank": rank, "world": world, "proof": shown})


def dropped(sock):
    """Whether the other end closes the connection."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize("world", [1, 2, 5])
def test_ranks_get_each_others_values(world):
    def act(meeting):
        meeting.barrier("start")
        rounds = [meeting.gather("number", bytes([meeting.rank, i])) for i in range(3)]  # a name serves again
        large = meeting.gather("large", bytes([meeting.rank]) * 300_000 * (meeting.rank % 2))
        shared = meeting.broadcast("id", b"\0\xff" if meeting.rank == world - 1 else None)
        empty = meeting.broadcast("empty", b"" if meeting.rank == 0 else None)
        meeting.agree("setup", {"config": "c", "plan": "p"})
        return rounds, [len(one) for one in large], shared, empty

    with serving(world) as served:
        results = together(served, world, act)
        assert served.fault is None
    rounds = [[bytes([rank, i]) for rank in range(world)] for i in range(3)]
    assert results == [(rounds, [300_000 * (rank % 2) for rank in range(world)], b"\0\xff", b"")] * world


def test_a_barrier_holds_everyone_until_the_last_arrives():
    passed = []

    def act(meeting):
        if meeting.rank == 2:
            time.sleep(0.2)
            passed.append("last arrives")
        meeting.barrier("b")
        passed.append(meeting.rank)

    with serving(3) as served:
        together(served, 3, act)
    assert passed[0] == "last arrives"
    assert sorted(passed[1:]) == [0, 1, 2]


def test_ranks_that_disagree_all_hear_key_ranks_and_values():
    with serving(3) as served:
        errors = together(
            served, 3, lambda m: m.agree("setup", {"config": "same", "plan": "b7" if m.rank == 1 else "a0"})
        )
    found = "ranks disagree on 'plan' at 'setup': 'a0' on ranks 0 and 2, 'b7' on rank 1; start all of them alike"
    assert [str(error) for error in errors] == [found] * 3
    with serving(2) as served:
        errors = together(served, 2, lambda m: m.agree("setup", {"dtype": "f16"} if m.rank else {}))
    assert all("'dtype' at 'setup': nothing on rank 0, 'f16' on rank 1" in str(error) for error in errors)


@pytest.mark.parametrize(("givers", "found"), [([], r"\[\]"), ([0, 1], r"\[0, 1\]")])
def test_a_broadcast_has_one_source(givers, found):
    with serving(2) as served:
        errors = together(served, 2, lambda m: m.broadcast("id", b"x" if m.rank in givers else None))
    for error in errors:
        with pytest.raises(LaunchError, match=f"broadcast 'id' needs bytes from one rank, and has .* ranks {found}"):
            raise error


def test_who_did_not_arrive_is_named_and_where_they_are():
    def act(meeting):
        meeting.barrier("other" if meeting.rank == 2 else "loaded")

    with serving(4, timeout=0.6) as served:
        errors = together(served, 4, act, ranks=[0, 1, 2])
    texts = {str(error) for error in errors}
    assert len(texts) == 1
    # whichever call began first is judged first
    assert texts <= {
        "ranks 2 and 3 did not arrive at barrier 'loaded' within 0.6 s; "
        "rank 2 waits at barrier 'other'; rank 3 never joined",
        "ranks 0, 1 and 3 did not arrive at barrier 'other' within 0.6 s; "
        "rank 0 waits at barrier 'loaded'; rank 1 waits at barrier 'loaded'; rank 3 never joined",
    }


def test_the_same_name_for_two_kinds_of_call():
    with serving(2) as served:
        errors = together(served, 2, lambda m: m.barrier("x") if m.rank else m.gather("x", b""))
        assert {str(error) for error in errors} <= {
            "rank 1 is at barrier 'x' where rank 0 is at gather 'x'",
            "rank 0 is at gather 'x' where rank 1 is at barrier 'x'",
        }


def _crash(meeting):
    raise ValueError("no such layer")


def _raw(data):
    return lambda meeting: meeting._connection._socket.sendall(data)


@pytest.mark.parametrize(
    ("act", "stays", "found"),
    [
        (lambda m: None, False, "rank 1 left without arriving at barrier 'b'"),
        (_crash, False, "rank 1 failed: ValueError: no such layer"),
        (lambda m: m.fail("its GPU\nis gone"), True, "rank 1 failed: its GPU is gone"),
        (lambda m: m._connection._socket.shutdown(socket.SHUT_RDWR), True, "rank 1 closed its connection"),
        (_raw(pack({"kind": "?"})), True, r"rank 1 broke the protocol \(a frame of unknown kind\)"),
        (_raw(pack({"kind": "barrier", "name": 5, "call": 1})), True, r"rank 1 broke the protocol \(name is no text"),
        (_raw(b"\xff" * 99), True, r"rank 1 broke the protocol \(a frame of .* too large\)"),
    ],
)
def test_ranks_that_wait_hear_which_rank_failed(act, stays, found):
    heard = threading.Barrier(3 if stays else 2)

    def one(rank):
        try:
            with join(served, rank, 3) as meeting:
                if rank == 1:
                    act(meeting)
                    if stays:
                        heard.wait(20)
                    return None
                try:
                    meeting.barrier("b")
                finally:
                    heard.wait(20)
        except (LaunchError, ValueError) as error:
            return error

    with serving(3) as served, ThreadPoolExecutor(3) as pool:
        results = list(pool.map(one, range(3)))
        assert served.fault.ranks == (1,)
    for rank in (0, 2):
        assert isinstance(results[rank], LaunchError)
        assert re.match(found, str(results[rank]))


class Deaf(Server):
    """Broken on purpose: a rank that falls silent is nobody's fault."""

    def _blame(self, ranks, what, *, silent=False):
        if not silent:
            super()._blame(ranks, what, silent=silent)


def _notices_silence(kind):
    with serving(2, kind=kind, timeout=2.0, heartbeat=0.5) as served:
        sock, challenge = stranger(served)
        with sock:
            sock.sendall(hello(challenge, 1, 2))  # and never a heartbeat
            (error,) = together(served, 2, lambda m: m.barrier("b"), ranks=[0])
    return str(error) == "rank 1 stopped answering: no heartbeat for 0.5 s"


def test_a_silent_rank_is_noticed_and_one_that_beats_is_not():
    assert _notices_silence(Server)
    assert not _notices_silence(Deaf)
    with serving(1, heartbeat=0.5) as served, join(served, 0, 1) as meeting:
        time.sleep(1.2)
        meeting.barrier("still here")


def test_a_launcher_that_was_held_up_blames_nobody():
    with selectors.DefaultSelector() as selector:
        served = Server(selector, 1, SECRET, heartbeat=0.2)
        sock, _ = _accepted(served, selector)
        with sock:
            time.sleep(0.5)  # nothing was read meanwhile
            served.tick()
            assert served.fault is None
            deadline = time.monotonic() + 10
            while served.fault is None and time.monotonic() < deadline:
                time.sleep(0.02)
                served.tick()
        assert served.fault == Fault("rank 0 stopped answering: no heartbeat for 0.2 s", (0,), silent=True)
        served.close()


def _accepted(served, selector):
    host, port = rendezvous.split_address(served.address)
    sock = socket.create_connection((host, port), timeout=10)
    decoder, challenge = Decoder(1024, 0), None
    while not served._joined:
        for key, mask in selector.select(0.05):
            key.data(mask)
        if challenge is None:
            challenge = next(iter(decoder.feed(sock.recv(4096)))).header["challenge"]
            sock.sendall(hello(challenge, 0, 1))
    return sock, challenge


def test_a_wrong_secret_is_kept_out_and_disturbs_nobody(monkeypatch):
    with serving(2) as served:
        with pytest.raises(LaunchError, match="rank 1 do not share a secret"):
            join(served, 1, 2, secret="another run's")
        assert together(served, 2, lambda m: m.gather("g", b"x")) == [[b"x", b"x"]] * 2
    # without the server's check the wrong secret would be in
    monkeypatch.setattr(server, "proven", lambda given, expected: True)
    with serving(2) as served:
        with pytest.raises(LaunchError, match="do not share a secret"):  # the rank does not trust that launcher
            join(served, 1, 2, secret="another run's")
        assert served._joined.keys() == {1}


def test_the_secret_does_not_travel_and_a_proof_serves_once():
    sent = []
    with serving(2) as served:
        first, challenge = stranger(served)
        with first:
            proven = hello(challenge, 0, 2)
            sent.append(proven)
            second, other = stranger(served)
            with second:
                assert other != challenge
                second.sendall(proven)  # as one would who had listened
                assert dropped(second)
            first.sendall(proven)
            sent.append(first.recv(4096))
        assert b"welcome" in sent[1]
    assert not any(SECRET.encode() in data for data in sent)


@pytest.mark.parametrize(
    ("rank", "world", "found"), [(1, 3, "rank 1 of 3 is not of this run of 2"), (0, 2, "rank 0 has joined already")]
)
def test_ranks_that_are_not_of_the_run(rank, world, found):
    with serving(2) as served, join(served, 0, 2):
        with pytest.raises(LaunchError, match=f"the launcher refuses this rank: {found}"):
            join(served, rank, world)
        assert served.fault is None


GARBAGE = {
    "noise": b"GET / HTTP/1.1\r\n\r\n",
    "header too large": PREFIX.pack(1 << 20, 0),
    "payload too large": PREFIX.pack(2, 1) + b"{}x",
    "no JSON": PREFIX.pack(3, 0) + b"\xff{}",
    "no object": PREFIX.pack(2, 0) + b"[]",
    "deep": PREFIX.pack(1000, 0) + b"[" * 1000,
    "no proof": pack({"answer": "aa", "rank": 0, "world": 2}),
    "proof of another kind": pack({"answer": "aa", "rank": True, "world": 2, "proof": 1}),
    "no text": pack({"answer": "aa", "rank": 0, "world": 2, "proof": "\ud800"}),
    "a call": pack({"kind": "barrier", "name": "b", "call": 1}),
}


def test_garbage_is_dropped_without_disturbing_the_run():
    with serving(2) as served:
        with join(served, 0, 2) as first:
            for name, data in GARBAGE.items():
                sock, _ = stranger(served)
                with sock:
                    sock.sendall(data)
                    assert dropped(sock), name
            half, _ = stranger(served)
            with half:
                half.sendall(PREFIX.pack(100, 0) + b"{")  # and no more
                with ThreadPoolExecutor(1) as pool:
                    other = pool.submit(together, served, 2, lambda m: m.gather("g", b"1"), [1])
                    assert first.gather("g", b"0") == [b"0", b"1"]
                    assert other.result() == [[b"0", b"1"]]
        assert served.fault is None


def test_strangers_are_few_and_do_not_stay(monkeypatch):
    monkeypatch.setattr(server, "HELLO_SECONDS", 0.3)
    with serving(1) as served:
        sock, _ = stranger(served)
        with sock:
            assert dropped(sock)
    monkeypatch.setattr(server, "HELLO_SECONDS", 60.0)
    monkeypatch.setattr(server, "MAX_STRANGERS", 3)
    with serving(1) as served:
        waiting = [stranger(served)[0] for _ in range(4)]
        assert dropped(waiting[0])
        assert together(served, 1, lambda m: m.barrier("b")) == [None]
        for sock in waiting:
            sock.close()


def test_a_stranger_that_is_dropped_while_it_speaks(monkeypatch):
    monkeypatch.setattr(server, "MAX_STRANGERS", 1)
    with selectors.DefaultSelector() as selector:
        served = Server(selector, 1, SECRET)
        address = rendezvous.split_address(served.address)
        with socket.create_connection(address) as first:
            for key, mask in selector.select(10):
                key.data(mask)
            with socket.create_connection(address):
                first.sendall(b"x")
                until = time.monotonic() + 10
                while len(events := selector.select(0.05)) < 2:
                    assert time.monotonic() < until
                # the listener first, whose newcomer takes the speaker's place
                for key, mask in sorted(events, key=lambda event: event[0].fileobj is not served._listener):
                    key.data(mask)
        assert len(served._strangers) == 1
        served.close()


def test_a_port_already_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken, selectors.DefaultSelector() as selector:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"cannot listen on 127.0.0.1:{port} .*give another --address"):
            Server(selector, 1, SECRET, port=port)


def test_a_launcher_that_goes_away_is_noticed():
    lost = []
    with serving(2) as served:
        meeting = join(served, 0, 2, lost=lost.append)
        waiting = ThreadPoolExecutor(1)
        call = waiting.submit(meeting.barrier, "b")
    with pytest.raises(LaunchError, match="the launcher closed the connection"):
        call.result(20)
    meeting.close()
    assert lost == ["the launcher closed the connection"]
    waiting.shutdown()


def test_a_launcher_that_falls_silent_is_noticed():
    lost = threading.Event()
    with selectors.DefaultSelector() as selector:
        served = Server(selector, 1, SECRET, heartbeat=0.2)
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(join, served, 0, 1, SECRET, lambda reason: lost.set())
            while not joined.done():
                for key, mask in selector.select(0.02):
                    key.data(mask)
        assert lost.wait(20)  # nobody serves any more
        joined.result().close()
        served.close()


def test_what_does_not_fit_is_refused_before_it_is_sent():
    with serving(1) as served, join(served, 0, 1) as meeting:
        with pytest.raises(LaunchError, match="has a name of 1 characters and 1048577 bytes: at most 200 and 1048576"):
            meeting.gather("g", bytes(MAX_PAYLOAD + 1))
        with pytest.raises(LaunchError, match="has a name of 201 characters"):
            meeting.barrier("n" * 201)
        assert meeting.gather("g", bytes(MAX_PAYLOAD)) == [bytes(MAX_PAYLOAD)]
        meeting.close()
        with pytest.raises(LaunchError, match="rank 0 is at barrier 'b' after it left"):
            meeting.barrier("b")


@pytest.mark.parametrize("address", ["", "1234", ":1234", "host:", "host:x", "host:65536", "host:²"])
def test_addresses_are_host_and_port(address):
    with pytest.raises(LaunchError, match="is no rendezvous address: give host:port"):
        rendezvous.split_address(address)
    assert rendezvous.split_address("[::1]:80") == ("::1", 80)


def test_the_environment_is_checked(monkeypatch):
    for name in (rendezvous.RANK, rendezvous.WORLD, rendezvous.ADDRESS, rendezvous.SECRET):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(LaunchError, match="CUQ1_RANK is not set: start this program with cuq1-launch"):
        Rendezvous()
    monkeypatch.setenv("CUQ1_RANK", "one")
    with pytest.raises(LaunchError, match="CUQ1_RANK is 'one', which is no number"):
        Rendezvous()
    monkeypatch.setenv("CUQ1_RANK", "2")
    monkeypatch.setenv("CUQ1_WORLD", "2")
    with pytest.raises(LaunchError, match="rank 2 of 2 is impossible"):
        Rendezvous()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(LaunchError, match=f"no rendezvous at 127.0.0.1:{port} .*is the launcher running"):
        Rendezvous(0, 1, f"127.0.0.1:{port}", SECRET)


@given(st.lists(st.tuples(st.dictionaries(st.text(), st.integers()), st.binary(max_size=30)), max_size=4), st.data())
def test_frames_survive_any_cut(frames, data):
    stream, decoder, found = b"".join(pack(*frame) for frame in frames), Decoder(1 << 16, 30), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += [(frame.header, frame.payload) for frame in decoder.feed(stream[:size])]
        stream = stream[size:]
    assert found == frames
    with pytest.raises(FrameError, match="too large"):
        list(Decoder(10, 30).feed(pack({}, bytes(31))))

"""One engine on several ranks, over real connections: what rank 0 leads, the others do, and what ends them all."""

import random
import threading
import time
from itertools import pairwise

import numpy as np
import pytest

from cuq1.errors import DeviceError, LaunchError, RequestError
from cuq1.parallel import follow as module
from cuq1.parallel.commands import PIECE, Channel
from cuq1.parallel.follow import Leader, follow
from cuq1.sampling import DecodeParams
from tests.unit.fake_ranks import SEGMENT, VOCAB, FakeEngine
from tests.unit.test_rendezvous import serving, together


def led(act, world=2, device=False, prepare=lambda engine: None):
    """What `act(leader)` returns or raises, what the others raised, and all engines in the order of ranks."""
    engines, chains = {}, {}

    def one(meeting):
        engine = engines[meeting.rank] = FakeEngine(meeting.rank, world, chains, device)
        prepare(engine)
        try:
            if meeting.rank:
                follow(engine, meeting)
                return None
            with Leader(engine, meeting) as leader:
                return act(leader)
        except (LaunchError, DeviceError, RequestError, KeyboardInterrupt) as error:
            meeting.fail(str(error))
            return error

    with serving(world) as server:
        results = together(server, world, one)
    return results, [engines[rank] for rank in range(world)]


def flat(stream):
    return [token for step in stream for token in step]


def alone(act):
    """The same on one engine that nobody follows."""
    with FakeEngine(0) as engine:
        return act(engine)


@pytest.mark.parametrize("world", [2, 3])
def test_every_call_is_made_on_every_rank_in_the_same_order(world):
    def act(engine):
        first = engine.prefill([1, 2, 3, 4], chunk=2)
        scores = engine.score([5, 6]).shape
        whole = flat(engine.decode(DecodeParams(max_tokens=6, seed=3)))
        engine.rewind(6)
        rows = engine.verified_rows([7, 8], 6).shape
        again = engine.prefill([1, 2, 3, 4, 9])
        return first, scores, whole, rows, again, flat(engine.decode()), engine.tokens[:8]

    results, engines = led(act, world)
    assert results[1:] == [None] * (world - 1)
    expected = alone(lambda engine: act(engine)[:5])
    assert results[0][:5] == expected
    assert all(engine.calls == engines[0].calls for engine in engines)
    assert all(engine.tokens == engines[0].tokens for engine in engines)
    assert ("prefill", 4, 2) in engines[1].calls
    assert ("verified_rows", (7, 8), 6) in engines[1].calls
    assert engines[1].calls[-1] == ("close",)


class Multiples:
    """Allows multiples of 7, and everything after a multiple of 3; `error` is raised after `after` tokens."""

    def __init__(self, error=None, after=3):
        self.tokens, self.error, self.after = [], error, after

    def allowed(self):
        if self.error is not None and len(self.tokens) == self.after:
            raise self.error
        if self.tokens and self.tokens[-1] % 3 == 0:
            return None
        return np.arange(VOCAB) % 7 == 0

    def push(self, token):
        self.tokens.append(token)


@pytest.mark.parametrize("world", [2, 3])
def test_a_mask_is_rank_0s_and_counts_on_all(world):
    mask = Multiples()

    def act(leader):
        leader.prefill([1, 2, 3])
        one = flat(leader.decode(DecodeParams(max_tokens=40, seed=1), mask=mask))
        leader.prefill([1, 2, 3])
        other = flat(leader.decode(DecodeParams(max_tokens=40, seed=1)))
        leader.prefill([4])
        stream = leader.decode(DecodeParams(max_tokens=40, seed=1), mask=Multiples())
        some = [next(stream), next(stream)]
        leader.rewind(2)
        return one, other, some

    results, engines = led(act, world)
    assert results[1:] == [None] * (world - 1)
    one, other, _ = results[0]
    assert one == mask.tokens
    assert one != other
    assert any(token % 7 for token in one)
    assert all(token % 7 == 0 or before % 3 == 0 for before, token in pairwise([1, *one]))
    assert all(engine.calls == engines[0].calls and engine.tokens == engines[0].tokens for engine in engines)


def test_snapshots_are_every_ranks():
    """As many bytes of its GPU as rank 0 can spare, and the host's shared out."""

    def act(leader):
        leader.keep_snapshots(5000, 3000)
        leader.prefill([1, 2, 3])
        leader.remember("mine", turn=False)

    results, engines = led(act, 3)
    assert results == [None] * 3
    assert all(engine.calls == engines[0].calls for engine in engines)
    assert engines[1].calls[0] == ("keep_snapshots", 1000, 1000)
    assert engines[2].calls[3] == ("remember", "mine", False, 3)


def test_a_mask_that_fails_ends_its_request_alone():
    def act(leader):
        leader.prefill([1, 2, 3])
        with pytest.raises(RequestError, match="too complex"):
            flat(leader.decode(DecodeParams(max_tokens=40, seed=1), mask=Multiples(RequestError("too complex"))))
        held = leader.tokens
        leader.prefill([5, 6])
        return held, flat(leader.decode(DecodeParams(max_tokens=5, seed=2)))

    results, engines = led(act, 3)
    assert results[1:] == [None, None]
    assert len(results[0][0]) == 3 + 3
    assert results[0][1] == alone(
        lambda engine: (engine.prefill([5, 6]), flat(engine.decode(DecodeParams(max_tokens=5, seed=2))))[1]
    )
    assert all(engine.calls == engines[0].calls and engine.tokens == engines[0].tokens for engine in engines)


def test_a_fresh_seed_is_rank_0s():
    results, engines = led(lambda leader: (leader.prefill([1]), flat(leader.decode(DecodeParams(max_tokens=20))))[1])
    assert engines[1].tokens[1:] == tuple(results[0])


def test_what_rank_0_can_refuse_no_other_rank_hears_of():
    def act(leader):
        leader.prefill([1, 2, 3])
        refused = 0
        for call in (
            lambda: leader.prefill([]),
            lambda: leader.prefill([5000]),
            lambda: leader.prefill(["a"]),
            lambda: leader.prefill([1], chunk="many"),
            lambda: leader.rewind("all"),
            lambda: leader.score([-1]),
            lambda: leader.decode("greedy"),
            lambda: leader.decode(DecodeParams(draft=3)),
        ):
            with pytest.raises(RequestError):
                call()
            refused += 1
        return refused, flat(leader.decode(DecodeParams(max_tokens=3, seed=1)))

    results, engines = led(act)
    assert results[0][0] == 8
    assert engines[0].calls == engines[1].calls
    assert engines[0].tokens == engines[1].tokens


def test_what_all_ranks_refuse_alike_ends_nothing():
    def act(leader):
        leader.prefill(range(100))
        with pytest.raises(RequestError, match="rings"):
            leader.rewind(10)
        with pytest.raises(RequestError, match="outside"):
            leader.rewind(1000)
        with pytest.raises(RequestError, match="chunk"):
            leader.prefill([1], chunk=0)
        return flat(leader.decode(DecodeParams(max_tokens=3, seed=1)))

    results, engines = led(act)
    assert len(results[0]) == 3
    assert results[1] is None
    assert engines[0].tokens == engines[1].tokens


def test_commands_of_any_size():
    ids = [number % 1000 for number in range(390_000)]

    def act(leader):
        leader.prefill(ids)
        return len(leader.tokens)

    results, engines = led(act)
    assert results == [len(ids), None]
    assert engines[1].tokens == tuple(ids)
    text = "x" * (PIECE - len('{"command": "n", "text": ""}'))  # exactly one piece, and one more byte
    for extra in ("", "y"):

        def talk(meeting, extra=extra):
            channel = Channel(meeting)
            return channel.send("n", text=text + extra) if channel.leads else channel.receive()["text"]

        with serving(2) as served:
            assert together(served, 2, talk) == [None, text + extra]


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("read", [1, 2, 4, 5, 6, 7, 30])
def test_a_request_that_is_left_ends_on_all_ranks_alike(device, read):
    """Whatever the others' devices have done beyond what rank 0 has read is taken back."""

    def act(leader):
        leader.prefill([1, 2, 3])
        stream = leader.decode(DecodeParams(max_tokens=40, seed=5))
        begun = [next(stream).tokens[0] for _ in range(read)]
        time.sleep(0.05)  # the others go on
        stream.close()
        held = leader.tokens
        assert held == (1, 2, 3, *begun)
        return held, flat(leader.decode(DecodeParams(max_tokens=7, seed=6)))

    results, engines = led(act, 3, device)
    assert not isinstance(results[0], Exception), results
    assert results[1:] == [None, None]
    assert {engine.tokens for engine in engines} == {(*results[0][0], *results[0][1])}
    stepped, _ = led(act, 3, device=False)
    assert results[0] == stepped[0]


def test_a_device_that_paused_is_launched_again_by_all_ranks_together():
    """Nobody launches before rank 0 asks for the next round, however long that takes."""
    seen = []

    def act(leader):
        leader.prefill([1])
        stream = leader.decode(DecodeParams(max_tokens=3 * SEGMENT, seed=2))
        for _ in range(SEGMENT):
            next(stream)
        time.sleep(0.2)
        (chain,) = leader._engine.chains.values()
        seen.append((list(chain.launched), list(chain.read)))
        return flat(stream)

    results, engines = led(act, 2, device=True)
    assert seen == [([1, 1], [SEGMENT, SEGMENT])]
    assert len(results[0]) == 2 * SEGMENT
    assert engines[0].tokens == engines[1].tokens


def test_random_conversations():
    """Requests of random length, cut anywhere, on both kinds of loop: ranks stay equal, and so do loops."""

    def act(leader):
        rng = random.Random(4)
        leader.prefill([rng.randrange(1000) for _ in range(20)])
        for number in range(60):
            stream = leader.decode(DecodeParams(max_tokens=rng.randrange(1, 14), seed=number))
            for _, step in zip(range(rng.randrange(16)), stream, strict=False):
                assert len(step) == 1
            match rng.randrange(4):
                case 0:
                    stream.close()
                case 1:
                    leader.rewind(len(leader.tokens) - rng.randrange(3))
                case 2:
                    leader.prefill([*leader.tokens, rng.randrange(1000)])
        return leader.tokens

    found = [led(act, 3, device) for device in (False, True)]
    for results, engines in found:
        assert results[1:] == [None, None], results
        assert {engine.tokens for engine in engines} == {results[0]}
    assert found[0][0] == found[1][0]


@pytest.mark.parametrize("device", [False, True])
def test_whatever_comes_next_ends_what_is_running(device):
    def act(leader):
        leader.prefill([1, 2])
        old = leader.decode(DecodeParams(max_tokens=30, seed=1))
        next(old)
        leader.score([3])
        with pytest.raises(RequestError, match="this request ended"):
            next(old)
        never = leader.decode(DecodeParams(max_tokens=30, seed=1))
        new = leader.decode(DecodeParams(max_tokens=4, seed=2))
        with pytest.raises(RequestError, match="this request ended"):
            next(never)
        return flat(new)

    results, engines = led(act, 2, device)
    assert len(results[0]) == 4
    assert engines[0].tokens == engines[1].tokens


@pytest.mark.parametrize("call", ["prefill", "score", "first round", "later round"])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_one_rank_is_every_ranks(rank, call):
    said = "a value that is not finite appeared in o_proj of layer 3"

    def act(leader):
        engines = leader._engine
        if call not in ("first round", "later round"):
            leader.prefill([1, 2]) if call == "prefill" else leader.score([1])
            leader.score([1])
            leader.score([1])  # the other's failure comes at the next call
        leader.prefill([1, 2])
        for _ in leader.decode(DecodeParams(max_tokens=9, seed=1)):
            pass
        return engines

    def prepare(engine):
        if engine.rank == rank:
            wanted = {"prefill": "catch up", "score": "score", "first round": "catch up", "later round": "round"}[call]
            compute = engine.compute

            def failing(name, *values):
                compute(name, *values)
                if name == wanted:
                    raise DeviceError(said)

            engine.compute = failing

    results, engines = led(act, 3, prepare=prepare)
    assert isinstance(results[rank], DeviceError)
    for other in {0, 1, 2} - {rank}:
        assert isinstance(results[other], LaunchError)
        assert str(results[other]) == f"rank {rank} failed: {said}"
    assert all(engine.abandoned is not None for engine in engines)
    assert all(("close",) not in engine.calls for engine in engines)  # which ranks would have to do together


def test_after_an_error_rank_0s_engine_refuses():
    def act(leader):
        leader.prefill([1])
        leader._engine.fault = DeviceError("the GPU fell off")
        with pytest.raises(DeviceError):
            leader.score([1])
        for call in (lambda: leader.score([1]), leader.decode, lambda: leader.prefill([1])):
            with pytest.raises(RequestError, match=r"has ended \(the GPU fell off\)"):
                call()
        raise DeviceError("the GPU fell off")

    results, _ = led(act)
    assert isinstance(results[1], LaunchError)


def test_an_interrupt_within_a_round_ends_the_engine():
    def act(leader):
        leader.prefill([1])
        stream = leader.decode(DecodeParams(max_tokens=9, seed=1))
        next(stream)
        leader._engine.fault = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            next(stream)
        held = leader.tokens
        leader.close()  # without waiting for anybody
        assert held == (1, *held[1:])
        raise KeyboardInterrupt

    results, engines = led(act)
    assert isinstance(results[1], LaunchError)
    assert ("close",) not in engines[0].calls


@pytest.mark.parametrize("fault", ["counts", "never takes back", "another token", "skips a call"])
def test_a_rank_that_is_elsewhere_is_found_out(fault):
    """The controls: equality of ranks is not for nothing."""

    def act(leader):
        leader.prefill([1, 2, 3])
        stream = leader.decode(DecodeParams(max_tokens=9, seed=1))
        next(stream)
        time.sleep(0.05)
        stream.close()
        leader.rewind(2)
        leader.prefill([1, 2, 7])
        return leader.tokens

    def prepare(engine):
        if engine.rank != 1:
            return
        if fault == "counts":
            engine._catch_up = lambda chunk: setattr(engine, "_done", len(engine._tokens) - 1)
        elif fault == "never takes back":
            engine.take_back = lambda length: None
        elif fault == "another token":
            engine.token = lambda seed: 999
        else:
            engine.rewind = lambda length: None

    results, _ = led(act, 2, device=fault == "never takes back", prepare=prepare)
    assert isinstance(results[1], LaunchError), results
    assert "rank 1 is not where rank 0 is" in str(results[1])
    assert str(results[0]).startswith("rank 1 failed: rank 1 is not where rank 0 is")


def test_a_leader_that_does_not_say_that_the_device_goes_on_is_found_out(monkeypatch):
    """The control: without the step after a pause, the ranks' devices would wait for each other."""
    send = Leader._send
    monkeypatch.setattr(Leader, "_send", lambda self, name, **more: name == "step" or send(self, name, **more))
    monkeypatch.setattr(threading.Condition, "wait_for", _impatient(threading.Condition.wait_for))

    def act(leader):
        leader.prefill([1])
        with pytest.raises(AssertionError, match="waits for a peer's launch"):
            flat(leader.decode(DecodeParams(max_tokens=2 * SEGMENT, seed=1)))
        raise DeviceError("as expected")

    results, _ = led(act, 2, device=True)
    assert isinstance(results[0], DeviceError)


def _impatient(wait_for):
    """The chain's waits, shortened."""
    return lambda self, predicate, timeout=None: wait_for(self, predicate, 0.5 if timeout == 5 else timeout)


def test_rank_0_may_take_its_time_and_the_others_may_not():
    """Commands are waited for without a limit; a rank that does not come to hear one is named."""

    def slow(meeting):
        if meeting.rank == 0:
            time.sleep(1.0)
        channel = Channel(meeting)
        return channel.send("late") if channel.leads else channel.receive()["command"]

    with serving(2, timeout=0.3) as served:
        assert together(served, 2, slow) == [None, "late"]
        assert served.fault is None

    def deaf(meeting):
        if meeting.rank == 1:
            time.sleep(1.5)
            return None
        return Channel(meeting).send("anybody?")

    with serving(2, timeout=0.3) as served:
        results = together(served, 2, deaf)
        assert "rank 1 did not arrive at command 'command' within 0.3 s" in str(results[0])


def test_a_program_that_ends_without_closing_lets_the_others_go(monkeypatch):
    registered = []
    monkeypatch.setattr(module.atexit, "register", registered.append)
    monkeypatch.setattr(module.atexit, "unregister", lambda function: None)

    def act(leader):
        leader.prefill([1, 2])
        (ending,) = registered
        ending()
        ending()
        return leader.tokens

    results, engines = led(act)
    assert results == [(1, 2), None]
    assert all(engine.calls[-1] == ("close",) for engine in engines)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_can_have_told_its_user(rank):
    def act(meeting):
        if meeting.rank == rank:
            meeting.fail("it is told", told=True)
        meeting.barrier("never")

    with serving(2) as served:
        results = together(served, 2, act)
        assert served.fault.told == (rank == 0)
    assert str(results[1 - rank]) == f"rank {rank} failed: it is told"

"""The decode loop's host side: the log's reader, and the loop against a device that is played here."""

import ctypes
import subprocess
import sys
from types import SimpleNamespace

import pytest

from cuq1.cuda import abi
from cuq1.cuda import loop as module
from cuq1.cuda.log import ResultLog, describe
from cuq1.cuda.loop import DeviceLoop
from cuq1.engine import open_engine
from cuq1.errors import DeviceError, RequestError
from cuq1.models import loop as plans
from cuq1.sampling import DecodeParams
from tests.kernels.twins import control
from tests.paths import NANO, ROOT


class Ring:
    """The device's side of a log, alone."""

    def __init__(self):
        self.mirror = abi.Mirror()
        self.loop = abi.Loop()
        self.log = ResultLog(self.mirror)

    def write(self, index):
        record = abi.Record()
        record.index = index
        control.append(self.mirror, self.loop, record)


def test_records_come_in_order_over_many_laps():
    ring = Ring()
    for lap in range(5):
        for i in range(abi.LOG_RECORDS - lap):
            ring.write(1000 * lap + i)
        for i in range(abi.LOG_RECORDS - lap):
            assert ring.log.next().index == 1000 * lap + i
        assert ring.log.next() is None
        assert ring.mirror.read == ring.loop.written == ring.log.read


def test_a_record_that_is_not_whole_is_none():
    """Each word alone, old or torn, keeps the record back."""
    ring = Ring()
    ring.write(7)
    whole = list(ring.mirror.log[0])
    for word in range(abi.GRAPHS):
        for number in (0, 2):
            ring.mirror.log[0][word] = number << 32 | (whole[word] & 0xFFFFFFFF)
            assert ring.log.next() is None
        ring.mirror.log[0][word] = whole[word]
    assert ring.log.next().index == 7


def test_a_record_of_the_lap_before_is_none():
    ring = Ring()
    for i in range(abi.LOG_RECORDS):
        ring.write(i)
        ring.log.next()
    assert ring.log.next() is None


def test_numbers_wrap():
    ring = Ring()
    ring.log.read = ring.loop.written = 0xFFFFFFFE
    for i in range(3):
        record = abi.Record()
        record.index = i
        words = memoryview(bytes(record)).cast("I")
        number = (ring.log.read + 1) & 0xFFFFFFFF
        for j, word in enumerate(words):
            ring.mirror.log[ring.log.read % abi.LOG_RECORDS][j] = number << 32 | word
        assert ring.log.next().index == i


def test_rows_and_depths_of_requests():
    assert [list(plans.rows_for(most, auto=True)) for most in range(8)] == [
        [1], [2], [3], [4], [4, 5], [4, 5, 6], [4, 5, 6, 7], [4, 5, 6, 7, 8],
    ]  # fmt: skip
    assert [plans.depths_within(most, auto=True) for most in range(8)] == [0, 1, 2, 3, 3, 3, 3, 3]
    assert [list(plans.rows_for(most, auto=False)) for most in range(8)] == [[rows] for rows in range(1, 9)]
    assert [plans.depths_within(most, auto=False) for most in range(8)] == list(range(8))


class Device:
    """Plays the graphs of a DeviceLoop: a launch runs rounds at once, until a record has a reason.

    script: for each round the number of accepted drafts; drafts: made after each round. `taking`: rounds to run per
    look of the host, as a device does that runs beside it (None: as many as go).
    """

    def __init__(self, monkeypatch, drafts=7, accept=3, per_look=None, auto=True, short_context=500):
        self.drafts, self.accept, self.per_look, self.auto = drafts, accept, per_look, auto
        self.state, self.loop = abi.State(), abi.Loop()
        self.launched = []
        self.current = None
        self.met = []
        self.fault = self.refused = 0
        self.dead = False
        self.runtime = SimpleNamespace(
            stream=0,
            addresses={},
            lost="",
            model=SimpleNamespace(capacity=10_000, short_context=short_context),
            program=lambda plan: SimpleNamespace(issue=lambda stream: None, plan=plan),
            send=self._send,
            copy=self._copy,
            check_alive=self._check_alive,
            wait=lambda: None,
            meet=lambda: self.met.append(len(self.launched)),
        )
        monkeypatch.setattr(module, "Mapped", Memory)
        monkeypatch.setattr(module, "let_go", lambda: self.launched.append("let go"))
        monkeypatch.setattr(module, "POLL", 0)
        monkeypatch.setattr(module, "_QUERY", 1)
        for name in ("first_of", "round_of", "depth_of"):
            monkeypatch.setattr(plans, name, lambda *args, _name=name, **more: (_name, args[1:], more))
        monkeypatch.setattr(module.graph, "capture", Capture)
        monkeypatch.setattr(module.graph, "busy", lambda stream: self._look())
        monkeypatch.setattr(module.graph, "synchronize", lambda stream: None)
        Capture.device = self
        self.made = DeviceLoop(self.runtime, drafts, timeout=0.2)
        self.mirror = abi.Mirror.from_address(self.runtime.addresses["mirror"])

    def _check_alive(self):
        if self.runtime.lost:
            raise DeviceError(self.runtime.lost)

    def _send(self, state):
        ctypes.memmove(ctypes.addressof(self.state), ctypes.addressof(state), ctypes.sizeof(state))

    def _copy(self, name, source, size):
        assert name == "loop"
        ctypes.memmove(ctypes.addressof(self.loop), source, size)

    def launch(self, key):
        assert self.current is None, "a graph was launched while another ran"
        self.launched.append(key)
        self.current = key
        self._run(self.per_look)

    def _look(self):
        self._run(self.per_look)
        return self.current is not None and not self.dead

    def _run(self, rounds):
        while self.current is not None and not self.dead and (rounds is None or rounds > 0):
            self._round()
            rounds = None if rounds is None else rounds - 1

    def _round(self):
        """One graph: State as accept and draft_sample leave it, then the control's twin until the round is over."""
        state = self.state
        kind, rows = self.current[0], self.current[1]
        if kind == "first":
            count, drafted = 1, 0
        else:
            assert rows == state.drafts + 1
            drafted = state.drafts
            count = min(self.accept, drafted) + 1
            state.done += count
        state.log_count, state.log_drafted, state.log_accepted = count, drafted, count - 1
        for i in range(count):  # the token at a position is its number
            state.log_tokens[i] = state.done - count + 1 + i
        limit = state.draft_limit
        for depth in range(abi.ROWS):
            state.depth_rows[depth] = int(depth < limit)
        made = plans.depths_within(limit, auto=bool(state.auto_depth))
        state.drafts = made
        following, record = control.decide(self.loop, state, self.mirror, made, self.fault, self.refused)
        while record is None:
            assert following == ("depth", made)
            made += 1
            state.drafts = made
            following, record = control.decide(self.loop, state, self.mirror, made, self.fault, self.refused)
        self.current = following

    def start(self, budget=100, stops=(), taken=10, room=64, limit=None):
        state = abi.State()
        state.draft_limit, state.done = self.drafts if limit is None else limit, taken
        state.auto_depth = int(self.auto)
        self.made.start(state, budget, stops, taken, room)

    def read(self, most=10_000):
        """Tokens and the reason, as an engine reads them."""
        tokens = []
        for _ in range(most):
            record = self.made.next()
            tokens += record.tokens[: record.count]
            if record.reason not in (abi.END_NONE, abi.END_PAUSED):
                return tokens, record.reason
            self.made.log.take(10 + len(tokens))
        return tokens, None


class Memory:
    def __init__(self, size):
        self._memory = ctypes.create_string_buffer(size)
        self.address = ctypes.addressof(self._memory)

    def close(self):
        self.address = 0


class Capture:
    """cuq1.cuda.graph's, of graphs that the device plays."""

    device = None
    handles = 0

    def __init__(self, stream):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def instantiate(self, *, device):
        assert device
        return Played()


class Played:
    def __init__(self):
        Capture.handles += 1
        self.handle = Capture.handles
        self.closed = False

    def upload(self, stream):
        pass

    def launch(self, stream):
        device = Capture.device
        device.launch(next(key for key, ready in device.made._graphs.items() if ready is self))

    def close(self):
        self.closed = True


@pytest.mark.parametrize("auto", [True, False])
@pytest.mark.parametrize("per_look", [None, 1, 3])
@pytest.mark.parametrize("drafts", [0, 1, 2, 3, 5, 7])
def test_a_request_runs_to_its_budget(monkeypatch, drafts, per_look, auto):
    device = Device(monkeypatch, drafts=drafts, per_look=per_look, auto=auto)
    for budget in (1, 2, 7, 8, 9, 100, 700):
        device.start(budget=budget)
        assert device.read() == (list(range(10, 10 + budget)), abi.END_LENGTH)
        assert not device.made.running


@pytest.mark.parametrize("ending", [{"budget": 33}, {"stops": (27,)}])
def test_nothing_more_is_drafted_where_the_request_ends(monkeypatch, ending):
    device = Device(monkeypatch)
    device.start(**ending)
    device.read()
    rounds = device.loop.index
    assert rounds > 3
    later = rounds - 1
    assert list(device.loop.ran) == [0, 0, 0, rounds, later, later, later, later]


def test_the_device_never_gets_further_ahead_than_allowed(monkeypatch):
    device = Device(monkeypatch, accept=7)
    device.start(budget=1000)
    first = device.made.next()
    unread = device.state.done + 1 - (10 + first.count)
    assert 30 < unread <= 64 - abi.ROWS
    tokens, reason = device.read()
    assert [*first.tokens[:1], *tokens] == list(range(10, 1010))
    assert reason == abi.END_LENGTH
    assert device.made.resumed > 10


def test_a_full_log_pauses_and_nothing_is_lost(monkeypatch):
    device = Device(monkeypatch, drafts=0)
    device.start(budget=3000, room=module.UNBOUNDED)
    assert device.loop.written == abi.LOG_RECORDS
    assert device.read() == (list(range(10, 3010)), abi.END_LENGTH)
    assert device.made.resumed == 3000 // abi.LOG_RECORDS


def test_a_log_that_is_overwritten_would_be_seen(monkeypatch):
    """The control: a device that never pauses."""
    device = Device(monkeypatch, drafts=0)
    monkeypatch.setattr(abi, "END_PAUSED", abi.END_NONE)
    device.start(budget=1000, room=module.UNBOUNDED)
    with pytest.raises(DeviceError):
        device.read()


@pytest.mark.parametrize("at", range(1, 30))
def test_stop_tokens_at_every_offset(monkeypatch, at):
    device = Device(monkeypatch)
    device.start(stops=(5, 3000, 10 + at))
    assert device.read() == (list(range(10, 11 + at)), abi.END_STOP)


def test_a_stop_token_beyond_the_budget_is_not_seen(monkeypatch):
    device = Device(monkeypatch)
    device.start(stops=(13,), budget=3)
    assert device.read() == ([10, 11, 12], abi.END_LENGTH)
    device.start(stops=(12,), budget=3)
    assert device.read() == ([10, 11, 12], abi.END_STOP)


def test_draining_gives_what_was_not_read_and_ends_the_chain(monkeypatch):
    device = Device(monkeypatch, per_look=1)
    device.start(budget=100_000, room=module.UNBOUNDED)
    for _ in range(3):
        device.made.next()
    seen = []
    while (record := device.made.drain()) is not None:
        seen.append(record)
    assert seen[-1].reason == abi.END_CANCELLED
    assert device.current is None
    assert device.made.drain() is None
    device.start()  # and the next request finds nothing of it
    assert device.read()[0] == list(range(10, 110))


def test_draining_a_paused_chain_launches_nothing(monkeypatch):
    device = Device(monkeypatch)
    device.start(budget=1000)
    while device.made.next().reason == abi.END_NONE:
        pass
    launched = len(device.launched)
    assert device.made.drain() is None
    assert len(device.launched) == launched
    assert not device.made.running


def test_rounds_are_of_the_context_they_are_in(monkeypatch):
    """The host resumes with the graph that the device would have launched."""
    device = Device(monkeypatch, accept=7)
    device.start(budget=1000, room=40)
    device.read()
    for key in device.launched[1:]:
        assert key[0] == "round"
    shorts = [key[3] for key in device.launched[1:]]
    assert shorts == sorted(shorts, reverse=True)
    assert {True, False} == set(shorts)


def test_one_plan_for_any_context_is_one_graph(monkeypatch):
    device = Device(monkeypatch, accept=7, short_context=0)
    assert len(device.made._graphs) == 1 + 5 + 4
    device.start(budget=1000, room=40)
    assert device.read() == (list(range(10, 1010)), abi.END_LENGTH)
    assert device.made.resumed > 0
    assert not any(key[3] for key in device.launched)


def test_a_stalled_round_is_an_error_with_the_last_record(monkeypatch):
    device = Device(monkeypatch, per_look=1)
    device.start()
    device.made.next()
    device.made.next()
    device.dead = True
    monkeypatch.setattr(module.graph, "busy", lambda stream: True)
    with pytest.raises(DeviceError, match=r"did not end within 0\.2 s: the last record is round 1: 8 rows, 3 of 7"):
        device.read()
    assert device.runtime.lost
    assert device.launched[-1] == "let go"
    assert not device.made.running


ENDING = """
import ctypes, sys
from cuq1.cuda.abandon import let_go
libc = ctypes.CDLL(None)
libc.on_exit(ctypes.cast(libc.pause, ctypes.c_void_p), None)  # as a driver that waits for its GPU
if len(sys.argv) > 1:
    let_go()
print("done")
sys.exit(3)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "on_exit"), reason="needs glibc")
def test_a_process_ends_though_its_driver_waits():
    command = [sys.executable, "-c", ENDING]
    done = subprocess.run([*command, "let go"], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "done\n", "")
    with pytest.raises(subprocess.TimeoutExpired):  # the control
        subprocess.run(command, capture_output=True, cwd=ROOT, timeout=2, check=False)


def test_a_chain_that_ends_without_a_reason_is_an_error(monkeypatch):
    device = Device(monkeypatch, per_look=1)
    device.start()
    device.dead = True
    device.current = None
    with pytest.raises(DeviceError, match="ended without a reason"):
        device.read()


def test_a_refused_launch_is_an_error(monkeypatch):
    device = Device(monkeypatch, per_look=1)
    device.start()
    device.refused = 719
    with pytest.raises(DeviceError, match="status 719"):
        device.read()


def test_a_fault_ends_the_chain(monkeypatch):
    device = Device(monkeypatch, per_look=1)
    device.start()
    device.fault = 1
    assert device.read()[1] == abi.END_FAULT


def test_graphs_are_made_once_and_closed(monkeypatch):
    device = Device(monkeypatch)
    loop = device.made
    graphs = list(loop._graphs.values())
    assert len(graphs) == 1 + 2 * 5 + 4
    loop.prepare(7, auto=True)
    loop.prepare(5, auto=True)
    loop.prepare(3, auto=False)  # as with the stop rule
    assert len(loop._graphs) == len(graphs)
    loop.prepare(5, auto=False)
    assert len(loop._graphs) == len(graphs) + 3
    loop.close()
    assert all(ready.closed for ready in graphs)


def test_records_are_described():
    assert describe(None) == "no round has been logged"
    record = abi.Record()
    record.index, record.count = 4, 2
    assert describe(record).startswith("the last record is round 4: ")


def test_the_loop_is_one_of_two():
    with pytest.raises(RequestError, match="loop must be device or host, not 'both'"):
        open_engine(NANO, "cpu", loop="both")


def test_closing_a_stream_ends_its_request():
    with open_engine(NANO, "cpu") as engine:
        engine.prefill([1, 2, 3])
        stream = engine.decode(DecodeParams(max_tokens=50, seed=1))
        read = list(next(stream))
        stream.close()
        assert list(stream) == []
        assert stream.finish_reason is None
        assert engine.tokens == (1, 2, 3, *read)

"""cuq1-launch: run a command as N ranks on this host, and end them together.

    cuq1-launch -n 2 -- python program.py

Each rank finds its place in the environment: CUQ1_RANK, CUQ1_WORLD, CUQ1_RENDEZVOUS (where the
launcher listens) and CUQ1_SECRET (of this run alone). Rank 0 has the launcher's stdin, stdout and
stderr; lines of the others come out on stderr with `[rank 1] ` in front.

Exit status: 0 when every rank ends with 0. The first rank that fails, falls silent or does not
arrive ends the run: the others are stopped, one sentence names it and why, and the status is the
one with which it ended (128 + the signal's number), or 1 where that is 0. Ctrl-C is passed on to
every rank and gives 130, SIGTERM 143. Bad input is one sentence and 2.
"""

import argparse
import math
import secrets
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType

from cuq1.cli import Parser, guarded
from cuq1.errors import LaunchError, RequestError
from cuq1.parallel.leftovers import Leftovers
from cuq1.parallel.output import Relay
from cuq1.parallel.processes import Guard, Process
from cuq1.parallel.rendezvous import ADDRESS, RANK, SECRET, WORLD, split_address
from cuq1.parallel.server import Fault, Server
from cuq1.parallel.wire import MAX_WORLD

# Of a failure: a run is over within 10 seconds of it, at the default heartbeat even if a rank fell silent, the others
# heed no SIGTERM, and one cannot be killed.
GRACE_SECONDS = 2.0  # from the first signal to SIGKILL
LAST_WORDS_SECONDS = 1.0  # for the rank at fault to end by itself, with its own message and status
KILL_SECONDS = 1.5  # at least, for the kernel to end what it was told to kill
END_SECONDS = 8.5  # from the failure, until when a killed rank is waited for: a GPU's memory takes time to give back
DRAIN_SECONDS = 0.5  # for output that is still in pipes
TICK_SECONDS = 0.1
TIMEOUT, HEARTBEAT, LOOPBACK = 300.0, 5.0, "127.0.0.1:0"

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Launch:
    """One run of `command` as `world` ranks, with limits in seconds as for `Server`. program: what a failure's sentence
    begins with."""

    def __init__(
        self,
        command: Sequence[str],
        world: int,
        address: str = LOOPBACK,
        timeout: float = TIMEOUT,
        heartbeat: float = HEARTBEAT,
        program: str = "cuq1-launch",
    ) -> None:
        self._command, self._world, self._program = command, world, program
        self._address, self._timeout, self._heartbeat = address, timeout, heartbeat
        self._interrupts: list[int] = []
        self._deadline = 0.0  # until when the end of killed ranks may be waited for
        self._ranks: list[Process] = []

    def run(self) -> int:
        """The launcher's exit status; raises LaunchError where the run cannot start."""
        with ExitStack() as stack:
            self._selector = stack.enter_context(selectors.DefaultSelector())
            secret = secrets.token_hex(32)
            host, port = split_address(self._address)
            self._server = Server(
                self._selector,
                self._world,
                secret,
                host=host,
                port=port,
                timeout=self._timeout,
                heartbeat=self._heartbeat,
            )
            stack.callback(self._server.close)
            stack.enter_context(self._signals())
            self._relay = Relay(self._selector, sys.stderr.fileno())
            stack.callback(self._relay.close)
            leftovers = Leftovers()
            stack.callback(leftovers.clear)
            guard = Guard(leftovers.before)
            stack.callback(guard.close)
            stack.callback(self._end)
            shared = {WORLD: str(self._world), ADDRESS: self._server.address, SECRET: secret}
            for rank in range(self._world):
                process = Process(rank, self._command, {**shared, RANK: str(rank)})
                self._ranks.append(process)
                guard.watch(process)
                for pipe in process.outputs:
                    self._relay.follow(pipe, rank)
            while not self._interrupts and self._server.fault is None and self._running():
                self._step()
            fault = self._server.fault
            if self._interrupts:
                name = signal.Signals(self._interrupts[0]).name
                fault = Fault(f"the launcher was ended by {name}")
                self._server.declare(fault)
            if fault is not None:
                self._stop(fault)
        return self._conclude(fault)

    def _conclude(self, fault: Fault | None) -> int:
        """After the end of all: the sentence, and the exit status."""
        if self._interrupts:
            return 128 + self._interrupts[0]
        if fault is None:
            return 0
        left = [str(process.rank) for process in self._ranks if process.status is None]
        # a process that even SIGKILL does not end waits in the kernel, most likely for a device
        rest = f"; ranks that cannot be killed: {', '.join(left)}" if left else ""
        if rest or not fault.told:
            with suppress(OSError):  # the status counts, even where nobody reads
                print(f"{self._program}: {fault.message}{rest}", file=sys.stderr, flush=True)
        return (self._ranks[fault.ranks[0]].status if fault.ranks else None) or 1

    def _running(self) -> bool:
        return any(process.status is None for process in self._ranks)

    def _step(self) -> None:
        """One round of events: connections, output, and ends of processes, which SIGCHLD reports."""
        for key, mask in self._selector.select(TICK_SECONDS / 4 if self._relay.waiting else TICK_SECONDS):
            key.data(mask)
        for process in self._ranks:
            if process.poll():
                if process.status:
                    self._server.declare(Fault(f"rank {process.rank} {process.ended}", (process.rank,)))
                else:
                    self._server.ended(process.rank)
        self._server.tick()
        self._relay.flush()

    def _stop(self, fault: Fault) -> None:
        """Stop every rank: as the user did, or with SIGTERM, and after a while with SIGKILL."""
        begun = time.monotonic()
        self._deadline = begun + END_SECONDS - (self._heartbeat if fault.silent else 0.0)
        gentle = self._interrupts[0] if self._interrupts else signal.SIGTERM
        heard = len(self._interrupts)
        for process in self._ranks:
            if process.rank not in fault.ranks:
                process.signal(gentle)
            elif fault.silent:
                process.signal(signal.SIGKILL)  # it could not act on anything else
        words = bool(fault.ranks)
        while self._running() and len(self._interrupts) == heard and time.monotonic() - begun < GRACE_SECONDS:
            self._step()
            if words and time.monotonic() - begun > LAST_WORDS_SECONDS:
                words = False
                for rank in fault.ranks:
                    self._ranks[rank].signal(gentle)

    def _end(self) -> None:
        """Whatever happened: kill what still runs, and what ranks have left behind, and hand on the last output."""
        for process in self._ranks:
            process.signal(signal.SIGKILL)
        limit = max(time.monotonic() + KILL_SECONDS, self._deadline)
        while self._running() and time.monotonic() < limit:
            self._step()
        for process in self._ranks:
            process.close()
        limit = time.monotonic() + DRAIN_SECONDS
        while not self._relay.idle and time.monotonic() < limit:
            self._step()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Signals wake the selector; one that the launcher's parent has it ignore stays ignored."""
        woken, waker = socket.socketpair()
        handlers = {number: signal.getsignal(number) for number in (*STOPPING, signal.SIGCHLD)}

        def note(number: int, _frame: FrameType | None) -> None:
            if number in STOPPING:
                self._interrupts.append(number)

        with woken, waker:
            woken.setblocking(False)
            waker.setblocking(False)
            self._selector.register(woken, selectors.EVENT_READ, lambda _mask: woken.recv(1 << 12))
            before = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
            for number, handler in handlers.items():
                if handler != signal.SIG_IGN or number == signal.SIGCHLD:
                    signal.signal(number, note)
            try:
                yield
            finally:
                for number, handler in handlers.items():
                    signal.signal(number, handler)
                signal.set_wakeup_fd(before)
                self._selector.unregister(woken)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.1 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not from 0.1 to 86400 seconds")
    return value


def _ranks(text: str) -> int:
    value = int(text) if text.isascii() and text.isdecimal() else 0
    if not 1 <= value <= MAX_WORLD:
        raise argparse.ArgumentTypeError(f"{text!r} is not from 1 to {MAX_WORLD} ranks")
    return value


def _arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(
        prog="cuq1-launch",
        usage="cuq1-launch -n N [options] -- COMMAND ...",
        description="Run a command as N ranks on this host, and end them together.",
    )
    parser.add_argument("-n", dest="world", type=_ranks, required=True, metavar="N", help="number of ranks")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=TIMEOUT,
        metavar="S",
        help="longest time that ranks wait for one of them, in seconds (default: %(default)g)",
    )
    parser.add_argument(
        "--heartbeat",
        type=_seconds,
        default=HEARTBEAT,
        metavar="S",
        help="a rank that sends no sign of life for so long has failed, in seconds (default: %(default)g)",
    )
    parser.add_argument(
        "--address",
        default=LOOPBACK,
        metavar="HOST:PORT",
        help="where the launcher listens for its ranks (default: loopback, a free port)",
    )
    split = argv.index("--") if "--" in argv else len(argv)
    options, rest = parser.parse_known_args(argv[:split])
    if rest:
        raise RequestError(f"{rest[0]!r} is no option of cuq1-launch: put -- before the command")
    if split + 1 >= len(argv):
        raise RequestError("no command: put -- and then what the ranks run at the end")
    host, _ = split_address(options.address)
    if host in ("0.0.0.0", "::", "*"):
        raise LaunchError(f"--address {options.address} is every address of this host: give one of them")
    return options, list(argv[split + 1 :])


def _run(argv: Sequence[str]) -> int:
    options, command = _arguments(argv)
    return Launch(command, options.world, options.address, options.timeout, options.heartbeat).run()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return guarded("cuq1-launch", lambda: _run(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())

"""The launcher's side of the rendezvous: who has joined, who waits for whom, and who has failed.

Single-threaded, on the launcher's selector: `register`ed callbacks take a mask of events, and
`tick` is called after each round of them. The first fault ends the run: every rank hears of it,
in a wait or at its next one, and nothing completes any more.
"""

import selectors
import socket
import time
from dataclasses import dataclass, field

from cuq1.errors import LaunchError
from cuq1.parallel.peer import Peer
from cuq1.parallel.wire import (
    CALLS,
    LEADER,
    MAX_HEADER,
    MAX_MESSAGE,
    MAX_NAME,
    MAX_PAYLOAD,
    Frame,
    FrameError,
    name_ranks,
    pack,
    proof,
    proven,
)

HELLO_SECONDS = 10.0  # for a connection to show that it knows the secret
VANISHED_SECONDS = 0.5  # for the launcher to learn how the process ended whose connection broke
ACCUSATION_SECONDS = 0.5  # for all ranks that miss something to say so, once one has
MAX_STRANGERS = 64  # connections that have not shown it yet


@dataclass(frozen=True)
class Fault:
    """Why the run ends: a sentence, the ranks to blame, whether they do not even answer, or have said it themselves."""

    message: str
    ranks: tuple[int, ...] = ()
    silent: bool = False
    told: bool = False


@dataclass
class _Wait:
    kind: str
    since: float
    arrived: dict[int, tuple[int, bytes]] = field(default_factory=dict)  # rank: number of its call, contribution


@dataclass(frozen=True)
class _Accusation:
    rank: int
    words: str
    place: int  # of the exchange, and of those that may come next
    after: list[int]


class Server:
    """Serves `world` ranks that know `secret`, on `host`:`port` (0: a free one), until closed.

    A call that some rank does not join within `timeout` seconds is a fault, and so is a rank that
    sends nothing for `heartbeat` seconds. Raises LaunchError where the address cannot be had.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        world: int,
        secret: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        timeout: float = 300.0,
        heartbeat: float = 5.0,
    ) -> None:
        self._selector, self._world, self._secret = selector, world, secret
        self._timeout, self._heartbeat = timeout, heartbeat
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            reason = error.strerror or error
            raise LaunchError(f"cannot listen on {host}:{port} ({reason}): give another --address") from None
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self.fault: Fault | None = None
        self._strangers: list[Peer] = []
        self._joined: dict[int, Peer] = {}
        self._vanished: dict[int, float] = {}
        self._gone: set[int] = set()  # left, or ended in success: they will not arrive anywhere
        self._waits: dict[str, _Wait] = {}
        self._accusations: list[_Accusation] = []
        self._judged = 0.0  # when they are
        self._last_tick = time.monotonic()

    @property
    def address(self) -> str:
        """Where ranks connect to, `host:port`."""
        host, port = self._listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def close(self) -> None:
        """Stop listening, and close every connection."""
        for peer in [*self._strangers, *self._joined.values()]:
            self._forget(peer)
        self._selector.unregister(self._listener)
        self._listener.close()

    def declare(self, fault: Fault) -> None:
        """End the run with `fault`, unless it has ended: every rank that has joined is told."""
        if self.fault is None:
            self.fault = fault
            self._waits.clear()
            for peer in list(self._joined.values()):
                peer.send(pack({"kind": "failed", "message": fault.message[:MAX_MESSAGE]}))

    def ended(self, rank: int) -> None:
        """The process of `rank` has ended in success, which is as good as leaving."""
        self._vanished.pop(rank, None)
        self._gone.add(rank)
        for name in list(self._waits):
            self._check_gone(name)

    def tick(self) -> None:
        """Judge what did not happen in time."""
        now = time.monotonic()
        for peer in [peer for peer in self._strangers if now - peer.heard > HELLO_SECONDS]:
            self._forget(peer)
        if now - self._last_tick > self._heartbeat / 2:
            # the launcher itself was held up, and what ranks sent meanwhile has not been read yet
            for peer in self._joined.values():
                peer.heard = now
        self._last_tick = now
        if self._accusations and (now > self._judged or len(self._accusations) == self._world):
            self._judge()
        for rank, since in self._vanished.items():
            if now - since > VANISHED_SECONDS:
                self._blame([rank], "closed its connection without leaving")
        for rank, peer in list(self._joined.items()):
            if not peer.closed and rank not in self._gone and now - peer.heard > self._heartbeat:
                self._blame([rank], f"stopped answering: no heartbeat for {self._heartbeat:g} s", silent=True)
        for name, wait in list(self._waits.items()):
            if wait.kind == "command" and LEADER not in wait.arrived:
                continue  # it may be waiting for its user
            if now - wait.since > self._timeout:
                late = [rank for rank in range(self._world) if rank not in wait.arrived]
                where = "".join(f"; {self._whereabouts(rank)}" for rank in late)
                self._blame(late, f"did not arrive at {wait.kind} {name!r} within {self._timeout:g} s{where}")

    def _whereabouts(self, rank: int) -> str:
        if rank not in self._joined:
            return f"rank {rank} never joined"
        at = [f"{wait.kind} {name!r}" for name, wait in self._waits.items() if rank in wait.arrived]
        return f"rank {rank} " + (f"waits at {at[0]}" if at else "waits nowhere")

    def _blame(self, ranks: list[int], what: str, *, silent: bool = False, told: bool = False) -> None:
        self.declare(Fault(f"{name_ranks(ranks)} {what}", tuple(ranks), silent, told))

    def _accept(self, _mask: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # it has gone again, or no file descriptor is free
            return
        peer = Peer(self._selector, sock, self._serve)
        self._strangers.append(peer)
        peer.send(pack({"kind": "challenge", "challenge": peer.challenge}))
        if len(self._strangers) > MAX_STRANGERS:
            self._forget(self._strangers[0])  # a rank answers at once, so the oldest is the least likely to be one

    def _serve(self, peer: Peer, data: bytes) -> None:
        try:
            if not data:
                raise FrameError("the connection ended")
            for frame in peer.decoder.feed(data):
                self._take(peer, frame)
        except FrameError as error:
            self._forget(peer)
            if peer.rank is not None and data:
                self._blame([peer.rank], f"broke the protocol ({error})")
            elif peer.rank is not None and peer.rank not in self._gone:
                self._vanished[peer.rank] = time.monotonic()

    def _take(self, peer: Peer, frame: Frame) -> None:
        if peer.rank is None:
            self._authenticate(peer, frame)
            return
        peer.heard = time.monotonic()
        match frame.header.get("kind"):
            case "beat":
                peer.send(pack({"kind": "beat"}))
            case "leave":
                self.ended(peer.rank)
            case "fail":
                words = " ".join(frame.text("message", MAX_MESSAGE).split())  # one line, whatever it was
                # Rank 0 has the launcher's stderr, so that it can tell a user by itself.
                told = frame.header.get("told") is True and peer.rank == LEADER
                self._blame([peer.rank], f"failed: {words}", told=told)
            case "accuse":
                self._hear(peer.rank, frame)
            case str(kind) if kind in CALLS:
                self._arrive(peer.rank, kind, frame)
            case _:
                raise FrameError("a frame of unknown kind")

    def _hear(self, rank: int, frame: Frame) -> None:
        """A rank misses another's part of an exchange. A rank that one is kept waiting for waits itself, further on."""
        after = frame.header.get("after")
        if not isinstance(after, list):
            raise FrameError("after is no list")
        words = " ".join(frame.text("message", MAX_MESSAGE).split())
        self._accusations.append(_Accusation(rank, words, frame.number("place"), after))
        self._judged = self._judged or time.monotonic() + ACCUSATION_SECONDS

    def _judge(self) -> None:
        """Of what ranks miss, the first in the order of exchanges ends the run: all others have that or the next."""
        heard = self._accusations
        first = next((one for one in heard if all(other.place in (one.place, *one.after) for other in heard)), heard[0])
        self._blame([first.rank], f"failed: {first.words}")

    def _authenticate(self, peer: Peer, frame: Frame) -> None:
        answer, rank, world = frame.text("answer", 64), frame.number("rank"), frame.number("world")
        if not proven(frame.text("proof", 64), proof(self._secret, "rank", peer.challenge, answer, rank, world)):
            raise FrameError("not the run's secret")
        problem = None
        if world != self._world or not 0 <= rank < world:
            problem = f"rank {rank} of {world} is not of this run of {self._world}"
        elif rank in self._joined:
            problem = f"rank {rank} has joined already"
        if problem is not None:
            peer.send(pack({"kind": "refused", "message": problem}))
            raise FrameError(problem)
        peer.rank = rank
        peer.heard = time.monotonic()
        peer.decoder.allow(MAX_HEADER, MAX_PAYLOAD)
        self._strangers.remove(peer)
        self._joined[rank] = peer
        mine = proof(self._secret, "launcher", peer.challenge, answer, rank, world)
        welcome = {"kind": "welcome", "proof": mine, "timeout": self._timeout, "heartbeat": self._heartbeat}
        peer.send(pack(welcome))
        if self.fault is not None:
            peer.send(pack({"kind": "failed", "message": self.fault.message[:MAX_MESSAGE]}))

    def _arrive(self, rank: int, kind: str, frame: Frame) -> None:
        name, call = frame.text("name", MAX_NAME), frame.number("call")
        if self.fault is not None:
            return  # the rank has been told
        wait = self._waits.setdefault(name, _Wait(kind, time.monotonic()))
        if wait.kind != kind:
            first = next(iter(wait.arrived))
            self._blame([rank], f"is at {kind} {name!r} where rank {first} is at {wait.kind} {name!r}")
            return
        if rank in wait.arrived:
            raise FrameError(f"it arrived at {kind} {name!r} twice")
        wait.arrived[rank] = (call, frame.payload)
        if kind == "command" and rank == LEADER:
            wait.since = time.monotonic()
        if len(wait.arrived) < self._world:
            self._check_gone(name)
            return
        del self._waits[name]
        contributions = [wait.arrived[rank][1] for rank in range(self._world)]
        sizes, joined = [len(one) for one in contributions], b"".join(contributions)
        for one, (call, _) in wait.arrived.items():
            self._joined[one].send(pack({"kind": "result", "call": call, "sizes": sizes}, joined))

    def _check_gone(self, name: str) -> None:
        wait = self._waits.get(name)
        if wait is not None and (late := sorted(self._gone - set(wait.arrived))):
            self._blame(late, f"left without arriving at {wait.kind} {name!r}")

    def _forget(self, peer: Peer) -> None:
        peer.close()
        if peer in self._strangers:
            self._strangers.remove(peer)

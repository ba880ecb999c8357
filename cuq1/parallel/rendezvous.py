"""A rank's side of the rendezvous: barriers, gathers, agreement, and the others' failures.

    with Rendezvous() as meeting:  # the environment that cuq1-launch gives
        unique_id = meeting.broadcast("nccl", make_id() if meeting.rank == 0 else None)
        meeting.agree("setup", {"config": config_hash, "plan": plan_hash})
        meeting.barrier("loaded")

Every wait ends: with its result, or with a LaunchError that says which ranks did not arrive, or
which rank failed. A thread sends heartbeats meanwhile and all the time between: a rank that sends
none for as long as the launcher allows counts as stopped. That includes a rank whose threads are
kept from running, by a long call that holds Python's global lock.
"""

import json
import os
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from cuq1.errors import Cuq1Error, LaunchError, PeerError
from cuq1.parallel.connection import Connection, end_process
from cuq1.parallel.wire import LEADER, MAX_NAME, MAX_PAYLOAD, MAX_WORLD, name_ranks

RANK, WORLD, ADDRESS, SECRET = "CUQ1_RANK", "CUQ1_WORLD", "CUQ1_RENDEZVOUS", "CUQ1_SECRET"


def split_address(text: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[ipv6]:port`; raises LaunchError."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isascii() and port.isdecimal() and int(port) < 65536):
        raise LaunchError(f"{text!r} is no rendezvous address: give host:port")
    return host, int(port)


def _from_environment(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise LaunchError(f"{name} is not set: start this program with cuq1-launch")
    return value


def _integer(name: str) -> int:
    value = _from_environment(name)
    if not (value.isascii() and value.isdecimal() and len(value) < 10):
        raise LaunchError(f"{name} is {value!r}, which is no number: start this program with cuq1-launch")
    return int(value)


class Rendezvous:
    """One rank's connection to the launcher, from the environment where arguments are left out.

    Leaving the `with` block by an exception tells the other ranks of it. Calls are blocking and
    must come in the same order on every rank; a name may be used again after its call.
    `on_lost` is called, on another thread, when the launcher dies or falls silent for twice the
    heartbeat limit; by default it ends this process, so that none outlives its launcher.

    Raises LaunchError where nobody answers at the address, or does not know the secret, or the
    launcher refuses this rank.
    """

    def __init__(
        self,
        rank: int | None = None,
        world: int | None = None,
        address: str | None = None,
        secret: str | None = None,
        *,
        on_lost: Callable[[str], None] = end_process,
    ) -> None:
        self.rank = _integer(RANK) if rank is None else rank
        self.world = _integer(WORLD) if world is None else world
        if not 0 <= self.rank < self.world <= MAX_WORLD:
            raise LaunchError(f"rank {self.rank} of {self.world} is impossible: give 0 <= rank < world <= {MAX_WORLD}")
        host, port = split_address(_from_environment(ADDRESS) if address is None else address)
        secret = _from_environment(SECRET) if secret is None else secret
        self._connection = Connection(self.rank, self.world, host, port, secret, on_lost)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None and not (isinstance(error, SystemExit) and error.code in (0, None)):
            self.fail_of(error)
        self.close()

    def barrier(self, name: str) -> None:
        """Wait until every rank is here; raises LaunchError."""
        self._meet("barrier", name, b"")

    def gather(self, name: str, data: bytes) -> list[bytes]:
        """Every rank's `data`, of at most 1 MiB, in the order of ranks; raises LaunchError."""
        return self._meet("gather", name, data)

    def broadcast(self, name: str, data: bytes | None) -> bytes:
        """The bytes, at most 1 MiB less one, of the one rank that gives any; raises LaunchError."""
        given = self._meet("broadcast", name, b"" if data is None else b"+" + data)
        givers = [rank for rank, one in enumerate(given) if one]
        if len(givers) != 1:
            raise LaunchError(f"broadcast {name!r} needs bytes from one rank, and has them from ranks {givers}")
        return given[givers[0]][1:]

    def agree(self, name: str, values: Mapping[str, str]) -> None:
        """Check that every rank has the same values; raises the same LaunchError on all of them.

        It names the first key that differs, every value of it and the ranks that have it.
        """
        gathered = [json.loads(one) for one in self._meet("agree", name, json.dumps(dict(values)).encode())]
        for key in sorted({key for one in gathered for key in one}):
            holders: dict[str | None, list[int]] = {}
            for rank, one in enumerate(gathered):
                holders.setdefault(one.get(key), []).append(rank)
            if len(holders) > 1:
                found = ", ".join(
                    f"{'nothing' if value is None else repr(value)} on {name_ranks(ranks)}"
                    for value, ranks in holders.items()
                )
                raise LaunchError(f"ranks disagree on {key!r} at {name!r}: {found}; start all of them alike")

    def command(self, data: bytes | None = None) -> bytes:
        """What rank 0 has to say, at most 1 MiB: it gives the bytes, and the others wait for them for as long as it
        lives. Rank 0 waits until all have them, as at a barrier. Raises LaunchError."""
        return self._meet("command", "command", b"" if data is None else data)[LEADER]

    def fail(self, message: str, *, told: bool = False) -> None:
        """Tell launcher and ranks, as the last thing, that this rank cannot go on.

        told: rank 0 tells its user by itself, and the launcher need not.
        """
        self._connection.fail(message, told=told)

    def fail_of(self, error: BaseException) -> None:
        """The same for an error. Of a PeerError all ranks may have one: the launcher finds the one that came first."""
        message = str(error) if isinstance(error, Cuq1Error) else f"{type(error).__name__}: {error}"
        if isinstance(error, PeerError):
            self._connection.accuse(message, error.place, error.after)
        else:
            self.fail(message)

    def close(self) -> None:
        """Leave: from now on, a rank that waits for this one has an error."""
        self._connection.close()

    def _meet(self, kind: str, name: str, data: bytes) -> list[bytes]:
        if not 0 < len(name) <= MAX_NAME or len(data) > MAX_PAYLOAD:
            raise LaunchError(
                f"{kind} {name[:MAX_NAME]!r} has a name of {len(name)} characters and {len(data)} bytes: "
                f"at most {MAX_NAME} and {MAX_PAYLOAD} can be sent"
            )
        return self._connection.call(kind, name, data)

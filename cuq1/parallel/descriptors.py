"""A file descriptor of one rank, handed to the processes of all others on the same host."""

import hmac
import json
import os
import secrets
import socket
import struct
import time
from contextlib import suppress

from cuq1.errors import LaunchError
from cuq1.parallel.rendezvous import Rendezvous
from cuq1.parallel.wire import name_ranks

SECONDS = 10.0  # for ranks that have just met to fetch it
PATIENCE = 1.0  # for one connection to say who it is
_MOST = 256  # bytes of that message
_DESCRIPTOR = struct.Struct("i")
_CREDENTIALS = struct.Struct("3i")  # SO_PEERCRED: process, user, group


def hand_out(meeting: Rendezvous, name: str, descriptor: int) -> None:
    """Rank 0's side of `fetch`: returns when every other rank has `descriptor`, which stays open here.

    The socket has a random name without a file, so nothing of it outlives the process; a connection is served once it
    is this user's and knows a random word, both of which ranks have by the rendezvous. Raises LaunchError for ranks
    that have not come within SECONDS.
    """
    place, word = f"cuq1-{secrets.token_hex(16)}", secrets.token_hex(32)
    waiting = set(range(meeting.world)) - {meeting.rank}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{place}")
        listener.listen(meeting.world)
        meeting.broadcast(name, json.dumps([place, word]).encode())
        end = time.monotonic() + SECONDS
        while waiting:
            listener.settimeout(max(0.001, end - time.monotonic()))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                late = name_ranks(sorted(waiting))
                raise LaunchError(f"{late} did not fetch {name} from rank 0 within {SECONDS:g} s") from None
            with connection, suppress(OSError):  # whoever leaves again, or says nothing, is no rank
                rank = _asker(connection, word)
                if rank in waiting:
                    socket.send_fds(connection, [b"+"], [descriptor])
                    waiting.remove(rank)


def fetch(meeting: Rendezvous, name: str) -> int:
    """A descriptor of what rank 0 hands out under `name`; this process's own, to be closed. Raises LaunchError."""
    place, word = json.loads(meeting.broadcast(name, None))
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(SECONDS)
            connection.connect(f"\0{place}")
            if _user(connection) != os.geteuid():
                raise LaunchError(f"{name} is offered by another user: rank 0's process has gone")
            connection.send(f"{meeting.rank} {word}".encode())
            # socket.recv_fds of Python 3.11 passes no flags on, and the programs that this one starts must not have it
            _, ancillary, flags, _ = connection.recvmsg(1, socket.CMSG_LEN(_DESCRIPTOR.size), socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise LaunchError(
            f"rank {meeting.rank} cannot fetch {name} from rank 0 ({error.strerror or error}): both need one host "
            "and one network namespace"
        ) from None
    found = [data for level, kind, data in ancillary if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)]
    if flags & socket.MSG_CTRUNC or len(found) != 1 or len(found[0]) != _DESCRIPTOR.size:
        raise LaunchError(f"rank 0 did not hand {name} to rank {meeting.rank}")
    return int(_DESCRIPTOR.unpack(found[0])[0])


def _asker(connection: socket.socket, word: str) -> int:
    """The rank at the other end; -1 where it is none."""
    if _user(connection) != os.geteuid():
        return -1
    connection.settimeout(PATIENCE)
    rank, _, given = connection.recv(_MOST).decode(errors="replace").partition(" ")
    known = hmac.compare_digest(given.encode(), word.encode())
    return int(rank) if known and rank.isascii() and rank.isdecimal() else -1


def _user(connection: socket.socket) -> int:
    """The user of the process at the other end."""
    given = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(given)[1])

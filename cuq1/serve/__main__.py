"""python -m cuq1.serve: an HTTP server for coding agents and people.

Everything that can be refused is refused before the weights are read: one sentence on stderr, exit status 2. SIGTERM
and Ctrl-C let running and waiting requests finish, and take no others; a second one ends them.
"""

import argparse
import ipaddress
import os
import socket
import sys
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from cuq1.cli import Parser, guarded
from cuq1.description import Description
from cuq1.errors import RequestError
from cuq1.serve.settings import Settings

KEY = "CUQ1_API_KEY"
NANO = Path(str(resources.files("cuq1") / "assets" / "iquest-q1-nano"))
ANYWHERE = ("0.0.0.0", "::", "")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m cuq1.serve", description="Serve a model to coding agents and people over HTTP.")
    parser.add_argument(
        "--model", metavar="PATH", help="checkpoint folder or .nanoqwen file (default: the bundled nano)"
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument(
        "--tp", type=int, default=1, metavar="N", help="GPUs that share the model (default: %(default)s)"
    )
    parser.add_argument(
        "--activations",
        choices=["f16", "fp8"],
        default="f16",
        help="what enters the experts on the GPU: halves, or E4M3 with a scale a row",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 for a free one (default: %(default)s)")
    parser.add_argument("--api-key", metavar="K", help=f"what requests have to bring (default: ${KEY}, else none)")
    parser.add_argument(
        "--served-model-name", metavar="N", help="what answers call the model (default: its folder's name)"
    )
    parser.add_argument("--context", type=int, metavar="N", help="tokens of prompt and answer (default: the model's)")
    parser.add_argument(
        "--max-queue", type=int, default=64, metavar="N", help="requests that may wait (default: %(default)s)"
    )
    parser.add_argument(
        "--max-body", type=int, default=32, metavar="MIB", help="size of a request's body (default: %(default)s)"
    )
    parser.add_argument(
        "--snapshots",
        type=float,
        default=2.0,
        metavar="GIB",
        help="memory for taking up conversations that others came between, the GPU's where there is one (default: 2)",
    )
    parser.add_argument(
        "--host-snapshots", type=float, default=8.0, metavar="GIB", help="and the host's, for a GPU's (default: 8)"
    )
    parser.add_argument(
        "--keep-alive",
        type=float,
        default=5.0,
        metavar="S",
        help="seconds between signs of life to a client that waits",
    )
    parser.add_argument(
        "--engine-restarts", type=int, default=1, metavar="N", help="times to open a failed engine again (default: 1)"
    )
    parser.add_argument(
        "--drain", type=float, default=300.0, metavar="S", help="seconds that requests get to finish at the end"
    )
    options = parser.parse_args(argv)
    options.api_key = options.api_key if options.api_key is not None else os.environ.get(KEY)
    _check(options)
    return options


def _check(options: argparse.Namespace) -> None:
    for name, least in (
        ("tp", 1),
        ("context", 2),
        ("max_queue", 0),
        ("max_body", 1),
        ("engine_restarts", 0),
        ("port", 0),
    ):
        value = getattr(options, name)
        if value is not None and value < least:
            raise RequestError(f"--{name.replace('_', '-')} must be at least {least}, not {value}")
    if options.port > 65535:
        raise RequestError(f"--port must be at most 65535, not {options.port}")
    for name in ("keep_alive", "drain"):
        if not 0.1 <= getattr(options, name) <= 86400:
            raise RequestError(f"--{name.replace('_', '-')} must be from 0.1 to 86400 seconds")
    for name in ("snapshots", "host_snapshots"):
        if not 0 <= getattr(options, name) <= 4096:
            raise RequestError(f"--{name.replace('_', '-')} must be from 0 to 4096 GiB")
    key = options.api_key
    if key is not None and (not key.strip() or not key.isascii() or not key.isprintable() or key != key.strip()):
        raise RequestError("the API key must be printable ASCII without spaces around it: choose another")
    if key is None and not is_loopback(options.host):
        raise RequestError(
            f"--host {options.host} can be reached from other machines, and there is no API key: "
            f"give one with --api-key or {KEY}, or listen at 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address; of a name, all its addresses have to be such."""
    if host in ANYWHERE:
        return False
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        raise RequestError(f"--host {host} is no address of this machine: give one, or leave it out") from None
    return all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in found)


def bind(host: str, port: int) -> socket.socket:
    """A socket at the address, not listening yet; RequestError where it cannot be had."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a token's event waits for no other
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise RequestError(
            f"{host}:{port} cannot be listened at ({error.strerror}): choose another --port, 0 for a free one"
        ) from None
    return listener


def _name(options: argparse.Namespace) -> str:
    path = NANO if options.model is None else Path(options.model).resolve()
    name: str = options.served_model_name or (path.name if path.is_dir() else path.stem)
    if len(name) > 200 or not name.isprintable():
        raise RequestError("--served-model-name must be printable, and at most 200 characters long")
    return name


def _run(argv: Sequence[str] | None) -> int:
    begun = time.monotonic()
    options = _arguments(argv)
    path = NANO if options.model is None else Path(options.model)
    model = Description.open(path)
    name = _name(options)
    if options.context is not None and options.context > model.context:
        raise RequestError(f"--context {options.context} is above the model's {model.context}: lower it")
    try:
        from cuq1.serve.run import serve  # noqa: PLC0415  (what it imports need not be installed)
    except ModuleNotFoundError as error:
        raise RequestError(f"the server needs {error.name}: install cuq1[serve]") from None
    settings = Settings(
        api_key=options.api_key,
        max_body=options.max_body << 20,
        hosts=(*Settings().hosts, options.host),
    )
    with bind(options.host, options.port) as listener:
        return serve(options, model, path, name, settings, listener, begun)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return guarded("cuq1.serve", lambda: _run(argv))


if __name__ == "__main__":
    sys.exit(main())

"""What a server is started with, beyond the engine: its name, its key, its bounds."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """api_key: what requests have to bring, None for none; the other fields bound what one request may ask for.

    hosts: names that a browser may have called the server by where there is no key; () for any.
    """

    api_key: str | None = None
    max_body: int = 32 << 20  # bytes
    body_seconds: float = 120.0  # for a whole body to arrive
    hosts: tuple[str, ...] = ("localhost", "127.0.0.1", "::1")


MAX_MESSAGES = 10_000
MAX_TOOLS = 1024
MAX_STOPS = 16
MAX_STOP_LENGTH = 1024  # characters
MAX_LOGPROBS = 20

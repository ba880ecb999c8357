"""The server's log on stderr: one line for each request, and what happens to the engine."""

import logging
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from cuq1.serve.job import Measures

log = logging.getLogger("cuq1.serve")


def to_stderr(level: int = logging.INFO) -> None:
    """Send this log, and what the HTTP library warns of, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    for name, least in (("cuq1.serve", level), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(least)
        logger.propagate = False


def access(method: str, path: str, status: int, seconds: float, answers: Sequence[Measures]) -> None:
    """One request's line: numbers alone, nothing of what was said."""
    line = f"{method} {path} {status} {seconds:.3f}s"
    for measures in answers:
        line += (
            f" prompt={measures.prompt_tokens} cached={measures.cached_tokens}"
            f" completion={measures.completion_tokens}"
            f" first={_shown(measures.seconds_to_first_token, '.3f', 's')}"
            f" speed={_shown(measures.tokens_per_second, '.1f', 'tok/s')}"
            f" accepted={measures.mean_accepted:.2f} end={measures.reason or 'left'}"
        )
    log.info(line)


def where(error: BaseException) -> str:
    """An exception's type and place, without its text."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    return f"{type(error).__name__} at " + " < ".join(
        f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames)
    )


def _shown(value: float | None, form: str, unit: str) -> str:
    return "-" if value is None else f"{value:{form}}{unit}"

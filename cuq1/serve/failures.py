"""Whose fault it is when an engine raises: the request's, one answer's, or the engine's."""

from collections.abc import Iterator
from contextlib import contextmanager

from cuq1.errors import Cuq1Error, RequestError
from cuq1.serve.log import where
from cuq1.serve.request import ApiError


class EngineFailure(Exception):  # noqa: N818  (it is no error of a caller's)
    """What the engine raised, where it cannot be the request's fault."""


class Refused(Exception):  # noqa: N818
    """The engine found fault with the request."""

    def __init__(self, error: ApiError) -> None:
        super().__init__()
        self.error = error


@contextmanager
def engine_calls() -> Iterator[None]:
    """What an engine's call raises: the request's fault, this answer's alone, or the engine's."""
    try:
        yield
    except RequestError as error:
        raise Refused(ApiError("invalid", str(error))) from None
    except Exception as error:
        if type(error) is Cuq1Error:  # damaged values or a grammar without a way on: the next answer may be fine
            raise Refused(ApiError("failed", str(error))) from None
        raise EngineFailure(str(error) if isinstance(error, Cuq1Error) else where(error)) from error

"""cuq1: single-stream, low-latency decoding of large language models."""

from cuq1.engine import Engine, open_engine
from cuq1.sampling import DecodeParams, DecodeStream, Round

__all__ = ["DecodeParams", "DecodeStream", "Engine", "Round", "__version__", "open_engine"]

__version__ = "0.1.0"

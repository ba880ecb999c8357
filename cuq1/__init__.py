"""cuq1: single-stream, low-latency decoding of large language models."""

__version__ = "0.1.0"

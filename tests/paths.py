"""Where the checkpoints that tests use lie."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NANO = ROOT / "cuq1" / "assets" / "iquest-q1-nano"
RELEASED = ROOT / "cuq1" / "assets" / "iquest-q1"

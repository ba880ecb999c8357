#!/usr/bin/env python3
"""cuq1-launch out of a checkout, which needs no installation: its code is cuq1/parallel/launch.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cuq1.parallel.launch import main

if __name__ == "__main__":
    sys.exit(main())

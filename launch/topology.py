#!/usr/bin/env python3
"""How the visible GPUs are linked, out of a checkout: its code is cuq1/parallel/topology.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cuq1.parallel.topology import main

if __name__ == "__main__":
    sys.exit(main())

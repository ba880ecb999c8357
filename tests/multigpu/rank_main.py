"""One rank of a test: python -m tests.multigpu.rank_main MODULE FUNCTION ARGUMENTS."""

import json
import sys
from importlib import import_module

from cuq1.cli import guarded
from cuq1.parallel import Rendezvous


def main():
    module, name, arguments = sys.argv[1:]
    with Rendezvous() as meeting:
        found = getattr(import_module(module), name)(meeting, *json.loads(arguments))
        everyones = meeting.gather("results", json.dumps(found).encode())
        if meeting.rank == 0:
            print(json.dumps([json.loads(one) for one in everyones]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(guarded("rank", main))

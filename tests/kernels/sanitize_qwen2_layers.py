"""A small launch of qwen2_layers under compute-sanitizer: python3 -m tests.kernels.sanitize_qwen2_layers [TOOL ...]

Tools: memcheck, racecheck, initcheck, synccheck; by default the first two. Exit status 1 where a tool finds something,
or the launch is wrong; 2 where there is no compute-sanitizer.
"""

import shutil
import subprocess
import sys

from tests.kernels.harness import Gpu
from tests.kernels.qwen2_layers_case import Case, Model
from tests.kernels.qwen2_shapes import DIMS

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
LAUNCH = "--launch"
SIZES = ("7b-tiny", "32b-tiny")  # o_proj's and down's columns whole, and in parts
POSITIONS = (20, 1000)  # of one span, and of several


def launches():
    gpu = Gpu()
    for size in SIZES:
        model = Model(gpu, DIMS[size], 2, POSITIONS[-1] + 1)
        for position in POSITIONS:
            Case(model, position).check()
            print(f"{size}, position {position}: right", flush=True)
    gpu.close()


def main(words):
    if words == [LAUNCH]:
        launches()
        return 0
    unknown = [word for word in words if word not in TOOLS]
    if unknown:
        print(f"{unknown[0]!r} is no tool: choose of {', '.join(TOOLS)}", file=sys.stderr)
        return 2
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not in PATH: it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    failed = []
    for tool in words or TOOLS[:2]:
        command = [
            "compute-sanitizer",
            "--tool",
            tool,
            "--error-exitcode",
            "9",
            sys.executable,
            "-m",
            __spec__.name,
            LAUNCH,
        ]
        print(" ".join(command), flush=True)
        if subprocess.run(command, check=False).returncode:
            failed.append(tool)
    print(f"found something: {', '.join(failed)}" if failed else "clean")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

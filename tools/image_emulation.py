"""Carries launch/Dockerfile out in a folder, without a Docker engine, and tries what comes of it.

Every stage in turn has FOLDER/root for its file system, in which a virtual environment stands for the base image's
Python; absolute paths of instructions lie below it. A stage that is done moves to FOLDER/NAME, for COPY --from. What
stays different from a container: the base image's Python and libraries are this machine's, and so are /usr/bin and all
other absolute paths that a program takes by itself.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from cuq1.errors import RequestError
from tools import check_image, dockerfile
from tools.dockerfile import Stage, Step

BASE = Path("usr/local")  # of the image's Python
VENV = ("-m", "venv")
SECONDS = 3600
TOLERANCE = 0.01  # of the image's size: scripts of a virtual environment, and cuq1's own compiled modules
RENDEZVOUS = (
    "from cuq1.parallel import Rendezvous\n"
    "with Rendezvous() as meeting: print(meeting.gather('ranks', str(meeting.rank).encode()))"
)
# Every kernel is found, and what would compile one is not.
KERNELS = """
import runpy, sys
from pathlib import Path
from cuq1.cuda import compile as jit, link
from cuq1.errors import DeviceError
listed = runpy.run_path(sys.argv[1])["model_kernels"]
count = 0
for share in sys.argv[2:]:
    folder, _, tp = share.rpartition(":")
    for kernel in listed(Path(folder), int(tp)):
        jit.compile_kernel(kernel)
        count += 1
for absent in (jit.nvrtc_version, link.version):
    try:
        print("there is", absent())
    except DeviceError:
        pass
print(count, "kernels")
"""


class Emulation:
    """One build in `folder`, which must be empty or not exist."""

    def __init__(self, context: Path, folder: Path, python: str, arguments: Mapping[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise RequestError(f"{folder} is not empty: name a folder that is, or that does not exist")
        self._context, self._folder, self._python = context, folder.resolve(), python
        self._ignored = (context / "launch" / "Dockerfile.dockerignore").read_text(encoding="utf-8")
        defaults, self._stages = dockerfile.parse((context / "launch" / "Dockerfile").read_text(encoding="utf-8"))
        unknown = arguments.keys() - defaults.keys()
        if unknown:
            raise RequestError(f"the Dockerfile has no ARG {', '.join(sorted(unknown))}")
        self.arguments = {**defaults, **arguments}
        self.root = self._folder / "root"

    def build(self) -> None:
        """Carries out every stage; raises RequestError at the first step that fails."""
        for stage in self._stages:
            subprocess.run([self._python, *VENV, self.root / BASE], check=True)
            self._carry_out(stage)
            if stage is not self._stages[-1]:
                self.root.rename(self._folder / stage.name)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A command in the image, as its user, with its environment and nothing of this one's."""
        final = self._stages[-1]
        environment = {name: self._paths(value) for name, value in final.environment().items()}
        user = int(final.all("USER")[-1].text.partition(":")[0]) if os.geteuid() == 0 else None
        return subprocess.run(
            command, env=environment, cwd=self.root, user=user, group=user, extra_groups=None if user is None else (),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip

    def installed_bytes(self) -> int:
        """Of all files that are added to the base image."""
        files = (self.root / "opt").rglob("*")
        return sum(path.lstat().st_size for path in files if path.is_file() and not path.is_symlink())

    def _carry_out(self, stage: Stage) -> None:
        where = self.root
        for step in stage.steps:
            match step.name:
                case "WORKDIR":
                    where = self.root / step.text.lstrip("/")
                    where.mkdir(parents=True, exist_ok=True)
                case "COPY":
                    self._copy(step, where)
                case "RUN":
                    self._do(step, where)

    def _copy(self, step: Step, where: Path) -> None:
        copy = dockerfile.copy_of(step)
        origin = self._context if copy.stage is None else self._folder / copy.stage
        target = self.root / copy.target.lstrip("/") if copy.target.startswith("/") else where / copy.target
        for one in copy.sources:
            source = origin / one.lstrip("/")
            if source.is_dir():
                ignore = self._left_out if copy.stage is None else None
                shutil.copytree(source, target, symlinks=True, ignore=ignore, dirs_exist_ok=True)
            else:
                into = target / source.name if copy.target.endswith("/") or target.is_dir() else target
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, into)

    def _left_out(self, folder: str, names: Sequence[str]) -> set[str]:
        place = Path(folder).relative_to(self._context)
        return {name for name in names if dockerfile.is_ignored((place / name).as_posix(), self._ignored)}

    def _do(self, step: Step, where: Path) -> None:
        words = [self._paths(word) for word in shlex.split(dockerfile.expand(step.text, self.arguments))]
        kept = {name: os.environ[name] for name in ("HOME", "LANG", "PIP_CERT") if name in os.environ}
        path = f"{self.root / BASE / 'bin'}:/usr/bin:/bin"
        print(f"line {step.line}: {' '.join(words)}", file=sys.stderr, flush=True)
        done = subprocess.run(words, cwd=where, env={**kept, "PATH": path}, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise RequestError(f"Dockerfile, line {step.line}: {step.text} ends with {done.returncode} ({reason})")

    def _paths(self, text: str) -> str:
        """Absolute paths of the image, which may stand behind colons, below the root."""
        parts = [
            f"{self.root}{one}" if one.startswith(("/opt/", "/usr/local/", "/build")) else one
            for one in text.split(":")
        ]
        return ":".join(parts)


def emulate(context: Path, folder: Path, python: str, arguments: Mapping[str, str]) -> list[str]:
    """Builds the image and tries it: what is wrong, each in a sentence."""
    image = Emulation(context, folder, python, arguments)
    image.build()
    own = context / "cuq1" / "assets" / "iquest-q1-nano"
    model, tp = context / image.arguments["MODEL"], image.arguments["TP"].split()
    shares = [f"{own}:1", f"{own}:2", *(f"{model}:{one}" for one in tp)]
    ranks = "[b'0', b'1']"
    trials = [
        (("python", "-m", "cuq1.generate", "--device", "cpu", "--chat", "hi", "--max-tokens", "4"), 0, None),
        (("cuq1-launch", "-n", "2", "--", "python", "-c", RENDEZVOUS), 0, f"{ranks}\n"),
        (("cuq1-launch", "-n", "2", "--", "python", "-c", "raise SystemExit(7)"), 7, ""),
        (("python", "-c", "from cupy.cuda import nccl; print(nccl.available)"), 0, "True\n"),
        (("python", "-c", KERNELS, str(context / "tools" / "build_ptx.py"), *shares), 0, None),
    ]
    found = []
    for command, status, output in trials:
        done = image.run(*command)
        shown = " ".join(command[:8]).partition("\n")[0]
        print(f"{shown}: {(done.stdout.strip().splitlines() or [''])[-1]}", file=sys.stderr, flush=True)
        if done.returncode != status or "there is" in done.stdout or (output is not None and done.stdout != output):
            said = (done.stderr.strip().splitlines() or [""])[-1]
            found.append(f"{shown} ends with {done.returncode} and says {done.stdout.strip()!r} {said!r}")
    size, expected = image.installed_bytes(), check_image.expected_bytes(folder / "kernels" / "build")
    print(f"{size / 1e6:.1f} MB installed, {expected / 1e6:.1f} MB expected", file=sys.stderr)
    if abs(size - expected) > TOLERANCE * expected:
        found.append(f"{size} bytes are installed, {expected} are expected")
    done = image.run("python", "-m", "cuq1.generate", "--device", "cuda", "--chat", "hi")
    if done.returncode != 2 or "NVIDIA" not in done.stderr or len(done.stderr.splitlines()) != 1:
        found.append(f"without a GPU it ends with {done.returncode} and says {done.stderr.strip()!r}")
    return found

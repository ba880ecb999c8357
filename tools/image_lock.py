"""Locks the packages of launch/Dockerfile: exact wheels with their hashes, and what each of them is.

    python -m tools.image_lock --python python3.12

makes launch/NAME.lock and launch/NAME.json from launch/NAME.in, for the requirements of the image and of its build
stage. --python is the image's Python, which decides the wheels: it downloads them from PyPI, installs them without
their dependencies, and what is recorded is read from that installation. A .lock is what pip installs from; the .json
beside it has, for each of its lines, sizes, the modules that can be imported, and the requirements of the package
itself, from which tools/check_image.py judges whether the image has what it needs and no more.
"""

import argparse
import csv
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from email.parser import HeaderParser
from pathlib import Path

from cuq1.cli import Parser, guarded
from cuq1.errors import RequestError

LAUNCH = Path(__file__).resolve().parents[1] / "launch"
NAMES = ("requirements", "build")  # of the image, and of the stage that builds kernels


@dataclass(frozen=True)
class Package:
    """A locked wheel. sizes in bytes: of the wheel, and of what is installed from it, compiled modules included.

    modules: what it lets one import, as dotted names: packages, and the modules that are in none. requires: its own
    requirements, as it states them, without those of extras.
    """

    name: str
    version: str
    wheel: str
    sha256: str
    wheel_bytes: int
    installed_bytes: int
    modules: tuple[str, ...]
    requires: tuple[str, ...]


def normal(name: str) -> str:
    """A package's name as indexes write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read(name: str, folder: Path = LAUNCH) -> list[Package]:
    """The packages of a lock; raises RequestError where the .lock and the .json beside it differ."""
    path = folder / f"{name}.json"
    listed = json.loads(path.read_text(encoding="utf-8"))["packages"]
    found = [Package(**{**one, "modules": tuple(one["modules"]), "requires": tuple(one["requires"])}) for one in listed]
    locked = [line for line in (folder / f"{name}.lock").read_text("utf-8").splitlines() if not line.startswith("#")]
    if locked != [_line(package) for package in found]:
        raise RequestError(f"{name}.lock and {name}.json differ: make both with python -m tools.image_lock")
    return found


def _line(package: Package) -> str:
    return f"{package.name}=={package.version} --hash=sha256:{package.sha256}"


def lock(name: str, python: str, folder: Path = LAUNCH) -> list[Package]:
    """Makes the .lock and the .json of a .in; raises RequestError where pip fails."""
    wanted = folder / f"{name}.in"
    with tempfile.TemporaryDirectory() as scratch:
        wheels, site, lines = Path(scratch, "wheels"), Path(scratch, "site"), Path(scratch, "lock")
        _pip(python, "download", "--no-deps", "--only-binary=:all:", f"--dest={wheels}", f"--requirement={wanted}")
        hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in wheels.iterdir()}
        stated = (path.name.split("-")[:2] for path in sorted(wheels.iterdir()))
        pins = zip(stated, (hashes[path.name] for path in sorted(wheels.iterdir())), strict=True)
        lines.write_text("".join(f"{one}=={version} --hash=sha256:{digest}\n" for (one, version), digest in pins))
        # What was downloaded, and no other.
        source = ("--no-index", f"--find-links={wheels}", "--require-hashes", f"--requirement={lines}")
        _pip(python, "install", "--no-deps", f"--target={site}", *source)
        packages = sorted((_package(site, path, hashes[path.name]) for path in wheels.iterdir()), key=lambda p: p.name)
    head = f"# Made by `python -m tools.image_lock` from {wanted.name}; install with --no-deps --require-hashes.\n"
    (folder / f"{name}.lock").write_text(head + "".join(f"{_line(package)}\n" for package in packages))
    asked = [python, "-c", "import platform as p; print(*p.python_version_tuple()[:2], p.machine())"]
    major, minor, machine = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    listed = [asdict(package) for package in packages]
    content = {"python": f"{major}.{minor}", "machine": machine, "packages": listed}
    (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    return packages


def _pip(python: str, *arguments: str) -> None:
    """pip of the image's Python, with its default index and no configuration of this machine's but certificates."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PIP_") or key == "PIP_CERT"}
    command = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(
        command, env={**kept, "PIP_CONFIG_FILE": os.devnull}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise RequestError(
            f"pip {arguments[0]} failed ({reason}): check the requirements, and that PyPI can be reached"
        )


def _package(site: Path, wheel: Path, digest: str) -> Package:
    stem, version = wheel.name.split("-")[:2]
    (info,) = site.glob(f"{stem}-{version}.dist-info")
    headers = HeaderParser().parsestr((info / "METADATA").read_text(encoding="utf-8"))
    with (info / "RECORD").open(encoding="utf-8", newline="") as file:
        files = [row[0] for row in csv.reader(file)]
    return Package(
        name=normal(headers["Name"]),
        version=headers["Version"],
        wheel=wheel.name,
        sha256=digest,
        wheel_bytes=wheel.stat().st_size,
        installed_bytes=sum((site / file).stat().st_size for file in files if (site / file).is_file()),
        modules=tuple(sorted(_modules(files))),
        requires=tuple(one for one in headers.get_all("Requires-Dist") or () if "extra ==" not in one),
    )


def _modules(files: Sequence[str]) -> set[str]:
    """The topmost packages and modules among installed files; `cuda` has none of its own, and so `cuda.bindings` is."""
    parts = [file.split("/") for file in files if ".dist-info/" not in file and "__pycache__" not in file]
    packages = {tuple(part[:-1]) for part in parts if part[-1] == "__init__.py"}
    modules = {(*part[:-1], part[-1].split(".")[0]) for part in parts if part[-1].endswith((".py", ".so"))}
    found = packages | {module for module in modules if module[-1] != "__init__"}
    return {".".join(one) for one in found if not any(one[:length] in packages for length in range(1, len(one)))}


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="tools.image_lock", description="Locks the packages of launch/Dockerfile.")
    parser.add_argument("--python", default=sys.executable, metavar="PROGRAM", help="the image's Python")
    return guarded("tools.image_lock", lambda: _run(parser.parse_args(argv)))


def _run(options: argparse.Namespace) -> int:
    for name in NAMES:
        packages = lock(name, options.python)
        size = sum(package.installed_bytes for package in packages)
        print(f"{name}: {len(packages)} packages, {size / 1e6:.1f} MB installed")
    return 0


if __name__ == "__main__":
    sys.exit(main())

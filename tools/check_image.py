"""Checks the image of launch/Dockerfile without a Docker engine: its packages, its size, its instructions.

    python -m tools.check_image [--emulate FOLDER --python python3.12]

Its packages are those of launch/requirements.lock: exactly what generate and cuq1-launch import, at whatever time, and
what these packages need in turn. Its size is computed from the lock. --emulate carries the Dockerfile out in a folder,
step by step, with --python in the base image's place, and then runs what the image is for, as its user, on the CPU: it
downloads the locked packages, and compiles the kernels, which takes minutes. Exit status 1 if something is wrong.
"""

import argparse
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from packaging.requirements import Requirement

from cuq1.cli import Parser, guarded
from tools import dockerfile, image_lock
from tools.image_imports import imports
from tools.image_lock import LAUNCH, Package, normal

ROOT = LAUNCH.parent
PROGRAMS = ("cuq1.generate", "cuq1.parallel.launch", "cuq1.parallel.topology")
# A package that nobody imports: CuPy's module finds the library in it.
LIBRARIES = {"cupy.cuda.nccl": "nvidia-nccl-cu13"}
# Requirements that are left out, as no code that runs here gets to them.
LEFT_OUT = {("tokenizers", "huggingface-hub"): "it downloads tokenizers by their names, and ours are files"}
MARKERS = {"python_version": "3.12", "python_full_version": "3.12.12", "platform_machine": "x86_64", "extra": "",
           "sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}  # fmt: skip
MOST_BYTES = 600_000_000  # of installed packages; a framework alone has more


def provider(module: str, packages: Iterable[Package]) -> Package | None:
    """The package that has a module, or what it is in."""
    names = {one: package for package in packages for one in package.modules}
    parts = module.split(".")
    prefixes = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return next((names[prefix] for prefix in prefixes if prefix in names), None)


def judge(packages: Sequence[Package], imported: Collection[str]) -> list[str]:
    """What a lock has too much or too little for modules that are imported, each in a sentence; none if empty."""
    locked = {package.name: package for package in packages}
    found, needed = [], set()
    for module in sorted(imported):
        package = provider(module, packages)
        if package is None:
            found.append(f"{module} is imported, and no locked package has it")
        else:
            needed.add(package.name)
        library = LIBRARIES.get(module)
        if library is not None and library not in locked:
            found.append(f"{module} is imported, and the library that it loads, {library}, is not locked")
        elif library is not None:
            needed.add(library)
    waiting = list(needed)
    while waiting:
        one = locked[waiting.pop()]
        for requirement in map(Requirement, one.requires):
            name = normal(requirement.name)
            if (one.name, name) in LEFT_OUT or not (requirement.marker is None or requirement.marker.evaluate(MARKERS)):
                continue
            if name not in locked:
                found.append(f"{one.name} needs {requirement}, which is not locked")
            elif not requirement.specifier.contains(locked[name].version, prereleases=True):
                found.append(f"{one.name} needs {requirement}, and {locked[name].version} is locked")
            elif name not in needed:
                needed.add(name)
                waiting.append(name)
    found += [f"{name} is locked, and nothing needs it" for name in sorted(locked.keys() - needed)]
    size = sum(package.installed_bytes for package in packages)
    if size > MOST_BYTES:
        found.append(f"packages of {size / 1e6:.0f} MB are locked, more than {MOST_BYTES / 1e6:.0f} MB")
    return found


def own_bytes(root: Path = ROOT) -> dict[str, int]:
    """Bytes of what the image has of cuq1 itself: its modules and model, kernels' sources, and compiled kernels."""
    folders = {"cuq1 and its model": "cuq1", "kernels' sources": "kernels_cu", "compiled kernels": "ptx"}
    return {
        name: sum(path.stat().st_size for path in (root / folder).rglob("*") if path.is_file() and _kept(path))
        for name, folder in folders.items()
    }


def expected_bytes(root: Path = ROOT) -> int:
    """Of all that the image adds to its base, with the kernels that are compiled in `root`."""
    packages = image_lock.read("requirements")
    return sum(package.installed_bytes for package in packages) + sum(own_bytes(root).values())


def _kept(path: Path) -> bool:
    return "__pycache__" not in path.parts


def report(packages: Sequence[Package]) -> str:
    """The sizes, in lines."""
    sizes = [(package.name, package.installed_bytes, package.wheel_bytes) for package in packages]
    sizes.sort(key=lambda one: -one[1])
    lines = [f"{name:24} {installed / 1e6:7.1f} MB   wheel {wheel / 1e6:6.1f} MB" for name, installed, wheel in sizes]
    own = own_bytes()
    lines += [f"{name:24} {size / 1e6:7.1f} MB" for name, size in own.items()]
    wheels = sum(one[2] for one in sizes)
    lines.append(f"the image adds {expected_bytes() / 1e6:.0f} MB to its base ({wheels / 1e6:.0f} MB to download)")
    if not list((ROOT / "ptx").glob("*.cubin")):
        lines.append("no kernels are compiled in this checkout: theirs are not counted")
    return "\n".join(lines)


def wrong(root: Path = ROOT) -> list[str]:
    """Everything that is wrong with the image, each in a sentence."""
    text = (root / "launch" / "Dockerfile").read_text(encoding="utf-8")
    ignored = (root / "launch" / "Dockerfile.dockerignore").read_text(encoding="utf-8")
    packages = image_lock.read("requirements", root / "launch")
    image_lock.read("build", root / "launch")
    return [*judge(packages, imports(root, "cuq1", PROGRAMS)), *dockerfile.problems(root, text, ignored)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="tools.check_image", description="Checks the image of launch/Dockerfile.")
    parser.add_argument("--emulate", type=Path, metavar="FOLDER", help="carry it out in an empty folder, and try it")
    parser.add_argument("--python", default=sys.executable, metavar="PROGRAM", help="what stands for the base image's")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help="as docker build has it")
    return guarded("tools.check_image", lambda: _run(parser.parse_args(argv)))


def _run(options: argparse.Namespace) -> int:
    found = wrong()
    print("\n".join([report(image_lock.read("requirements")), *found]))
    if not found and options.emulate is not None:
        from tools.image_emulation import emulate  # noqa: PLC0415  (Linux alone)

        arguments = dict(one.split("=", 1) for one in options.build_arg)
        found = emulate(ROOT, options.emulate, options.python, arguments)
        print("\n".join(found))
    print("as it should be" if not found else f"{len(found)} problems", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

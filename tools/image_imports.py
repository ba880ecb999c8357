"""Which modules a program imports, read from its sources: whatever any function of it may import, at any time."""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

REQUIRE = "require"  # cuq1.cuda.driver.require("cupy") imports what is not there on every machine


def imports(root: Path, package: str, entries: Iterable[str]) -> set[str]:
    """Dotted names of all modules outside `package` and the standard library that the entries' modules may import.

    root: the folder that holds the package. entries: modules of the package; what they import of it is followed.
    Raises FileNotFoundError for an entry that does not exist.
    """
    waiting, seen, found = list(entries), set(entries), set()
    while waiting:
        module = waiting.pop()
        path = _source(root, module)
        if path is None:
            raise FileNotFoundError(f"{module} is no module of {root}")
        for name in _names(ast.parse(path.read_text(encoding="utf-8")), package):
            if name.split(".")[0] != package:
                if name.split(".")[0] not in sys.stdlib_module_names:
                    found.add(name)
                continue
            # The package of a module runs first, and the last part may be a name in it.
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                inner = ".".join(parts[:end])
                if inner not in seen and _source(root, inner) is not None:
                    seen.add(inner)
                    waiting.append(inner)
    return found


def _source(root: Path, module: str) -> Path | None:
    base = root.joinpath(*module.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def _names(tree: ast.Module, package: str) -> Iterator[str]:
    """Every module that the source names: imported by a statement or by `require`, or one of `package` in a string."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield module
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.ImportFrom():
                raise ValueError(f"line {node.lineno} imports relatively, which is not followed")
            case ast.Call(
                func=ast.Name(id=name) | ast.Attribute(attr=name), args=[ast.Constant(value=str(module)), *_]
            ):
                if name in (REQUIRE, "import_module"):
                    yield module
            case ast.Constant(value=str(text)) if re.fullmatch(r"\w+(\.\w+)+", text) and text.startswith(f"{package}."):
                yield text  # a module that is started as a program

"""Where kernels' sources and compiled kernels lie."""

from pathlib import Path


def folder(name: str) -> Path:
    """The folder `kernels_cu` or `ptx`: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside, beside = package / name, package.parent / name
    return inside if inside.is_dir() else beside

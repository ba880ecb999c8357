"""Random checkpoints of the family, scaled down and packed."""

from pathlib import Path

from cuq1.pack import pack
from tools.checkpoint_qwen2 import NAMES, qwen2_config
from tools.make_checkpoint import write_qwen2_checkpoint

TINY = tuple(name for name in NAMES if name.endswith("-tiny"))


class Made:
    """Folders and packed files, made when they are first asked for."""

    def __init__(self, root: Path):
        self._root = root

    def folder(self, name: str) -> Path:
        found = self._root / name
        if not found.exists():
            write_qwen2_checkpoint(found, qwen2_config(name), 5, 1)
        return found

    def file(self, name: str, head: str = "fp16") -> Path:
        found = self._root / f"{name}-{head}.nanoqwen"
        if not found.exists():
            pack(self.folder(name), found, head == "int4")
        return found

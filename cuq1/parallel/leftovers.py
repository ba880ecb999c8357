"""Shared memory that killed ranks leave behind: files of NCCL's, which no process would ever remove.

NCCL makes files in /dev/shm to meet the host's other ranks, and unlinks each as soon as all have mapped it. Ranks that
are killed before that leave theirs, up to tens of megabytes a run. Nothing else here uses named shared memory.
"""

import os
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
PATTERN = "nccl-*"


class Leftovers:
    """before: names of files that are not the run's; by default, what is in `folder` now."""

    def __init__(self, before: set[str] | None = None, folder: Path = SHARED_MEMORY) -> None:
        self._folder = folder
        self.before = self._names() if before is None else before

    def clear(self) -> None:
        """After the end of all ranks: remove what came since, is this user's, and no living process has open or mapped.

        So another run's file stays, whose maker maps it until it is unlinked.
        """
        found = self._names() - self.before
        if found:
            for name in found - _used(found):
                with suppress(OSError):  # its own run has just removed it
                    (self._folder / name).unlink()

    def _names(self) -> set[str]:
        found = set()
        for path in self._folder.glob(PATTERN):  # none where there is no such folder
            with suppress(OSError):
                if path.lstat().st_uid == os.geteuid():
                    found.add(path.name)
        return found


def _used(names: set[str]) -> set[str]:
    """Those of the names that a process has open or mapped."""
    used: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        paths = []
        with suppress(OSError):  # it has ended, or is somebody else's, whose files are as well
            paths.append((process / "maps").read_text(errors="replace"))
            for link in (process / "fd").iterdir():
                with suppress(OSError):
                    paths.append(str(link.readlink()))
        text = "\n".join(paths)
        used |= {name for name in names if f"/{name}" in text}
    return used

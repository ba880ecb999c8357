"""Writing a .nanoqwen file (see NANOQWEN.md) piece by piece; it appears under its name whole, or not at all."""

import os
import secrets
import shutil
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cuq1.checkpoint.nanoqwen_dims import Dims
from cuq1.checkpoint.nanoqwen_header import CHUNK_BYTES, FILES, HEADER_BYTES, Header
from cuq1.errors import CheckpointError

Pieces = Iterator[tuple[str, npt.NDArray[Any]]]


def write_nanoqwen(
    path: Path,
    dims: Dims,
    files: Mapping[str, bytes],
    pieces: Callable[[], Pieces],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Write `path` and return its length in bytes.

    files: the bytes of some of FILES, config.json among them. pieces: yields a tensor's name and its next elements,
    in the file's order of tensors. progress: called with the bytes written and those to write.
    Raises CheckpointError where the disk has not enough space or refuses; whatever is raised, by `pieces` too, `path`
    is then as it was before and nothing else is left.
    """
    header = Header(dims, tuple(len(files.get(name, b"")) for name in FILES))
    _check_space(path, header.file_bytes)
    with _replacing(path) as file:
        # Its checksum comes last; until then the file does not even begin with the magic.
        _write(file, bytes(HEADER_BYTES), path)
        body = _Body(file, path, lambda done: progress(done, header.file_bytes))
        for name, (offset, _) in zip(FILES, header.slots, strict=True):
            if files.get(name):
                body.pad(offset)
                body.write(files[name])
        body.pad(header.tensors_offset)
        _write_tensors(body, header, pieces())
        body.pad(header.checksums_offset)
        table = body.checksums()
        _write(file, table, path)
        file.seek(0)
        _write(file, header.encode(zlib.crc32(table)), path)
        progress(header.file_bytes, header.file_bytes)
    return header.file_bytes


def _write_tensors(body: "_Body", header: Header, pieces: Pieces) -> None:
    places = header.dims.places(header.tensors_offset)
    left = iter(places.items())
    current, place = next(left)
    body.pad(place.offset)
    for name, values in pieces:
        if name != current:
            if body.position != place.end:
                raise AssertionError(f"{current} ends at byte {body.position}, not {place.end}")
            current, place = next(left)
            body.pad(place.offset)
        if name != current or values.dtype != place.dtype:
            raise AssertionError(f"{values.dtype} {name} comes where {place.dtype} {current} belongs")
        body.write(np.ascontiguousarray(values, place.dtype).reshape(-1).view(np.uint8).data)
    if body.position != place.end or next(left, None) is not None:
        raise AssertionError(f"no more tensors come after {current}")


class _Body:
    """What lies between the header and the checksums, with the checksum of each chunk as it is written."""

    def __init__(self, file: FileIO, path: Path, progress: Callable[[int], None]) -> None:
        self.position = HEADER_BYTES
        self._file = file
        self._path = path
        self._progress = progress
        self._sums: list[int] = []
        self._crc = 0

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            room = CHUNK_BYTES - (self.position - HEADER_BYTES) % CHUNK_BYTES
            piece, view = view[:room], view[room:]
            _write(self._file, piece, self._path)
            self._crc = zlib.crc32(piece, self._crc)
            self.position += len(piece)
            if len(piece) == room:
                self._end_chunk()
        self._progress(self.position)

    def pad(self, position: int) -> None:
        """Zeros up to `position`."""
        if position < self.position:
            raise AssertionError(f"{self.position} bytes are written, and what follows begins at {position}")
        self.write(bytes(position - self.position))

    def checksums(self) -> bytes:
        if (self.position - HEADER_BYTES) % CHUNK_BYTES:
            self._end_chunk()
        return np.array(self._sums, "<u4").tobytes()

    def _end_chunk(self) -> None:
        self._sums.append(self._crc)
        self._crc = 0


def _check_space(path: Path, needed: int) -> None:
    try:
        free = shutil.disk_usage(path.parent).free
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from None
    if needed > free:
        raise CheckpointError(
            f"{path} needs {needed} bytes, and its disk has {free} free: free some space, or choose another disk"
        )


def _write(file: FileIO, data: bytes | memoryview, path: Path) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[file.write(view) :]
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError | ValueError) -> CheckpointError:
    problem = error.strerror if isinstance(error, OSError) else error  # ValueError: a NUL byte in the path
    return CheckpointError(
        f"{str(path)!r} cannot be written ({problem}): check its folder, permissions, and the disk's free space"
    )


@contextmanager
def _replacing(path: Path) -> Iterator[FileIO]:
    """A new file that takes the name `path` once the block has ended well, and is removed otherwise."""
    partial = path.parent / f".nanoqwen.{secrets.token_hex(8)}.partial"
    try:
        try:
            with suppress(FileNotFoundError):
                if not stat.S_ISREG(path.stat().st_mode):  # which, too, finds names that cannot be
                    raise CheckpointError(f"{path} exists and is no file: choose another name")
            file = FileIO(partial, "x")  # unbuffered: closing it has nothing left to write, and cannot fail for that
        except (OSError, ValueError) as error:
            raise _unwritable(path, error) from None
        with file:
            yield file
            try:
                os.fsync(file.fileno())
            except OSError as error:  # a disk may say only now that it is full
                raise _unwritable(path, error) from None
        try:
            partial.replace(path)
        except OSError as error:
            raise _unwritable(path, error) from None
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    _keep_name(path.parent)


def _keep_name(folder: Path) -> None:
    """The file's name, too, outlasts a power failure, where the file system can say so."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

"""Where a checkpoint's tokenizer and template come from: a folder, or one file that holds them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cuq1.errors import TextError


@dataclass(frozen=True)
class PackedText:
    """The text files that one file, `path`, holds: `files` maps their names to their bytes."""

    path: str | Path
    files: Mapping[str, bytes]


TextSource = str | Path | PackedText


def label(source: TextSource, name: str) -> str:
    """What messages call one of the files."""
    return f"{source.path}: {name}" if isinstance(source, PackedText) else str(Path(source) / name)


def place(source: TextSource) -> str:
    """Where a file that is missing has to be put, as messages say it."""
    return (
        "into the folder that this was packed from, and pack it again"
        if isinstance(source, PackedText)
        else "into that folder"
    )


def read_file(source: TextSource, name: str) -> bytes | None:
    """The bytes of one of the files, None where there is none. Raises TextError where it cannot be read."""
    if isinstance(source, PackedText):
        return source.files.get(name)
    path = Path(source) / name
    if not os.path.lexists(path):  # a link to nowhere is not missing, and fails below
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise TextError(f"{path} cannot be read ({error}): fetch the file again") from error

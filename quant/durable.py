"""Files that are whole or not there, whatever happens to the process or the machine."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from .errors import BadInput

TEMPORARY_SUFFIX = ".writing"


def write_durably(path: Path, data: bytes) -> None:
    """Write a file under a temporary name, flush it to the disk, and rename it into place.

    Raises:
        BadInput: the disk is full. What was there before is untouched.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        flush_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise no_space_or(error, path) from error


def flush_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def no_space_or(error: OSError, path: Path) -> Exception:
    """`error` itself, or a BadInput where it means that the disk is full."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return BadInput(
            f"no space left while writing {path}: free some and run the same command again"
        )
    return error

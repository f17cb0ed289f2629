"""Atomic writes of result folders and files (write, fsync, rename)."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from ...quant.base.errors import BadInput


def stamped(root: Path, name: str, now: datetime | None = None) -> Path:
    """A path `root/<time>-<name>` that does not exist yet."""
    slug = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"
    stem = f"{(now or datetime.now()):%Y%m%d-%H%M%S}-{slug}"
    candidate, number = root / stem, 1
    while candidate.exists():
        number += 1
        candidate = root / f"{stem}-{number}"
    return candidate


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A temporary folder to write into, renamed to `target` when the block succeeds.

    Raises:
        BadInput: `target` exists, or its parent cannot be created.
    """
    if target.exists():
        raise BadInput(f"{target} exists: name another folder, or remove it")
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise BadInput(f"cannot make a folder in {target.parent}: a file is in the way") from error
    try:
        yield partial
        for path in partial.rglob("*"):
            if path.is_file():
                flush(path)
        partial.rename(target)
        flush(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` to write to, synced and renamed to it when the block succeeds."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        yield partial
        flush(partial)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def flush(path: Path) -> None:
    """fsync a file or a folder's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

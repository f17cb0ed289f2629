"""A journal of finished work that a killed run goes on from: JSON lines, appended and synced one by one."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .atomic_io import no_space_or, write_atomically


def line_of(record: Mapping[str, Any]) -> bytes:
    """A record as a line of JSON, its keys in order."""
    return json.dumps(record, sort_keys=True).encode() + b"\n"


class LineJournal:
    """An append-only file that one process at a time holds: its `header`, the first line, of the run that
    began it, and `records`, the lines after it. A partial last line, left by a kill, is cut off."""

    def __init__(self, path: Path, header: Mapping[str, Any]):
        """Open the file, or begin it with this header. Raises BlockingIOError: another process holds it;
        ValueError: its lines are damaged."""
        self._path = path
        if not path.exists():
            write_atomically(path, line_of(header))
        self._file = path.open("r+b")
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise BlockingIOError(f"{path} is held by another process") from error
            data = self._file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._file.truncate(len(whole))
            self._file.seek(len(whole))
            self.header, *self.records = (json.loads(line) for line in whole.splitlines())
        except BaseException:
            self._file.close()
            raise

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a line and sync it; from then on it survives a kill."""
        line = line_of(record)
        try:
            self._file.write(line)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise no_space_or(error, self._path) from error
        self.records.append(json.loads(line))  # as a resumed run reads it

    def close(self) -> None:
        """Release the lock; the file stays."""
        self._file.close()

"""Hot reload of files that change, and on SIGHUP. A bad new file leaves the old one in force."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....quant.base.errors import BadInput

_log = logging.getLogger(__name__)

INTERVAL_SECONDS = 2.0
"""How often the files are looked at: a few `stat` calls. Volumes of Kubernetes swap symbolic links, which
notifications of the files would miss."""


@dataclass(slots=True)
class Reloadable:
    """Something that is made of files.

    Attributes:
        name: the option and its file, for log lines.
        load: reads and validates the files, on a worker thread; raises `BadInput`.
        apply: puts the result in force, on the event loop.
    """

    name: str
    paths: Sequence[Path]
    load: Callable[[], Any]
    apply: Callable[[Any], None]
    seen: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.seen = self.signature()

    def signature(self) -> list[Any]:
        """What changes with the files: their times, sizes and inodes."""
        return [_signature(path) for path in self.paths]

    async def reload(self) -> None:
        """Read the files; one log line says how that went."""
        self.seen = self.signature()  # before they are read: a change meanwhile is seen next time
        try:
            value = await asyncio.to_thread(self.load)
            self.apply(value)
        except (BadInput, OSError) as error:
            _log.error("%s; the server keeps what it had", error)
        except Exception:
            _log.exception("%s: not read; the server keeps what it had", self.name)
        else:
            _log.info("%s: read again", self.name)


class Reloader:
    """Watches the files of some `Reloadable`s, and reloads each of them when one of its files changes."""

    def __init__(self) -> None:
        self._items: list[Reloadable] = []
        self._is_asked = asyncio.Event()

    @property
    def has_files(self) -> bool:
        return bool(self._items)

    def add(self, item: Reloadable) -> None:
        self._items.append(item)

    def reload_all(self) -> None:
        """Reload everything now; must be called on the event loop."""
        self._is_asked.set()

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_asked.wait(), INTERVAL_SECONDS)
            is_asked = self._is_asked.is_set()
            self._is_asked.clear()
            for item in self._items:
                if is_asked or item.signature() != item.seen:
                    await item.reload()


def _signature(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino

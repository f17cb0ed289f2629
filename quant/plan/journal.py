"""The work folder of a quantize run: a journal of finished layers, and the state to resume from.

`<output>.partial/` holds `journal.jsonl`, one header line, then one line for each finished layer, the exact
input hidden states of a layer (`hidden-00003.safetensors`), and the output folder so far (`checkpoint/`),
which is renamed to `<output>`. A line is appended only after the layer's shard and output hidden states are
fsynced, so the journal never lists a layer that a kill lost.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

from ...base.atomic_io import flush, make_folder
from ...base.errors import BadInput
from ...base.journal import LineJournal, line_of
from ..base import workers
from ..model.checkpoint import Checkpoint

_JOURNAL = "journal.jsonl"


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def digest_of(facts: Any) -> str:
    return sha256_of(json.dumps(facts, sort_keys=True).encode())


def sha256_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weight_digests(checkpoint: Checkpoint) -> dict[str, str]:
    """Hex digests of the weight files of a checkpoint, by name; each worker reads some."""
    shards = sorted(set(checkpoint.shard_of.values()))
    files = [checkpoint.folder / shard for shard in shards]
    sizes = [float(file.stat().st_size) for file in files]
    return dict(zip(shards, workers.shared_out(files, sizes, sha256_of_file), strict=True))


class Journal:
    """The open journal of one run, with records of the finished layers; `signature` is a digest of everything
    that the bytes of the result depend on, `threads` the thread count of the first run, and `parts` has a
    digest of each fact in the signature."""

    def __init__(
        self, folder: Path, signature: str, threads: int, parts: Mapping[str, str] | None = None
    ):
        """Start the work, or resume an earlier run's; BadInput for other, damaged or held work."""
        self.folder = folder
        self.checkpoint = folder / "checkpoint"
        path = folder / _JOURNAL
        if not path.exists():
            _require_ours(folder)
            make_folder(folder, "--output")
        try:
            header = {"signature": signature, "threads": threads, "parts": parts or {}}
            lines = LineJournal(path, header)
        except BlockingIOError as error:
            raise BadInput(f"another process is at work in {folder}: let it finish") from error
        except ValueError as error:
            raise BadInput(f"{path} is damaged: --restart throws the work away") from error
        if lines.header.get("signature") != signature:
            lines.close()
            begun, now = lines.header.get("parts") or {}, parts or {}
            names = [name for name in {**begun, **now} if begun.get(name) != now.get(name)]
            differing = ", ".join(names) if begun else "model, data, options or version"
            raise BadInput(
                f"{folder} holds unfinished work of another run (other {differing}): "
                "--restart throws it away, --output chooses another place"
            )
        self.signature = signature
        self.threads, self.layers = int(lines.header["threads"]), lines.records
        self._lines: LineJournal | None = lines

    def followed(self) -> Journal:
        """A copy for a worker that does not keep the journal."""
        follower = copy(self)
        follower._lines, follower.layers = None, list(self.layers)
        return follower

    def append(self, record: dict[str, Any]) -> None:
        """Record a finished layer, on disk where this worker keeps the journal."""
        if self._lines is not None:
            self._lines.append(record)
        else:
            self.layers.append(json.loads(line_of(record)))

    def hidden_path(self, index: int) -> Path:
        return self.folder / f"hidden-{index:05d}.safetensors"

    def forget_hidden(self, index: int) -> None:
        """Remove the hidden states that enter layer `index`."""
        path = self.hidden_path(index)
        for file in self.folder.glob(f"{path.stem}*") if self._lines is not None else ():
            file.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the lock; the folder stays."""
        if self._lines is not None:
            self._lines.close()

    def discard(self) -> None:
        remove_work(self.folder)
        self.close()

    def publish(self, output: Path) -> None:
        """Rename the finished checkpoint to `output` and remove the work folder."""
        flush(self.checkpoint)
        self.checkpoint.rename(output)
        flush(output.parent)
        self.discard()


def remove_work(folder: Path) -> None:
    """Remove a work folder, or raise BadInput where it is none. The journal goes last, so that a partly
    removed folder is still recognised."""
    if not folder.exists():
        return
    journal = folder / _JOURNAL
    if not journal.exists():
        _require_ours(folder)
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path != journal:
            path.unlink()
    journal.unlink(missing_ok=True)
    folder.rmdir()


def _require_ours(folder: Path) -> None:
    """Raises BadInput unless the folder is a work folder; it may lack a journal after an early kill."""
    if folder.exists() and any(not path.name.startswith(_JOURNAL) for path in folder.iterdir()):
        raise BadInput(
            f"{folder} is in the way and no work folder of llmopt: move it, or use --output"
        )

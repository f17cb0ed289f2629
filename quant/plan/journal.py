"""The work folder of a quantize run: a journal of finished layers, and the state to resume from.

`<output>.partial/` holds `journal.jsonl`, one header line, then one line for each finished layer, the exact
input hidden states of a layer (`hidden-00003.safetensors`), and the output folder so far (`checkpoint/`),
which is renamed to `<output>`. A line is appended only after the layer's shard and output hidden states are
fsynced, so the journal never lists a layer that a kill lost.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, BinaryIO

from ...base.atomic_io import flush, make_folder, no_space_or, write_atomically
from ...base.errors import BadInput
from ..base import workers
from ..model.checkpoint import Checkpoint

_JOURNAL = "journal.jsonl"
_CHECKPOINT = "checkpoint"


def sha256_of(data: bytes) -> str:
    """Hex digest."""
    return hashlib.sha256(data).hexdigest()


def sha256_of_file(path: Path) -> str:
    """Hex digest of a file of any size."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weight_digests(checkpoint: Checkpoint) -> dict[str, str]:
    """Hex digests of the weight files of a checkpoint, by name; each worker reads some."""
    shards = sorted(set(checkpoint.shard_of.values()))
    files = [checkpoint.folder / shard for shard in shards]
    sizes = [float(file.stat().st_size) for file in files]
    return dict(zip(shards, workers.shared_out(files, sizes, sha256_of_file), strict=True))


def work_folder(output: Path) -> Path:
    """Path of the work folder for `output`."""
    return output.with_name(output.name + ".partial")


class Journal:
    """The open journal of one run; one process at a time holds it.

    Attributes:
        folder: the work folder.
        signature: digest of everything that the bytes of the result depend on.
        threads: the thread count of the first run; sums depend on it in the last bit.
        layers: records of the finished layers, in order.
    """

    _file: BinaryIO | None = None

    def __init__(self, folder: Path, signature: str, threads: int):
        """Start the work in `folder`, or resume an earlier run's.

        Raises:
            BadInput: the folder belongs to other work, is damaged, or another process holds it.
        """
        self.folder = folder
        self.checkpoint = folder / _CHECKPOINT
        path = folder / _JOURNAL
        if not path.exists():
            _require_ours(folder)
            make_folder(folder, "--output")
            header = {"signature": signature, "threads": threads}
            write_atomically(path, _line(header))
        self._file = path.open("r+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise BadInput(f"another process is at work in {folder}: let it finish") from error
        records = self._read(self._file)
        if records[0].get("signature") != signature:
            self.close()
            raise BadInput(
                f"{folder} holds unfinished work of another run (other model, data, options or "
                "version): --restart throws it away, --output chooses another place"
            )
        self.signature = signature
        self.threads = int(records[0]["threads"])
        self.layers = records[1:]

    def followed(self) -> Journal:
        """A copy for a worker that does not keep the journal."""
        copy = Journal.__new__(Journal)
        copy.folder, copy.checkpoint, copy.signature = self.folder, self.checkpoint, self.signature
        copy.threads, copy.layers = self.threads, self.layers
        return copy

    def _read(self, file: BinaryIO) -> list[dict[str, Any]]:
        """The complete lines; a partial last line, left by a kill, is truncated."""
        data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        file.truncate(len(whole))
        file.seek(len(whole))
        try:
            records = [json.loads(line) for line in whole.splitlines()]
        except ValueError:
            records = []
        if not records:
            self.close()
            raise BadInput(f"{self.folder / _JOURNAL} is damaged: --restart throws the work away")
        return records

    def append(self, record: dict[str, Any]) -> None:
        """Record a finished layer (write and fsync)."""
        line = _line(record)
        try:
            if self._file is not None:
                self._file.write(line)
                self._file.flush()
                os.fsync(self._file.fileno())
        except OSError as error:
            raise no_space_or(error, self.folder / _JOURNAL) from error
        # Re-read as a resumed run would, so that both continue from the same record to the same bytes.
        self.layers.append(json.loads(line))

    def hidden_path(self, index: int) -> Path:
        """The file of the hidden states that enter layer `index`."""
        return self.folder / f"hidden-{index:05d}.safetensors"

    def forget_hidden(self, index: int) -> None:
        """Remove the hidden states that enter layer `index`."""
        path = self.hidden_path(index)
        for file in self.folder.glob(f"{path.stem}*") if self._file is not None else ():
            file.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the lock; the folder stays."""
        if self._file is not None:
            self._file.close()

    def discard(self) -> None:
        """Remove the work folder."""
        remove_work(self.folder)
        self.close()

    def publish(self, output: Path) -> None:
        """Rename the finished checkpoint to `output` and remove the work folder."""
        flush(self.checkpoint)
        self.checkpoint.rename(output)
        flush(output.parent)
        self.discard()


def remove_work(folder: Path) -> None:
    """Remove a work folder. The journal goes last, so that a partly removed folder is still recognised.

    Raises:
        BadInput: the folder is not a work folder.
    """
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


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True).encode() + b"\n"

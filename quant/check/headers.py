"""A checkpoint by its headers: names, dtypes and shapes of the tensors, without their values.

A fault of the files is a finding here, not an error, so that a check can name all of them at once.
"""

from __future__ import annotations

import struct
from collections import Counter
from pathlib import Path
from typing import Any

from ...base.errors import BadInput
from ..kinds.base.raw import Entries, read_headers
from ..model.checkpoint import INDEX_NAME, SINGLE_NAME, Checkpoint, indexed_shards, model_config
from .findings import Finding, Severity


class HeaderCheckpoint(Checkpoint):
    """A folder with `config.json`, and with safetensors files or only the index of them. Raises BadInput: no
    `config.json`, or neither weights nor an index of them.

    Attributes:
        entries: dtype, shape and place of each tensor whose file is here.
        findings: faults of the files.
        has_values: False where the index alone is here, so that dtypes and shapes are not known.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.folder = self.path if self.path.is_dir() else self.path.parent
        self.config = model_config(self.folder / "config.json")
        self._handles: dict[str, Any] = {}
        self.findings: list[Finding] = []
        self.entries: Entries = {}
        listed = indexed_shards(self.folder)
        if listed is None and not (self.folder / SINGLE_NAME).is_file():
            raise BadInput(
                f"{self.folder} has no weights: neither {SINGLE_NAME} nor {INDEX_NAME} is there"
            )
        shards = sorted(set(listed.values())) if listed else [SINGLE_NAME]
        present = [name for name in shards if (self.folder / name).is_file()]
        self.has_values = bool(present)
        self._read(present)
        self.shard_of = listed or dict.fromkeys(self.entries, SINGLE_NAME)
        if listed and self.has_values:
            self._check_index(listed, shards, present)

    def _read(self, shards: list[str]) -> None:
        owners: Counter[str] = Counter()
        for shard in shards:
            path = self.folder / shard
            try:
                entries = read_headers([path])
            except (struct.error, ValueError, KeyError, TypeError, OSError) as error:
                self._add("damaged-shard", shard, f"has no whole header ({error}): fetch it again")
                continue
            end = max((entry.stop for entry in entries.values()), default=0)
            if end > (size := path.stat().st_size):
                message = f"is cut off: {size:,} bytes of {end:,}: fetch it again"
                self._add("damaged-shard", shard, message)
            owners.update(entries.keys())
            self.entries |= entries
        for name in (name for name, count in owners.items() if count > 1):
            message = f"is in {owners[name]} files: loaders differ in the one that they take"
            self._add("overlapping-shards", name, message)

    def _check_index(self, listed: dict[str, str], shards: list[str], present: list[str]) -> None:
        for shard in (name for name in shards if name not in present):
            count = sum(1 for name in listed.values() if name == shard)
            message = f"is missing: {count} tensors of {INDEX_NAME} are in it: fetch it"
            self._add("missing-shard", shard, message)
        damaged = {finding.subject for finding in self.findings}
        for name, shard in listed.items():
            entry = self.entries.get(name)
            if shard not in present or shard in damaged or (entry and entry.path.name == shard):
                continue
            actual = f"in {entry.path.name}" if entry else "in no file"
            self._add("missing-tensor", name, f"is {actual}, and {INDEX_NAME} places it in {shard}")
        for name in self.entries.keys() - listed.keys():
            shard = self.entries[name].path.name
            message = f"is in {shard}, and not in {INDEX_NAME}: loaders by the index leave it out"
            self._add("unlisted-tensor", name, message, "suspect")
        self.shard_of = {name: shard for name, shard in listed.items() if name in self.entries}

    def _add(self, code: str, subject: str, message: str, severity: Severity = "broken") -> None:
        self.findings.append(Finding(code, subject, f"{subject} {message}", severity))

    def shape(self, name: str) -> tuple[int, ...]:
        return self.entries[name].shape if name in self.entries else ()

    def dtype_name(self, name: str) -> str:
        return self.entries[name].dtype if name in self.entries else ""

"""Cached calibration: statistics of every layer of the float model in a folder, shared by many runs.

    statistics.json          signature of model and data, completeness
    layer-00003.safetensors  Gram matrices and magnitudes of the inputs of layer 3
    hidden-00003.safetensors input hidden states of layer 3, while measuring
    sensitivity-00003.safetensors, costs-layer-00003.json, divergences.json   of method auto

Every layer is measured on the outputs of float layers, so the statistics are independent of method, bits and
group size: an `OnlineCalibration` of layers that stay as they are, kept. No layer compensates for the errors
of quantized layers before it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ...base.atomic_io import make_folder, write_atomically, write_tensors
from ...base.errors import BadInput
from ...base.progress import Progress
from ..base import workers
from ..base.device import HOST, give_back
from ..families.layer_map import LayerMap
from ..methods.base import InputStatistics, LayerResult
from ..model.checkpoint import read_json
from ..plan.journal import digest_of, sha256_of
from ..stream.calibration import Calibration
from ..stream.calls import KvRanges
from ..stream.layer_stream import LayerStream, input_groups
from .online_calibration import NoCalibration, OnlineCalibration
from .quantized_layer import HEAD_FAMILY, LayerStatistics

_FACTS, _BEGUN = "statistics.json", "begun.json"
_SPLITS = ("calibration", "held_out")
_PARTS = ("gram", "abs_sum", "abs_max")


Replaced = Callable[[str, Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""Takes a layer's name and the weights of its linears, and returns others."""


def is_measured(folder: Path, signature: str) -> bool:
    """True if the folder has all statistics for a digest of model and data."""
    path = folder / _FACTS
    return path.is_file() and read_json(path).get("signature") == signature


class StatisticsFolder:
    """A cache of statistics for a digest of model and data; BadInput for a folder of something else."""

    def __init__(self, folder: Path, signature: str):
        self.folder = folder
        self._signature = signature
        for name in (_FACTS, _BEGUN):
            path = folder / name
            if path.is_file():
                if read_json(path).get("signature") != signature:
                    raise BadInput(
                        f"{folder} holds statistics of another model, other calibration data or another "
                        "version: choose another --stats folder, or remove it"
                    )
                return
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise BadInput(f"{folder} holds other files than statistics: choose another --stats")

    @property
    def complete(self) -> bool:
        return (self.folder / _FACTS).is_file()

    def measure(
        self,
        stream: LayerStream,
        calibration: Calibration,
        progress: Progress,
        *,
        head: bool,
        kv: bool,
        replaced: Replaced | None = None,
    ) -> None:
        """Measure all layers that are not in the cache yet, with the output projection and ranges of keys and
        values where asked for, after the weights that `replaced` gives, or the float ones."""
        make_folder(self.folder, "--stats")
        header: dict[str, Any] = {"signature": self._signature}
        begun = self.folder / _BEGUN
        first = read_json(begun).get("layers", 0) if begun.is_file() else 0
        if workers.is_first():
            write_atomically(begun, json.dumps(header | {"layers": first}).encode())
        source = OnlineCalibration(
            stream,
            calibration,
            self._hidden(first) if first else None,
            sequential=False,
            kv=kv,
            unchanged=replaced is None,
        )
        progress.start("measuring", stream.num_layers, "layers")
        progress.advance(first)
        for index in range(first, stream.num_layers):
            family = stream.family(index)
            measured = source.measure(index, stream.tensors(index))
            if replaced is not None:
                weights = stream.weights(index, family.linears)
                stream.substitute(index, replaced(stream.prefix(index), weights))
            ranges = source.finish(index, LayerResult({}, {}, []))
            self._write(f"layer-{index:05d}", family, replace(measured, kv_ranges=ranges))
            source.save(self._hidden(index + 1))
            del measured  # which refers to the states before the layer
            workers.meet()
            if workers.is_first():
                write_atomically(begun, json.dumps(header | {"layers": index + 1}).encode())
            self._forget(f"hidden-{index:05d}*")
            stream.checkpoint.release()
            give_back()
            progress.advance()
        if head:
            self._write("head", HEAD_FAMILY, source.measure_head())
        progress.finish()
        if workers.is_first():
            write_atomically(self.folder / _FACTS, json.dumps(header).encode())
        workers.meet()
        self._forget("hidden-*")
        self._forget(_BEGUN)

    def _forget(self, pattern: str) -> None:
        for path in self.folder.glob(pattern) if workers.is_first() else ():
            path.unlink(missing_ok=True)

    def _write(self, name: str, family: LayerMap, measured: LayerStatistics) -> None:
        if not workers.is_first():
            return
        tensors: dict[str, torch.Tensor] = {}
        records = measured.statistics, measured.held_out
        for split, statistics in zip(_SPLITS, records, strict=True):
            for group in input_groups(family):
                if group[0] not in statistics:
                    continue
                record = statistics[group[0]]
                start = f"{split}.{group[0]}"
                tensors |= {f"{start}.{part}": getattr(record, part).cpu() for part in _PARTS}
                tensors[f"{start}.num_tokens"] = torch.tensor([record.num_tokens])
        if (ranges := measured.kv_ranges) is not None:
            tensors["kv_ranges"] = torch.stack([ranges.key, ranges.value])
        write_tensors(self.folder / f"{name}.safetensors", tensors)

    def read(self, name: str, family: LayerMap, device: torch.device = HOST) -> LayerStatistics:
        """The statistics of a layer or of the `head`, on a device; BadInput where they are missing."""
        path = self.folder / f"{name}.safetensors"
        if not path.is_file():
            raise BadInput(f"{path} is missing: remove the folder to measure again")
        tensors = load_file(path)
        splits: list[dict[str, InputStatistics]] = []
        for split in _SPLITS:
            statistics: dict[str, InputStatistics] = {}
            for group in input_groups(family):
                start = f"{split}.{group[0]}"
                if f"{start}.gram" not in tensors:
                    continue
                record = InputStatistics(0)
                for part in _PARTS:
                    setattr(record, part, tensors[f"{start}.{part}"].to(device))
                record.num_tokens = int(tensors[f"{start}.num_tokens"])
                statistics |= dict.fromkeys(group, record)
            splits.append(statistics)
        ranges = KvRanges(False, *tensors["kv_ranges"]) if "kv_ranges" in tensors else None
        return LayerStatistics(statistics=splits[0], held_out=splits[1], kv_ranges=ranges)

    def _hidden(self, index: int) -> Path:
        return self.folder / f"hidden-{index:05d}.safetensors"


class StoredNumbers:
    """Numbers that took long to measure, in a JSON file, by digests of `facts` and a key of each."""

    def __init__(self, path: Path, facts: Any):
        self._path = path
        self._facts = digest_of(facts)
        self._numbers: dict[str, float] = read_json(path) if path.is_file() else {}

    def __contains__(self, key: Any) -> bool:
        return self._digest(key) in self._numbers

    def __getitem__(self, key: Any) -> float:
        return self._numbers[self._digest(key)]

    def __setitem__(self, key: Any, number: float) -> None:
        self._numbers[self._digest(key)] = number

    def write(self) -> None:
        write_atomically(self._path, json.dumps(self._numbers, sort_keys=True))

    def _digest(self, key: Any) -> str:
        return sha256_of(f"{self._facts} {json.dumps(key, sort_keys=True)}".encode())


class CachedCalibration(NoCalibration):
    """A source that reads cached statistics and runs no layers; a later run reads the folder again."""

    def __init__(self, folder: StatisticsFolder, stream: LayerStream):
        self._folder, self._stream = folder, stream

    def measure(self, index: int, tensors: dict[str, torch.Tensor]) -> LayerStatistics:
        family, device = self._stream.family(index), self._stream.device
        return self._folder.read(f"layer-{index:05d}", family, device)

    def measure_head(self) -> LayerStatistics:
        return self._folder.read("head", HEAD_FAMILY, self._stream.device)

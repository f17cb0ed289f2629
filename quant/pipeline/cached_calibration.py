"""Cached calibration: statistics of every layer of the float model in a folder, shared by many runs.

    statistics.json          signature of model and data, completeness
    layer-00003.safetensors  Gram matrices and magnitudes of the inputs of layer 3
    hidden-00003.safetensors input hidden states of layer 3, while measuring
    sensitivity-00003.safetensors, costs-layer-00003.json, divergences.json   of method auto

Every layer is measured on the outputs of float layers, so the statistics are independent of method, bits and
group size. Unlike `OnlineCalibration`, no layer compensates for the quantization errors before it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
from ..methods.base import InputStatistics
from ..model.checkpoint import read_json
from ..plan.journal import digest_of, sha256_of
from ..plan.selection import HEAD
from ..stream.calibration import Calibration
from ..stream.calls import KvRanges, Shares, States, write_states
from ..stream.final_submodules import Finals
from ..stream.layer_stream import LayerStream, input_groups
from .online_calibration import NoCalibration, head_statistics, run_parts
from .quantized_layer import HEAD_FAMILY, LayerStatistics, QuantizedLayer

_FACTS, _BEGUN = "statistics.json", "begun.json"
_HIDDEN = re.compile(r"hidden-(\d{5}).*\.safetensors")
_SPLITS: tuple[str, ...] = ("calibration", "held_out")
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
        header = json.dumps({"signature": self._signature}).encode()
        if workers.is_first():
            write_atomically(self.folder / _BEGUN, header)
        stream.prepare(*calibration.samples)
        samples = calibration.samples, calibration.held_out_samples
        splits = dict(zip(_SPLITS, samples, strict=True))
        shares = stream.shares(splits)
        files = sum(share.count for share in shares.values() if share) or 1
        counts = Counter(int(m[1]) for p in self.folder.iterdir() if (m := _HIDDEN.match(p.name)))
        first = max((index for index, number in counts.items() if number == files), default=0)
        states = stream.begin(splits, shares, self._hidden(first) if first else None)
        progress.start("measuring", stream.num_layers, "layers")
        progress.advance(first)
        for index in range(first, stream.num_layers):
            states = self._measure_layer(stream, index, states, shares, kv, replaced)
            write_states(self._hidden(index + 1), states, shares)
            workers.meet()
            self._forget_hidden(f"hidden-{index:05d}*")
            stream.checkpoint.release()
            give_back()
            progress.advance()
        if head:
            records = [
                {HEAD: head_statistics(stream, part, shares[name])} for name, part in states.items()
            ]
            self._write("head", HEAD_FAMILY, records, None)
        progress.finish()
        if workers.is_first():
            write_atomically(self.folder / _FACTS, header)
        workers.meet()
        self._forget_hidden("hidden-*")
        self._forget_hidden(_BEGUN)

    def _forget_hidden(self, pattern: str) -> None:
        for path in self.folder.glob(pattern) if workers.is_first() else ():
            path.unlink(missing_ok=True)

    def _measure_layer(
        self,
        stream: LayerStream,
        index: int,
        states: Mapping[str, States],
        shares: Shares,
        kv: bool,
        replaced: Replaced | None,
    ) -> dict[str, States]:
        """Write what enters the linears of a layer; returns the states after it."""
        stream.load(index, stream.tensors(index))
        linears, (first, *_) = stream.family(index).linears, states
        # The pass that measures keeps the inputs of last linears, which the next one begins with.
        finals = None
        if replaced is None and not kv:
            finals = stream.final_submodules(index, states[first])
        records = [
            stream.measure(
                index,
                part,
                finals=Finals(finals if name == first else None),
                final=linears,
                share=share,
            )
            if (len(part) if share is None else share.samples)
            else {}
            for (name, part), share in zip(states.items(), shares.values(), strict=True)
        ]
        if replaced is not None:
            weights = stream.weights(index, stream.family(index).linears)
            stream.substitute(index, replaced(stream.prefix(index), weights))
        following, ranges = run_parts(stream, index, states, kv=kv, finals=finals)
        self._write(f"layer-{index:05d}", stream.family(index), records, ranges)
        stream.unload(index)
        return following

    def _write(
        self,
        name: str,
        family: LayerMap,
        records: Sequence[Mapping[str, InputStatistics]],
        ranges: KvRanges | None,
    ) -> None:
        if not workers.is_first():
            return
        tensors: dict[str, torch.Tensor] = {}
        for split, statistics in zip(_SPLITS, records, strict=True):
            for group in input_groups(family):
                if group[0] not in statistics:
                    continue
                record = statistics[group[0]]
                start = f"{split}.{group[0]}"
                tensors |= {f"{start}.{part}": getattr(record, part).cpu() for part in _PARTS}
                tensors[f"{start}.num_tokens"] = torch.tensor([record.num_tokens])
        if ranges is not None:
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
        self._ranges: KvRanges | None = None

    def measure(self, index: int, tensors: dict[str, torch.Tensor]) -> LayerStatistics:
        family, device = self._stream.family(index), self._stream.device
        measured = self._folder.read(f"layer-{index:05d}", family, device)
        self._ranges = measured.kv_ranges
        return measured

    def finish(self, index: int, work: QuantizedLayer) -> KvRanges | None:
        return self._ranges

    def measure_head(self) -> LayerStatistics:
        return self._folder.read("head", HEAD_FAMILY, self._stream.device)

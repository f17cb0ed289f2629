"""LoRA adapters: PEFT checkpoints, and their application to projections, per row of a batch (multi-LoRA)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from ....base.errors import BadInput
from ....quant.convert.adapter import AdapterWeights
from ...base.device import packed
from ...config.adapters import servable_settings
from .parallel import take_rows
from .projection import NO_SLOT, AdapterRows, LinearSite, SlotMask, SlottedWeights


@dataclass(frozen=True, slots=True)
class _Part:
    """One adapter's LoRA A (`down`) and B (`up`), for a slice of a stacked projection's outputs."""

    down: torch.Tensor
    up: torch.Tensor
    outputs: slice

    @property
    def is_finite(self) -> bool:
        """True if 0 times these weights, the part of other rows in a captured step, is 0."""
        return all(bool(weights.isfinite().all()) for weights in (self.down, self.up))


@dataclass(slots=True)
class _Delta:
    """LoRA delta of one projection, by rows: a pair of GEMMs per adapter, or one for all captured slots."""

    parts: dict[str, list[_Part]] = field(default_factory=dict)
    slots: SlottedWeights | None = None

    def __call__(self, x: torch.Tensor, y: torch.Tensor, adapters: AdapterRows) -> None:
        if isinstance(adapters, SlotMask):
            if self.slots is not None:
                self.slots.add(x, y, adapters)
            return
        for name, rows in adapters.items():
            if name not in self.parts:
                continue
            inputs = x if rows is None else x.index_select(0, rows)
            for part in self.parts[name]:
                change = functional.linear(functional.linear(inputs, part.down), part.up)
                target = y[:, part.outputs]
                if rows is None:
                    target.add_(change)
                else:
                    target.index_add_(0, rows, change)

    def takes(self, key: str) -> bool:
        slots = self.slots
        return all(
            slots is not None and slots.takes(part.outputs, len(part.down)) and part.is_finite
            for part in self.parts.get(key, [])
        )

    def put(self, key: str, slot: int) -> None:
        if self.slots is None:
            return
        self.slots.clear(slot)
        self.parts[key] = [
            _Part(*self.slots.put(slot, part.outputs, part.down, part.up), part.outputs)
            for part in self.parts.get(key, [])
        ]


AdapterParts = list[tuple[LinearSite, _Part]]
"""An adapter's weights, each with the linear that it changes."""


class AdapterBank:
    """The loaded adapters; steps map names to rows. BadInput: a folder is unreadable or does not fit.
    `folders` has PEFT folders by adapter name, `linears` those that support LoRA by their names below the
    decoder, `bases` prefixes that a checkpoint may put before them."""

    def __init__(
        self,
        folders: Mapping[str, Path],
        linears: Mapping[str, LinearSite],
        bases: Sequence[str],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._linears, self._bases = linears, bases
        self._like: Any = {"device": device, "dtype": dtype}
        self._deltas: dict[int, _Delta] = {}
        self._slots: dict[str, int] = {}
        self._free_slots: list[int] = []
        self._slot_of_column: torch.Tensor | None = None
        for name, folder in folders.items():
            self.attach(name, self.read(folder))

    @property
    def num_bytes(self) -> int:
        total = 0
        for delta in self._deltas.values():
            total += 0 if delta.slots is None else delta.slots.num_bytes
            apart = [parts for key, parts in delta.parts.items() if key not in self._slots]
            total += sum(part.down.nbytes + part.up.nbytes for parts in apart for part in parts)
        return total

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(key for delta in self._deltas.values() for key in delta.parts)

    @property
    def has_slots(self) -> bool:
        return self._slot_of_column is not None

    def prepare(self) -> None:
        """Have every linear take adapters, so that later ones find no kernel that fuses it away."""
        for site in self._linears.values():
            self._delta(site)

    def make_slots(self, num_slots: int, least_rank: int = 1) -> None:
        """Slots for the linears that take adapters, of their rank or `least_rank`; moves adapters to them."""
        parts = [p for d in self._deltas.values() for ps in d.parts.values() for p in ps]
        rank = max([least_rank, *(len(part.down) for part in parts)])
        like = torch.empty(0, **self._like)
        sites: dict[int, dict[tuple[int, int], LinearSite]] = {}
        for site in self._linears.values():
            if id(site.projection) in self._deltas:
                outputs = site.outputs.start, site.outputs.stop
                sites.setdefault(id(site.projection), {})[outputs] = site
        for projection, by_outputs in sites.items():
            outputs = [site.outputs for site in by_outputs.values()]
            inputs = next(iter(by_outputs.values())).in_features
            slots = SlottedWeights(outputs, inputs, num_slots, rank, like)
            self._deltas[projection].slots = slots
        numbers = torch.arange(1, num_slots + 1, device=like.device)
        self._slot_of_column = numbers.repeat_interleave(rank)
        self._free_slots = [*range(num_slots, NO_SLOT, -1)]
        for key in sorted(self.keys):
            self._place(key)

    def slots_of(self, keys: Iterable[str | None]) -> list[int] | None:
        """The slot of each row's adapter, `NO_SLOT` without one; None: some adapter is in no slot."""
        slots = {None: NO_SLOT, **self._slots}
        rows = list(keys)
        return [slots[key] for key in rows] if slots.keys() >= set(rows) else None

    def mask(self, slots: torch.Tensor) -> SlotMask:
        assert self._slot_of_column is not None
        return SlotMask.of(slots, self._slot_of_column, self._like["dtype"])

    def read(self, folder: Path) -> AdapterParts:
        """Read an adapter onto the device, on any thread. BadInput: a tensor or field is missing or wrong."""
        weights = AdapterWeights(Path(folder), servable_settings(Path(folder)))
        parts: AdapterParts = []
        for module in weights.modules:
            names = [module.removeprefix(base) for base in self._bases if module.startswith(base)]
            site = next((self._linears[name] for name in names if name in self._linears), None)
            if site is None:
                raise BadInput(
                    f"{weights.path}: {module} is no linear of this model that can take an adapter"
                )
            pair = weights.pair(module, site.out_features, site.in_features)
            down = pair.down if site.columns is None else pair.down[:, site.columns]
            up = take_rows(pair.up, site.rows) if site.rows else pair.up
            part = _Part(down.to(**self._like).contiguous(), up.to(**self._like), site.outputs)
            parts.append((site, part))
        return parts

    def attach(self, key: str, parts: AdapterParts) -> None:
        """Serve an adapter to rows of that key; no step may run meanwhile."""
        for site, part in parts:
            self._delta(site).parts.setdefault(key, []).append(part)
        self._place(key)

    def detach(self, key: str) -> None:
        """Free an adapter's weights; no step may run meanwhile."""
        for delta in self._deltas.values():
            delta.parts.pop(key, None)
        if (slot := self._slots.pop(key, None)) is not None:
            self._free_slots.append(slot)

    def _place(self, key: str) -> None:
        """Move an adapter to a free slot, if there is one that it fits; else its steps are not captured."""
        deltas = self._deltas.values()
        if self._free_slots and all(delta.takes(key) for delta in deltas):
            slot = self._slots[key] = self._free_slots.pop()
            for delta in deltas:
                delta.put(key, slot)

    def _delta(self, site: LinearSite) -> _Delta:
        delta = self._deltas.get(id(site.projection))
        if delta is None:
            delta = self._deltas[id(site.projection)] = _Delta()
            site.projection.delta = delta
        return delta


def rows_by_adapter(runs: Sequence[tuple[str | None, int]], device: torch.device) -> AdapterRows:
    """Rows of a step by adapter name, from its runs of (adapter or None, number of rows)."""
    rows: dict[str, list[int]] = {}
    begin = 0
    for name, count in runs:
        if name is not None:
            rows.setdefault(name, []).extend(range(begin, begin + count))
        begin += count
    if not rows:
        return {}
    copied = packed(list(rows.values()), device)
    return {
        name: None if len(indices) == begin else indices
        for name, indices in zip(rows, copied, strict=True)
    }

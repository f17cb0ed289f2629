"""LoRA adapters of an engine, attached to the model's projections (multi-LoRA batches)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from ...base.transfer import packed
from ..layers.projection import AdapterRows, LinearSite
from ..parallel.weight_slice import take_rows
from .read import read_adapter


@dataclass(frozen=True, slots=True)
class _Part:
    """One adapter's LoRA A (`down`) and B (`up`), for a slice of a stacked projection's outputs."""

    down: torch.Tensor
    up: torch.Tensor
    outputs: slice


@dataclass(slots=True)
class _Delta:
    """LoRA delta of one projection: a pair of GEMMs for each adapter that rows of the step use.

    Each row is computed with its request's adapter only.
    """

    parts: dict[str, list[_Part]] = field(default_factory=dict)

    def __call__(self, x: torch.Tensor, y: torch.Tensor, adapters: AdapterRows) -> None:
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

    def all_parts(self) -> list[_Part]:
        """The parts of all adapters."""
        return [part for parts in self.parts.values() for part in parts]


AdapterParts = list[tuple[LinearSite, _Part]]
"""An adapter's weights, each with the linear that it changes."""


class AdapterBank:
    """The loaded LoRA adapters; each step maps adapter names to its rows.

    Args:
        folders: PEFT folders by adapter name.
        linears: the linears that support LoRA, by their names below the decoder.
        bases: prefixes that a checkpoint may put before those names.

    Raises:
        BadInput: a folder is unreadable, does not match the model, or needs an unsupported feature.
    """

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
        for name, folder in folders.items():
            self.attach(name, self.read(folder))

    @property
    def num_bytes(self) -> int:
        """Bytes of all adapters' weights."""
        held = [part for delta in self._deltas.values() for part in delta.all_parts()]
        return sum(part.down.nbytes + part.up.nbytes for part in held)

    def prepare(self) -> None:
        """Have every linear take adapters, so that later ones find no kernel that fuses it away."""
        for site in self._linears.values():
            self._delta(site)

    def read(self, folder: Path) -> AdapterParts:
        """Read an adapter onto the device; changes nothing, so any thread may.

        Raises:
            BadInput: the folder is unreadable, does not match the model, or needs an unsupported feature.
        """
        parts: AdapterParts = []
        for module, pair in read_adapter(Path(folder), self._linears, self._bases).items():
            site = self._linears[module]
            down = pair.down if site.columns is None else pair.down[:, site.columns]
            up = take_rows(pair.up, site.rows) if site.rows else pair.up
            part = _Part(down.to(**self._like).contiguous(), up.to(**self._like), site.outputs)
            parts.append((site, part))
        return parts

    def attach(self, key: str, parts: AdapterParts) -> None:
        """Serve an adapter to rows of that key; no step may run meanwhile."""
        for site, part in parts:
            self._delta(site).parts.setdefault(key, []).append(part)

    def detach(self, key: str) -> None:
        """Free an adapter's weights; no step may run meanwhile."""
        for delta in self._deltas.values():
            delta.parts.pop(key, None)

    def _delta(self, site: LinearSite) -> _Delta:
        delta = self._deltas.get(id(site.projection))
        if delta is None:
            delta = self._deltas[id(site.projection)] = _Delta()
            site.projection.add_delta(delta)
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

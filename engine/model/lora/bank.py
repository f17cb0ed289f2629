"""The adapters of an engine, in place on the model's linears."""

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
    """A pair of one adapter, for some outputs of a projection."""

    down: torch.Tensor
    up: torch.Tensor
    outputs: slice


@dataclass(slots=True)
class _Delta:
    """What the adapters add to one projection: a product for each adapter that the step has rows of.

    A row takes part in its own adapter's products only, and adds to itself only.
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


class AdapterBank:
    """Adapters by name, each added to the projections that it changes; a step says which rows ask for which.

    Args:
        folders: PEFT folders by the adapters' names.
        linears: the linears that can take an adapter, by their names below the decoder.
        bases: what a checkpoint may put before those names.

    Raises:
        BadInput: a folder that cannot be read, does not fit the model, or asks for what is not supported.
    """

    def __init__(
        self,
        folders: Mapping[str, Path],
        linears: Mapping[str, LinearSite],
        bases: Sequence[str],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.num_bytes = 0
        deltas: dict[int, _Delta] = {}
        like: Any = {"device": device, "dtype": dtype}
        for name, folder in folders.items():
            for module, pair in read_adapter(Path(folder), linears, bases).items():
                site = linears[module]
                delta = deltas.get(id(site.projection))
                if delta is None:
                    delta = deltas[id(site.projection)] = _Delta()
                    site.projection.add_delta(delta)
                down = pair.down if site.columns is None else pair.down[:, site.columns]
                up = take_rows(pair.up, site.rows) if site.rows else pair.up
                part = _Part(down.to(**like).contiguous(), up.to(**like), site.outputs)
                delta.parts.setdefault(name, []).append(part)
                self.num_bytes += part.down.nbytes + part.up.nbytes


def rows_by_adapter(runs: Sequence[tuple[str | None, int]], device: torch.device) -> AdapterRows:
    """Rows of a step by adapter, from its runs of (adapter or None, number of rows)."""
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
        name: None if len(own) == begin else own for name, own in zip(rows, copied, strict=True)
    }

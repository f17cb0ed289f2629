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

"""IQ4_NL and IQ4_XS as grids: 16 values of a table, times a step for every 32 weights."""

from __future__ import annotations

import torch

from ..ggml.fit import in_chunks
from ..ggml.table_blocks import IQ4_VALUES, fit_nl, fit_xs, nearest_iq4, pack_nl, pack_xs
from ..kinds.ggml.scheme import GgufScheme
from ..tensors.gguf import GgufTensor
from .base import Parameters
from .scalar_grid import Affine, ScalarGrid

TABLES = ("IQ4_NL", "IQ4_XS")
_RUN = 32


class TableBlockGrid(ScalarGrid):
    """IQ4_NL: blocks of 32 with a step; IQ4_XS: super-blocks of 256 with `d * scale` for each run of 32.

    Its parameters: codes of the scales, float32 `[out, groups, runs]` (IQ4_NL: 1), and d, float32
    `[out, groups, 1]`.
    """

    def __init__(self, scheme: GgufScheme):
        self.scheme = scheme
        self.group = scheme.block[0]

    def fit(self, values: torch.Tensor, importance: torch.Tensor | None = None) -> Parameters:
        runs = values.reshape(-1, self.group // _RUN, _RUN)
        if importance is None:
            weights = runs.square()
        else:
            weights = importance.expand(values.shape).reshape(runs.shape)
        if self.scheme.type == "IQ4_NL":
            head = fit_nl(runs.squeeze(1), weights.squeeze(1))
            scales = torch.ones_like(head)
        else:
            scales, _, head = in_chunks(fit_xs, runs, weights)
            head = head.to(torch.float32)
        return tuple(part.view(*values.shape[:2], -1) for part in (scales, head))

    def affine(self, parameters: Parameters) -> Affine:
        scales, head = parameters
        step = head * scales
        flat = step == 0
        low, high = (torch.where(flat, 0.0, float(end)) for end in (IQ4_VALUES[0], IQ4_VALUES[-1]))
        return Affine(torch.where(flat, 1.0, step), None, low, high)

    def snap(self, scaled: torch.Tensor, affine: Affine) -> None:
        nearest = nearest_iq4(scaled)
        # The table has no 0, which is all that a step of 0 holds.
        torch.clamp(nearest, affine.low, affine.high, out=scaled)  # pyright: ignore[reportArgumentType, reportCallIssue]

    def tensor(self, values: torch.Tensor, parameters: Parameters) -> GgufTensor:
        scales, head = (part.flatten(0, 1) for part in parameters)
        levels = self.levels(values, parameters).view(-1, self.group)
        if self.scheme.type == "IQ4_NL":
            data = pack_nl(head, levels)
        else:
            data = pack_xs(scales, levels, head)
        return GgufTensor(data.view(values.shape[0], -1), self.scheme)

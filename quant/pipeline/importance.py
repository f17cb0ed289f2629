"""Measuring an importance matrix: the mean squares of what enters each linear of the float model."""

from __future__ import annotations

import torch

from ..base.progress import Progress
from ..calibration.calibration import Calibration
from ..gguf.architecture import architecture_of, expert_of, to_gguf
from ..gguf.imatrix import ImportanceMatrix
from ..methods.base import InputStatistics
from ..stream.layer_stream import LayerStream

# Means and tokens of each tensor's matrices, by their number.
_Seen = dict[str, dict[int, tuple[torch.Tensor, int]]]


def measure_importance(
    stream: LayerStream, calibration: Calibration, progress: Progress
) -> ImportanceMatrix:
    """Run the calibration texts through the model, one layer in memory at a time."""
    ids = calibration.token_ids
    stream.prepare(ids)
    states = stream.embed(ids)
    seen: _Seen = {}
    architecture = architecture_of(stream.checkpoint.config)
    progress.start("importance", stream.num_layers, "layers")
    for index in range(stream.num_layers):
        stream.load(index, stream.tensors(index))
        for name, statistics in stream.measure(index, states).items():
            module = f"{stream.prefix(index)}.{name}"
            _add(seen, to_gguf(module, architecture), expert_of(module), statistics)
        states = stream.run(index, states, in_place=True)
        stream.unload(index)
        stream.checkpoint.release()
        progress.advance()
    progress.finish()
    ordered = {name: [by[number] for number in sorted(by)] for name, by in seen.items()}
    return ImportanceMatrix(
        means={name: torch.stack([mean for mean, _ in rows]) for name, rows in ordered.items()},
        counts={
            name: torch.tensor([float(count) for _, count in rows])
            for name, rows in ordered.items()
        },
        dataset=calibration.source,
        chunk_size=ids.shape[1],
        chunks=ids.shape[0],
    )


def _add(seen: _Seen, tensor: str | None, expert: int | None, statistics: InputStatistics) -> None:
    """Note a linear's mean squares under its tensor's name and its expert's number."""
    if tensor is None:
        return
    count = statistics.num_tokens
    mean = statistics.gram.diagonal() / max(count, 1)
    # An expert without tokens: equal importance, as in llama.cpp.
    mean = mean.clone() if count else torch.ones_like(mean)
    seen.setdefault(f"{tensor}.weight", {})[expert or 0] = (mean, count)

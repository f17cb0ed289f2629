"""A layer of the stream as a `Block`: inputs from behind quantized layers, targets from the float model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager

import torch
from torch import nn

from ..stream.layer_stream import LayerStream
from ..stream.states import States


class StreamedBlock:
    """See `Block`.

    Args:
        inputs: the states that enter the layer behind quantized layers.
        targets: the states behind the float layer in the float model.
        status: takes a line that says how far the tuning is.
    """

    def __init__(
        self,
        stream: LayerStream,
        index: int,
        inputs: States,
        targets: States,
        seed: int,
        status: Callable[[str], None],
    ):
        self.num_samples = len(inputs)
        self.seed = seed
        self.compute = stream.compute
        self.status = status
        self._stream, self._index = stream, index
        self._inputs, self._targets = inputs, targets
        self._weights: dict[str, float] = {}

    def tuned(self, weights: Mapping[str, nn.Parameter]) -> AbstractContextManager[None]:
        return self._stream.replaced(self._index, weights)

    def batches(self, samples: torch.Tensor) -> Iterator[torch.Tensor]:
        yield from samples.split(self._stream.rows(self._inputs.token_ids))

    def losses(self, samples: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(samples))
        for name, output in self._stream.outputs(self._index, self._inputs, samples).items():
            if output.is_floating_point():
                target = self._targets.tensors[name][samples]
                error = (output.to(torch.float32) - target).square().flatten(1).sum(dim=1)
                total = total + error * self._weight(name)
        return total

    def _weight(self, name: str) -> float:
        """1 for the only output; of several, each is measured by its mean square."""
        if name not in self._weights:
            target = self._targets.tensors[name]
            alone = len(self._targets.tensors) == 1
            square = 1.0 if alone else float(target.to(torch.float32).square().mean())
            self._weights[name] = 1 / square if square else 0.0
        return self._weights[name]

"""The `Block` protocol: a loaded decoder layer that runs with gradients on its calibration inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn


class Block(Protocol):
    """A decoder layer, its inputs behind the quantized layers before it, and what it should return.

    The target is the output of the float model, whose layers before it are not quantized either.

    Attributes:
        num_samples: calibration samples.
        seed: of random choices in this layer.
        compute: dtype of the GEMMs, in which tuned weights are given.
    """

    num_samples: int
    seed: int
    compute: torch.dtype

    def tuned(self, weights: Mapping[str, nn.Parameter]) -> AbstractContextManager[None]:
        """A context in which the layer has these weights of its linears, parameters that take gradients."""
        ...

    def batches(self, samples: torch.Tensor) -> Iterator[torch.Tensor]:
        """The samples, by their numbers, in as many at a time as the layer is run on."""
        ...

    def losses(self, samples: torch.Tensor) -> torch.Tensor:
        """Squared error of the layer's output, summed over each of these samples `[samples]`."""
        ...

    def status(self, text: str, /) -> None:
        """Say how far the tuning is."""
        ...

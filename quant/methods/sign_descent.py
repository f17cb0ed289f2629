"""The `Block` protocol: a loaded decoder layer that runs with gradients on its calibration inputs."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from ..base import workers
from ..base.device import HOST
from ..base.lanes import LaneSums, totals

_STATUS_SECONDS = 1.0


class TunableBlock(Protocol):
    """A decoder layer after quantized ones; its target is the float model's; GEMMs are in `compute`."""

    num_samples: int
    seed: int
    compute: torch.dtype

    def tuned(self, weights: Mapping[str, nn.Parameter]) -> AbstractContextManager[None]:
        """A context in which the layer has these weights of its linears, parameters that take gradients."""
        ...

    def batches(self, samples: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Places among these samples, and numbers, as many as the layer runs on; of a worker one by one."""
        ...

    def losses(self, samples: torch.Tensor) -> torch.Tensor:
        """Squared error of the layer's output, summed over each of these samples `[samples]`."""
        ...

    def status(self, text: str, /) -> None: ...


class TunedRounding(ABC):
    """Parameters of one linear, which `descend` changes in place."""

    def __init__(self, *tuned: torch.Tensor):
        self._tuned, self._kept = tuned, [value.clone() for value in tuned]

    def keep(self) -> None:
        for kept, value in zip(self._kept, self._tuned, strict=True):
            kept.copy_(value)

    def recall(self) -> None:
        for kept, value in zip(self._kept, self._tuned, strict=True):
            value.copy_(kept)

    @abstractmethod
    def write(self, into: torch.Tensor) -> None:
        """The weight under the present parameters in `into` `[out, in]`, in its dtype."""

    @abstractmethod
    def descend(self, gradient: torch.Tensor, rate: float) -> None:
        """One step for the gradient of the weight `[out, in]`; its length is `rate` times the usual one."""


def tune(
    block: TunableBlock,
    roundings: Mapping[str, TunedRounding],
    shapes: Mapping[str, torch.Size],
    *,
    iters: int,
    rate: float,
    batch_size: int,
) -> float:
    """Tune the roundings, and leave them at the best parameters; the best loss, as a share of the first. A
    batch is judged against the first loss on its samples, as batches differ more than iterations. `rate` is
    the first. Raises RuntimeError: the block has no gradients."""
    weights = {
        name: nn.Parameter(torch.empty(shape, dtype=block.compute))
        for name, shape in shapes.items()
    }
    for name, rounding in roundings.items():
        rounding.write(weights[name].data)
    generator = torch.Generator(HOST).manual_seed(block.seed)
    best, shown, began = 1.0, time.monotonic(), time.monotonic()
    with _deterministic(), block.tuned(weights):
        plain = _plain_losses(block)
        for iteration, samples in zip(
            range(iters), _batches(block.num_samples, batch_size, generator), strict=False
        ):
            loss = _backward(block, samples, float(plain[samples].sum()), weights)
            if loss < best:
                best = loss
                for rounding in roundings.values():
                    rounding.keep()
            for name, rounding in roundings.items() if iteration + 1 < iters else ():
                # An expert that no token of the batch reached has no gradient and stays as it is.
                if (gradient := weights[name].grad) is not None:
                    with torch.no_grad():
                        rounding.descend(gradient, rate * (1 - iteration / iters))
                        rounding.write(weights[name].data)
                    weights[name].grad = None
            if time.monotonic() - shown > _STATUS_SECONDS:
                shown = time.monotonic()
                speed = (iteration + 1) / (shown - began)
                block.status(
                    f"iteration {iteration + 1}/{iters}, {speed:.1f}/s, loss {loss:.3f} of the start's"
                )
    for rounding in roundings.values():
        rounding.recall()
    return best


def _batches(
    num_samples: int, batch_size: int, generator: torch.Generator
) -> Iterator[torch.Tensor]:
    """Batches of sample numbers on the host, without end; each is drawn once before any is drawn again."""
    size = min(batch_size, num_samples)
    left = torch.empty(0, dtype=torch.int64, device=HOST)
    while True:
        if len(left) < size:
            left = torch.randperm(num_samples, generator=generator, device=HOST)
        batch, left = left[:size], left[size:]
        yield batch.sort().values


@torch.no_grad()
def _plain_losses(block: TunableBlock) -> torch.Tensor:
    """The loss of each sample at the beginning `[samples]`, on the host."""
    samples = torch.arange(block.num_samples, device=HOST)
    own = [block.losses(part).to(HOST) for _, part in block.batches(samples)]
    return torch.cat([part for worker in workers.gathered(own) for part in worker])


def _backward(
    block: TunableBlock, samples: torch.Tensor, plain: float, weights: Mapping[str, nn.Parameter]
) -> float:
    """Gradients of a batch's loss, over that of the beginning, which is returned."""
    losses: list[float] = []
    scale = 1 / plain if plain else 1.0
    sums = LaneSums()
    for index, part in block.batches(samples):
        loss = block.losses(part).sum() * scale
        loss.backward()
        losses.append(float(loss.detach()))
        if workers.together():
            sums.add(index, [weight.grad for weight in weights.values()])
            for weight in weights.values():
                weight.grad = None
    if workers.together():
        (gradients,) = totals([sums], [[weight.data for weight in weights.values()]])
        for weight, gradient in zip(weights.values(), gradients, strict=True):
            weight.grad = gradient
    return sum((loss for worker in workers.gathered(losses) for loss in worker), 0.0)


@contextmanager
def _deterministic() -> Iterator[None]:
    """Sums in an order that does not depend on the threads' timing: a resumed run gives the same bytes."""
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = False
    try:
        with torch.enable_grad():
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
        settings.fill_uninitialized_memory = filled

"""The model's own forward pass with its decoder layers replaced: what each is told, and the head's input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from ..model.meta_model import MetaModel


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of a layer's call."""

    arguments: tuple[Any, ...]
    named: dict[str, Any]

    def told(self) -> tuple[Any, ...]:
        """All of them, in one nested value."""
        return self.arguments, self.named

    def split(self) -> tuple[torch.Tensor, Call]:
        """The hidden states, and the other arguments."""
        if self.arguments:
            return self.arguments[0], Call(self.arguments[1:], self.named)
        named = dict(self.named)
        return named.pop("hidden_states"), Call((), named)


Stub = Callable[[int, Call], Any]
"""Takes a layer's index and call, and returns its result."""


class Reached(Exception):
    """Raised by a stub to end the pass."""


@torch.no_grad()
def forward(
    model: MetaModel,
    input_ids: torch.Tensor,
    stub: Stub,
    images: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> torch.Tensor | None:
    """Run the model on `[samples, length]` ids with `stub` in place of its layers, up to its output
    projection, whose input is returned; None if a stub raised `Reached`, or one of `model.ends` was called.
    Call it inside `MetaModel.around`.

    Args:
        images: other arguments of the model, such as `pixel_values`.
    """
    head = model.model.get_output_embeddings()
    read: list[torch.Tensor] = []

    def at_head(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        read.append(inputs[0])
        raise Reached

    # Before the hook that would load its weight.
    handle = None if head is None else head.register_forward_pre_hook(at_head, prepend=True)
    try:
        with (
            _replaced(model.layers, stub),
            _replaced(model.ends, _end),
            model.around.lookup,
        ):
            model.model(input_ids=input_ids, use_cache=False, **images)
    except Reached:
        return read[0] if read else None
    finally:
        if handle is not None:
            handle.remove()
    raise ValueError("its output projection was not called")


@contextmanager
def _replaced(layers: Sequence[Any], stub: Stub) -> Iterator[None]:
    for index, layer in enumerate(layers):
        layer.forward = _forward_of(index, stub)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _end(_: int, __: Call) -> Any:
    raise Reached


def _forward_of(index: int, stub: Stub) -> Callable[..., Any]:
    def run(*arguments: Any, **named: Any) -> Any:
        return stub(index, Call(arguments, named))

    return run

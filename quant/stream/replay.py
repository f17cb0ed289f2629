"""Layers of any form, by replay: the model's own forward pass, with the layers before one replaced by what
they returned, leads to that layer's arguments.

So a layer gets whatever the model tells it: embeddings of the token ids, other layers' outputs, shared keys
and values. A dry run with zeros as weights shows what each layer returns; which of it a later layer reads is
found by changing it. That is carried, the rest is dropped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from ..model.meta_model import MetaModel
from .chain import Rows
from .forward import Call, Reached, forward
from .nested import tensors_of
from .outcome import Outcome, outcome_of, template_of
from .states import States


class Replay:
    """A walk that replays the model's forward pass up to each layer.

    Args:
        token_ids: one sample `[1, length]`.

    Raises:
        ValueError: a layer runs more than once in a pass, or returns what cannot be divided into samples.
    """

    max_rows: int | None = None

    def __init__(self, model: MetaModel, token_ids: torch.Tensor):
        self._model = model
        once, twice = _dry_run(model, token_ids), _dry_run(model, token_ids.repeat(2, 1))
        order = [index for index, _ in once]
        if not order:
            raise ValueError("a text reaches none of them")
        if sorted({*order}) != order:
            raise ValueError("a layer runs more than once in a pass, or before an earlier one")
        self._templates = {
            index: template_of(first, second)
            for (index, first), (_, second) in zip(once, twice, strict=True)
        }
        del once, twice
        self._read_by = self._readers(token_ids)

    def _readers(self, token_ids: torch.Tensor) -> dict[str, int]:
        """For each carried tensor the last layer that reads it, or one past the last for the head."""
        plain = self._fingerprints(States(token_ids, {}))
        generator = torch.Generator().manual_seed(0)
        last: dict[str, int] = {}
        for index, template in self._templates.items():
            for number, leaf in enumerate(template.leaves):
                changed = other_than(leaf.blank(1), generator)
                if changed is None:
                    continue
                name = _name(index, number)
                value = changed if leaf.dim is None else leaf.by_sample(changed, 1)
                seen = self._fingerprints(States(token_ids, {name: value}))
                readers = [at for at, print_ in seen.items() if print_ != plain[at] and at > index]
                if readers and leaf.dim is None:
                    raise ValueError("a layer reads what an earlier one returned for all samples")
                if readers:
                    last[name] = max(readers)
        return last

    def _fingerprints(self, states: States) -> dict[int, str]:
        """A digest of the arguments of every layer, and of the head's input."""
        prints: dict[int, str] = {}

        def stub(index: int, call: Call) -> Any:
            prints[index] = _digest(tensors_of(call.told()))
            return self._play(index, call, states, slice(0, 1))

        read = forward(self._model, states.token_ids, stub)
        prints[len(self._model.layers)] = _digest([] if read is None else [read])
        return prints

    def _play(self, index: int, call: Call, states: States, rows: Rows) -> Any:
        """Return from a layer's call what was carried, and zeros elsewhere."""
        template = self._templates[index]
        tensors = []
        for number, leaf in enumerate(template.leaves):
            carried = states.tensors.get(_name(index, number))
            if carried is None:
                tensors.append(leaf.blank(len(states.token_ids[rows])))
            else:
                tensors.append(carried if leaf.dim is None else leaf.restored(carried[rows]))
        return template.play(call, tensors)

    def enter(self, token_ids: torch.Tensor, rows: int) -> States:
        """Nothing is carried into the first layer: it is replayed from the ids."""
        return States(token_ids, {})

    def called(self, index: int) -> bool:
        return index in self._templates

    def call(self, index: int, states: States, rows: Rows) -> Call:
        reached: list[Call] = []

        def stub(at: int, call: Call) -> Any:
            if at == index:
                reached.append(call)
                raise Reached
            return self._play(at, call, states, rows)

        forward(self._model, states.token_ids[rows], stub)
        return reached[0]

    def following(self, index: int, states: States, *, in_place: bool) -> States:
        """Buffers of what nothing reads any more are used again, where they may be."""
        kept = {name: t for name, t in states.tensors.items() if self._read_by[name] > index}
        free = [t for name, t in states.tensors.items() if name not in kept] if in_place else []
        samples = len(states)
        for number, leaf in enumerate(self._templates[index].leaves):
            name = _name(index, number)
            if name in self._read_by:
                shape = leaf.by_sample(leaf.blank(1), 1).shape[1:]
                position = next(
                    (
                        p
                        for p, t in enumerate(free)
                        if t.shape[1:] == shape and t.dtype == leaf.dtype
                    ),
                    None,
                )
                reused = None if position is None else free.pop(position)
                kept[name] = (
                    torch.empty(samples, *shape, dtype=leaf.dtype) if reused is None else reused
                )
        return States(states.token_ids, kept)

    def read(self, index: int, outcome: Outcome, samples: int) -> dict[str, torch.Tensor]:
        leaves = self._templates[index].leaves
        return {
            name: leaves[number].by_sample(tensor, samples)
            for number, tensor in enumerate(outcome.tensors())
            if (name := _name(index, number)) in self._read_by
        }

    def keep(self, index: int, outcome: Outcome, following: States, rows: Rows) -> None:
        following.put(rows, self.read(index, outcome, len(following.token_ids[rows])))

    def head_input(self, states: States, rows: slice) -> torch.Tensor:
        read = forward(
            self._model,
            states.token_ids[rows],
            lambda index, call: self._play(index, call, states, rows),
        )
        assert read is not None
        return read


def _name(index: int, number: int) -> str:
    return f"{index}.{number}"


def _dry_run(model: MetaModel, token_ids: torch.Tensor) -> list[tuple[int, Outcome]]:
    """The outcome of each layer, in the order of their calls, with zeros as weights."""
    outcomes: list[tuple[int, Outcome]] = []

    def stub(index: int, call: Call) -> Any:
        layer = model.layers[index]
        model.fill_with_zeros(index)
        try:
            outcome = outcome_of(
                call, lambda: type(layer).forward(layer, *call.arguments, **call.named)
            )
        finally:
            model.empty(index)
        outcomes.append((index, outcome))
        return outcome.result

    forward(model, token_ids, stub)
    return outcomes


def other_than(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor | None:
    """A tensor of other values; None where there are none, or no values."""
    if not tensor.numel():
        return None
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
    return ~tensor if tensor.dtype == torch.bool else tensor + 1


def _digest(tensors: Sequence[torch.Tensor]) -> str:
    digest = hashlib.sha1(usedforsecurity=False)
    for tensor in tensors:
        digest.update(str(tensor.shape).encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()

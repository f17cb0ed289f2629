"""Layers of any form, by replay: the model's own forward pass leads to a layer's arguments.

Layers before one are replaced by what they returned. A dry run with zeros as weights shows what each returns;
what a later layer reads is found by changing it, and carried. Samples with images are replayed one at a time,
with features computed once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...base.errors import BadInput
from ..model.meta_model import MetaModel
from .calibration import ImageInputs
from .calls import (
    Call,
    Outcome,
    Reached,
    States,
    Stub,
    forward,
    outcome_of,
    template_of,
    tensors_of,
)
from .chain import Rows, Walk

_FEATURES = "get_image_features"
_DIGEST_VALUES = 2**16  # of a tensor that a layer is given: what changes, changes all of it
_TEXT = ImageInputs()
_FIRST = slice(0, 1)


class Replay(Walk):
    """Replay of the model's forward pass up to each layer, on texts; `_read_by`: last reader of tensors.

    Found on one sample `[1, length]`. ValueError: a layer runs twice, or without samples.
    """

    _templates: dict[int, Any]
    _read_by: dict[str, int]

    def __init__(self, model: MetaModel, token_ids: torch.Tensor):
        self._model = model
        sample = States(token_ids, {})
        once, twice = self._dry_run(sample), self._dry_run(States(token_ids.repeat(2, 1), {}))
        if sorted(once) != list(once):
            raise ValueError("a layer runs before an earlier one in a pass")
        self._templates = {
            index: template_of(first, second)
            for (index, first), second in zip(once.items(), twice.values(), strict=True)
        }
        del once, twice
        self._read_by = self._readers(sample)
        for index, template in self._templates.items():
            for number, leaf in enumerate(template.leaves):
                if leaf.dim is None and _name(index, number) in self._read_by:
                    raise ValueError("a layer reads what an earlier one returned for all samples")

    def enter(self, token_ids: torch.Tensor, rows: int) -> States:
        return States(token_ids, {})  # the first layer is replayed from the ids and the images

    def called(self, index: int) -> bool:
        return index in self._templates

    def call(self, index: int, states: States, rows: Rows) -> Call:
        reached: list[Call] = []

        def stub(at: int, call: Call) -> Any:
            if at == index:
                reached.append(call)
                raise Reached
            return self._play(at, call, states, rows)

        self._pass(states, rows, stub)
        return reached[0]

    def head_input(self, states: States, rows: slice) -> torch.Tensor:
        read = self._pass(states, rows, lambda index, call: self._play(index, call, states, rows))
        assert read is not None
        return read

    def _digests(self, states: States) -> dict[int, Any]:
        """A digest of the arguments of every layer, and of the head's input, for one sample."""
        digests: dict[int, Any] = {}

        def stub(index: int, call: Call) -> Any:
            digests[index] = self._digest(tensors_of(call))
            return self._play(index, call, states, _FIRST)

        read = self._pass(states, _FIRST, stub)
        digests[len(self._model.layers)] = self._digest([] if read is None else [read])
        return digests

    def _dry_run(self, samples: States) -> dict[int, Outcome]:
        """The outcome of each layer with zeros as weights, in the order of their calls."""
        outcomes: dict[int, Outcome] = {}

        def stub(index: int, call: Call) -> Any:
            if index in outcomes:
                raise ValueError("a layer runs more than once in a pass")
            layer = self._model.layers[index]
            self._model.fill_with_zeros(index)
            try:
                outcomes[index] = outcome_of(
                    call, lambda: type(layer).forward(layer, *call.arguments, **call.named)
                )
            finally:
                self._model.empty(index)
            return outcomes[index].result

        self._pass(samples, slice(None), stub)
        if not outcomes:
            raise ValueError("a sample reaches none of them")
        return outcomes

    def _readers(self, sample: States) -> dict[str, int]:
        """The last layer that reads each tensor, found by changing it."""
        plain = self._digests(sample)
        generator = torch.Generator().manual_seed(0)
        last: dict[str, int] = {}
        for index in self._templates:
            for number, leaf in enumerate(self._leaves(index)):
                if (changed := other_than(leaf, generator)) is None:
                    continue
                seen = self._digests(self._changed(sample, index, number, changed))
                readers = [at for at, digest in seen.items() if digest != plain.get(at)]
                if readers:
                    last[_name(index, number)] = max(readers)
        return last

    def _leaves(self, index: int) -> list[torch.Tensor]:
        """Tensors of the shapes that a layer returns for one sample."""
        return [leaf.blank(1) for leaf in self._templates[index].leaves]

    def _changed(self, sample: States, index: int, number: int, tensor: torch.Tensor) -> States:
        """The states of a sample with one tensor that a layer returned."""
        leaf = self._templates[index].leaves[number]
        value = tensor if leaf.dim is None else leaf.by_sample(tensor, 1)
        return States(sample.token_ids, {_name(index, number): value})

    def _pass(self, states: States, rows: Rows, stub: Stub) -> torch.Tensor | None:
        """The model's forward pass over some samples, with `stub` in place of its layers."""
        return forward(self._model, states.token_ids[rows], stub)

    def _play(self, index: int, call: Call, states: States, rows: Rows) -> Any:
        """Return from a layer's call what was carried; zeros stand for what nothing reads."""
        template = self._templates[index]
        tensors = []
        for number, leaf in enumerate(template.leaves):
            carried = states.tensors.get(_name(index, number))
            if carried is None:
                tensors.append(leaf.blank(len(states.token_ids[rows])))
            else:
                tensors.append(carried if leaf.dim is None else leaf.restored(carried[rows]))
        return template.outcome.play(call, tensors)

    def _digest(self, tensors: Sequence[torch.Tensor]) -> Any:
        """A value that differs where the tensors do."""
        digest = hashlib.sha1(usedforsecurity=False)
        for tensor in tensors:
            digest.update(str(tensor.shape).encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def following(self, index: int, states: States, *, in_place: bool) -> States:
        """Buffers of what nothing reads any more are used again, where they may be."""
        kept = {name: t for name, t in states.tensors.items() if self._read_by[name] > index}
        free = [t for name, t in states.tensors.items() if name not in kept] if in_place else []
        for number, leaf in enumerate(self._templates[index].leaves):
            name = _name(index, number)
            if name not in self._read_by:
                continue
            shape = leaf.by_sample(leaf.blank(1), 1).shape[1:]
            alike = (
                n for n, t in enumerate(free) if t.shape[1:] == shape and t.dtype == leaf.dtype
            )
            if (number_free := next(alike, None)) is not None:
                kept[name] = free.pop(number_free)
            else:
                kept[name] = torch.empty(len(states), *shape, dtype=leaf.dtype)
        return States(states.token_ids, kept)

    def read(self, index: int, outcome: Outcome, samples: int) -> dict[str, torch.Tensor]:
        leaves = self._templates[index].leaves
        return {
            name: leaves[number].by_sample(tensor, samples)
            for number, tensor in enumerate(tensors_of(outcome))
            if (name := _name(index, number)) in self._read_by
        }


class SampleReplay(Replay):
    """A replay of samples one at a time, each with images of its own; found on one sample `[1, length]`."""

    max_rows: int | None = 1

    def __init__(self, model: MetaModel, token_ids: torch.Tensor, images: ImageInputs):
        self._model = model
        self._features: dict[ImageInputs, Any] = {}
        owners = [m for m in model.model.modules() if callable(getattr(m, _FEATURES, None))]
        if not owners:
            raise BadInput(
                f"{type(model.model).__name__} has no {_FEATURES}: calibrate it with text alone"
            )
        self._owner = owners[-1]  # the innermost module that computes image features
        sample = States(token_ids, {}, (images,))
        self._templates = self._dry_run(sample)  # outcomes
        self._read_by = self._readers(sample)

    def _pass(self, states: States, rows: Rows, stub: Stub) -> torch.Tensor | None:
        row = _row(rows)
        images = states.images[row] if states.images else _TEXT
        with self._kept_features(images):
            return forward(self._model, states.token_ids[row : row + 1], stub, images.tensors)

    @contextmanager
    def _kept_features(self, images: ImageInputs) -> Iterator[None]:
        """Compute the features of a sample's images in its first pass alone."""
        compute: Callable[..., Any] = getattr(self._owner, _FEATURES)

        def features(*arguments: Any, **named: Any) -> Any:
            if images not in self._features:
                self._features[images] = compute(*arguments, **named)
            return self._features[images]

        setattr(self._owner, _FEATURES, features)
        try:
            yield
        finally:
            delattr(self._owner, _FEATURES)

    def _leaves(self, index: int) -> list[torch.Tensor]:
        return tensors_of(self._templates[index])

    def _changed(self, sample: States, index: int, number: int, tensor: torch.Tensor) -> States:
        states = States(sample.token_ids, {}, sample.images)
        self._put(states, _name(index, number), 0, tensor)
        return states

    def _play(self, index: int, call: Call, states: States, rows: Rows) -> Any:
        """A layer's input stands for what nothing reads, or zeros where its shape is another."""
        outcome = self._templates[index]
        entering = next((t for t in tensors_of(call) if t.is_floating_point()), None)
        first = next((t for t in tensors_of(outcome) if t.is_floating_point()), None)
        tensors = []
        for number, leaf in enumerate(tensors_of(outcome)):
            carried = self._carried(states, _name(index, number), _row(rows))
            if carried is not None:
                tensors.append(carried)
            elif leaf is first and entering is not None and entering.shape[-1] == leaf.shape[-1]:
                tensors.append(entering)
            else:
                tensors.append(torch.zeros_like(leaf))
        return outcome.play(call, tensors)

    def _digest(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Sums over evenly spaced values of each."""
        sums = []
        for tensor in tensors:
            values = tensor.flatten()
            spaced = values[:: max(1, values.numel() // _DIGEST_VALUES)].double()
            sums += [float(spaced.sum()), float(spaced.square().sum()), float(values.numel())]
        return tuple(sums)

    def _carried(self, states: States, name: str, row: int) -> torch.Tensor | None:
        tensor = states.tensors.get(name)
        return None if tensor is None else tensor[row]

    def _put(self, states: States, name: str, row: int, tensor: torch.Tensor) -> None:
        if name not in states.tensors:
            states.tensors[name] = torch.empty(len(states), *tensor.shape, dtype=tensor.dtype)
        states.tensors[name][row] = tensor

    def following(self, index: int, states: States, *, in_place: bool) -> States:
        last = {name: self._read_by[name.rpartition(":")[2]] for name in states.tensors}
        kept = {name: t for name, t in states.tensors.items() if last[name] > index}
        return States(states.token_ids, kept, states.images)

    def keep(self, index: int, outcome: Outcome, following: States, rows: Rows) -> None:
        for name, tensor in self.read(index, outcome, 1).items():
            self._put(following, name, _row(rows), tensor[0])

    def read(self, index: int, outcome: Outcome, samples: int) -> dict[str, torch.Tensor]:
        return {
            name: tensor.unsqueeze(0)
            for number, tensor in enumerate(tensors_of(outcome))
            if (name := _name(index, number)) in self._read_by
        }


class VisionReplay(SampleReplay):
    """The same through a vision tower: a sample's tensors have shapes of their own, by its number."""

    @contextmanager
    def _kept_features(self, images: ImageInputs) -> Iterator[None]:
        yield  # none are kept: the tower itself is replayed

    def _carried(self, states: States, name: str, row: int) -> torch.Tensor | None:
        return states.tensors.get(f"{row}:{name}")

    def _put(self, states: States, name: str, row: int, tensor: torch.Tensor) -> None:
        states.tensors[f"{row}:{name}"] = tensor


def other_than(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor | None:
    """A tensor of other values; None where there are none, or no values."""
    if not tensor.numel():
        return None
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
    return ~tensor if tensor.dtype == torch.bool else tensor + 1


def _row(rows: Rows) -> int:
    return rows.start or 0 if isinstance(rows, slice) else int(rows[0])


def _name(index: int, number: int) -> str:
    return f"{index}.{number}"

"""Replay of one sample at a time, for samples with images, which differ in more than their token ids.

The wrapped model's own forward pass makes each layer's arguments: embeddings with image features in their
place, M-RoPE positions, masks that are bidirectional within an image, deepstack additions between layers. The
features of a sample's images are computed once, by the model's own tower and projector, and kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..base.errors import BadInput
from ..calibration.image_inputs import ImageInputs
from ..model.meta_model import MetaModel
from .chain import Rows
from .forward import Call, Reached, forward
from .nested import tensors_of, with_tensors
from .outcome import Outcome, Template, outcome_of
from .replay import other_than
from .states import States

_FEATURES = "get_image_features"
_DIGEST_VALUES = 2**16  # of a tensor that a layer is told: what changes, changes all of it
_TEXT = ImageInputs()


class SampleReplay:
    """A walk over samples of one length, each with images of its own or none.

    Args:
        token_ids: one sample `[1, length]`, and its images: which of what a layer returns is read later is
            found on it.
    """

    max_rows: int | None = 1

    def __init__(self, model: MetaModel, token_ids: torch.Tensor, images: ImageInputs):
        self._model = model
        self._features: dict[ImageInputs, Any] = {}
        self._owner = _owner_of_features(model)
        self._templates = self._dry_run(token_ids, images)
        if not self._templates:
            raise ValueError("a sample reaches none of them")
        self._read_by = self._readers(States(token_ids, {}, (images,)))

    def _pass(self, token_ids: torch.Tensor, images: ImageInputs, stub: Any) -> torch.Tensor | None:
        """The model's forward pass over one sample, with the features of its images kept."""
        with self._kept_features(images):
            return forward(self._model, token_ids, stub, images.tensors)

    @contextmanager
    def _kept_features(self, images: ImageInputs) -> Iterator[None]:
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

    def _dry_run(self, token_ids: torch.Tensor, images: ImageInputs) -> dict[int, Outcome]:
        """The outcome of each layer for one sample, with zeros as weights."""
        outcomes: dict[int, Outcome] = {}

        def stub(index: int, call: Call) -> Any:
            if index in outcomes:
                raise ValueError("a layer runs more than once in a pass")
            layer = self._model.layers[index]
            self._model.fill_with_zeros(index)
            try:
                outcome = outcome_of(
                    call, lambda: type(layer).forward(layer, *call.arguments, **call.named)
                )
            finally:
                self._model.empty(index)
            outcomes[index] = outcome
            return outcome.result

        self._pass(token_ids, images, stub)
        return outcomes

    def _readers(self, sample: States) -> dict[str, int]:
        """For each carried tensor the last layer that reads it, or one past the last for the head."""
        plain = self._prints(sample)
        generator = torch.Generator().manual_seed(0)
        last: dict[str, int] = {}
        for index, outcome in self._templates.items():
            for number, leaf in enumerate(outcome.tensors()):
                changed = other_than(leaf, generator)
                if changed is None:
                    continue
                name = _name(index, number)
                states = States(sample.token_ids, {}, sample.images)
                self._put(states, name, 0, changed)
                seen = self._prints(states)
                readers = [at for at, digest in seen.items() if digest != plain.get(at)]
                if readers:
                    last[name] = max(readers)
        return last

    def _prints(self, states: States) -> dict[int, tuple[float, ...]]:
        """A digest of the arguments of every layer, and of the head's input."""
        prints: dict[int, tuple[float, ...]] = {}

        def stub(index: int, call: Call) -> Any:
            prints[index] = _digest(tensors_of(call.told()))
            return self._play(index, call, states, 0)

        read = self._pass(states.token_ids, states.images[0], stub)
        prints[len(self._model.layers)] = () if read is None else _digest([read])
        return prints

    def _play(self, index: int, call: Call, states: States, row: int) -> Any:
        """Return from a layer's call what was carried; elsewhere its input, or zeros of another shape."""
        outcome = self._templates[index]
        entering = next((t for t in tensors_of(call.told()) if t.is_floating_point()), None)
        first = next((t for t in outcome.tensors() if t.is_floating_point()), None)
        tensors = []
        for number, leaf in enumerate(outcome.tensors()):
            carried = self._carried(states, _name(index, number), row)
            if carried is not None:
                tensors.append(carried)
            elif leaf is first and entering is not None and entering.shape[-1] == leaf.shape[-1]:
                tensors.append(entering)
            else:
                tensors.append(torch.zeros_like(leaf))
        rest = iter([torch.empty(0)] * len(tensors))
        result, values = with_tensors(outcome.parts(), lambda _: next(rest))
        writes = zip(outcome.writes, values, strict=True)
        blank = Outcome(result, tuple((number, key, value) for (number, key, _), value in writes))
        return Template(blank, ()).play(call, tensors)

    def _carried(self, states: States, name: str, row: int) -> torch.Tensor | None:
        held = states.tensors.get(name)
        return None if held is None else held[row]

    def _put(self, states: States, name: str, row: int, tensor: torch.Tensor) -> None:
        if name not in states.tensors:
            states.tensors[name] = torch.empty(len(states), *tensor.shape, dtype=tensor.dtype)
        states.tensors[name][row] = tensor

    def enter(self, token_ids: torch.Tensor, rows: int) -> States:
        """Nothing is carried into the first layer: it is replayed from the ids and the images."""
        return States(token_ids, {})

    def called(self, index: int) -> bool:
        return index in self._templates

    def call(self, index: int, states: States, rows: Rows) -> Call:
        reached: list[Call] = []
        row = _row(rows)

        def stub(at: int, call: Call) -> Any:
            if at == index:
                reached.append(call)
                raise Reached
            return self._play(at, call, states, row)

        self._pass(states.token_ids[row : row + 1], _images(states, row), stub)
        return reached[0]

    def following(self, index: int, states: States, *, in_place: bool) -> States:
        kept = {name: t for name, t in states.tensors.items() if self._last_reader(name) > index}
        return States(states.token_ids, kept, states.images)

    def _last_reader(self, name: str) -> int:
        return self._read_by[name]

    def keep(self, index: int, outcome: Outcome, following: States, rows: Rows) -> None:
        for name, tensor in self.read(index, outcome, 1).items():
            self._put(following, name, _row(rows), tensor[0])

    def read(self, index: int, outcome: Outcome, samples: int) -> dict[str, torch.Tensor]:
        return {
            name: tensor.unsqueeze(0)
            for number, tensor in enumerate(outcome.tensors())
            if (name := _name(index, number)) in self._read_by
        }

    def head_input(self, states: States, rows: slice) -> torch.Tensor:
        row = _row(rows)
        read = self._pass(
            states.token_ids[row : row + 1],
            _images(states, row),
            lambda index, call: self._play(index, call, states, row),
        )
        assert read is not None
        return read


class VisionReplay(SampleReplay):
    """The same through a vision tower: a sample's tensors have shapes of their own, by its number."""

    def _pass(self, token_ids: torch.Tensor, images: ImageInputs, stub: Any) -> torch.Tensor | None:
        return forward(self._model, token_ids, stub, images.tensors)

    def _carried(self, states: States, name: str, row: int) -> torch.Tensor | None:
        return states.tensors.get(f"{row}:{name}")

    def _put(self, states: States, name: str, row: int, tensor: torch.Tensor) -> None:
        states.tensors[f"{row}:{name}"] = tensor

    def _last_reader(self, name: str) -> int:
        return self._read_by[name.partition(":")[2]]


def _owner_of_features(model: MetaModel) -> Any:
    """The innermost module that computes image features.

    Raises:
        BadInput: none does.
    """
    owners = [
        module for module in model.model.modules() if callable(getattr(module, _FEATURES, None))
    ]
    if not owners:
        raise BadInput(
            f"{type(model.model).__name__} has no {_FEATURES}: calibrate it with text alone"
        )
    return owners[-1]


def _images(states: States, row: int) -> ImageInputs:
    return states.images[row] if states.images else _TEXT


def _row(rows: Rows) -> int:
    return rows.start or 0 if isinstance(rows, slice) else int(rows[0])


def _name(index: int, number: int) -> str:
    return f"{index}.{number}"


def _digest(tensors: list[torch.Tensor]) -> tuple[float, ...]:
    """Sums over evenly spaced values of each."""
    sums = []
    for tensor in tensors:
        values = tensor.flatten()
        spaced = values[:: max(1, values.numel() // _DIGEST_VALUES)].double()
        sums += [float(spaced.sum()), float(spaced.square().sum()), float(values.numel())]
    return tuple(sums)

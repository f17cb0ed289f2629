"""A plain chain of layers: each takes the hidden states of the one before, and the same other arguments for
all samples, which are recorded once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from ..model.meta_model import MetaModel
from .calls import Call, Outcome, States, containers_of, forward, tensors_of, with_tensors

HIDDEN = "hidden"
Rows = slice | torch.Tensor
"""Samples of a batch: a range, or their numbers."""


class Walk(ABC):
    """How the layers of a model follow each other; call it inside `MetaModel.around`."""

    max_rows: int | None = None  # samples in a batch; None: any number

    @abstractmethod
    def enter(self, token_ids: torch.Tensor, rows: int) -> States:
        """The states that enter the first layer, `rows` samples at a time."""

    def called(self, index: int) -> bool:
        return True

    @abstractmethod
    def call(self, index: int, states: States, rows: Rows) -> Call:
        """A layer's arguments for some samples."""

    @abstractmethod
    def following(self, index: int, states: States, *, in_place: bool) -> States:
        """The states after a layer, to be filled by `keep`."""

    def keep(self, index: int, outcome: Outcome, following: States, rows: Rows) -> None:
        following.put(rows, self.read(index, outcome, len(following.token_ids[rows])))

    @abstractmethod
    def read(self, index: int, outcome: Outcome, samples: int) -> dict[str, torch.Tensor]:
        """The part of what a layer returned that is carried on, by its name in the states; samples first."""

    @abstractmethod
    def head_input(self, states: States, rows: slice) -> torch.Tensor:
        """The input of the output projection, from the states after the last layer."""


class Chain(Walk):
    """A plain chain, from the other arguments of each layer for one sample and for two."""

    def __init__(self, model: MetaModel, calls: list[Call], twice: list[Call], as_tuple: bool):
        self._model, self._as_tuple = model, as_tuple
        self._calls, self._twice = calls, twice

        def broadcasts(once: torch.Tensor, twice: torch.Tensor) -> bool:
            return once.dim() == twice.dim() and all(
                before in (1, after) for before, after in zip(once.shape, twice.shape, strict=True)
            )

        # Where an argument depends on the batch size (ALiBi of some models), samples run one by one.
        self.max_rows = None if _all(broadcasts, calls, twice) else 1

    def enter(self, token_ids: torch.Tensor, rows: int) -> States:
        hidden = torch.empty(*token_ids.shape, self._model.config.hidden_size)
        for start in range(0, len(token_ids), rows):
            batch = record(self._model, token_ids[start : start + rows], self._as_tuple)[0]
            if not start:  # some have several hidden states a token
                hidden = torch.empty(len(token_ids), *batch.shape[1:])
            hidden[start : start + rows] = batch
        return States(token_ids, {HIDDEN: hidden})

    def call(self, index: int, states: States, rows: Rows) -> Call:
        hidden = states.tensors[HIDDEN][rows]
        arguments, named = _expanded(self._calls[index], self._twice[index], len(hidden))
        return Call((hidden, *arguments), named)

    def following(self, index: int, states: States, *, in_place: bool) -> States:
        hidden = states.tensors[HIDDEN]
        return States(states.token_ids, {HIDDEN: hidden if in_place else torch.empty_like(hidden)})

    def read(self, index: int, outcome: Outcome, samples: int) -> dict[str, torch.Tensor]:
        result = outcome.result
        return {HIDDEN: result[0] if isinstance(result, tuple) else result}

    def head_input(self, states: States, rows: slice) -> torch.Tensor:
        hidden = states.tensors[HIDDEN][rows]
        last = len(self._calls) - 1

        def stub(index: int, call: Call) -> Any:
            output = hidden if index == last else call.split()[0]
            return (output,) if self._as_tuple else output

        read = forward(self._model, states.token_ids[rows], stub)
        assert read is not None
        return read


def chain_of(model: MetaModel, token_ids: torch.Tensor) -> Chain | None:
    """The layers as a plain chain, tried on one sample `[1, length]`; None where they are none."""
    for as_tuple in (False, True):
        try:
            calls, mirrored, twice = (
                record(model, ids, as_tuple)[1]
                for ids in (token_ids, token_ids.flip(1), token_ids.repeat(2, 1))
            )
        except (TypeError, ValueError, RuntimeError, LookupError, AttributeError):
            continue
        return Chain(model, calls, twice, as_tuple) if _all(torch.equal, calls, mirrored) else None
    return None


def record(
    model: MetaModel, input_ids: torch.Tensor, as_tuple: bool
) -> tuple[torch.Tensor, list[Call]]:
    """Hidden states into the first layer, and other arguments. ValueError: layers are no plain chain."""
    entering: list[torch.Tensor] = []
    calls: list[Call] = []

    def stub(index: int, call: Call) -> Any:
        hidden, rest = call.split()
        entering.append(hidden)
        # A layer could write into an argument that is a list or dict.
        is_fixed = not containers_of((rest.arguments, *rest.named.values()))
        if index != len(calls) or hidden is not entering[0] or not is_fixed:
            raise ValueError("no plain chain")
        calls.append(rest)
        return (hidden,) if as_tuple else hidden

    forward(model, input_ids, stub)
    if len(calls) != len(model.layers):
        raise ValueError("no plain chain")
    return entering[0], calls


def _expanded(once: Any, twice: Any, samples: int) -> Any:
    """A nested argument for one sample, expanded where it has a row for each."""
    doubled = iter(tensors_of(twice))

    def expand(tensor: torch.Tensor) -> torch.Tensor:
        pairs = list(zip(tensor.shape, next(doubled).shape, strict=True))
        if samples == 1 or all(before == after for before, after in pairs):
            return tensor
        return tensor.expand([samples if before != after else before for before, after in pairs])

    return with_tensors(once, expand)


def _all(
    agree: Callable[[torch.Tensor, torch.Tensor], bool], calls: list[Call], others: list[Call]
) -> bool:
    ours, theirs = tensors_of(calls), tensors_of(others)
    return len(ours) == len(theirs) and all(map(agree, ours, theirs))

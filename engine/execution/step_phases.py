"""Phase timers: how long each phase of a step takes, measured by the engine where somebody asks for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Literal, Protocol

import torch

Phase = Literal[
    "schedule",  # deciding what the step computes, and taking its blocks
    "prepare_inputs",  # copying blocks; token ids, positions, slot mapping and block tables
    "draft",  # proposing draft tokens, and keeping the KV of the accepted ones
    "forward",  # the model's layers and LM head: eager, or replayed from a graph
    "sample",  # drawing tokens from the logits
    "fetch_tokens",  # getting them to the host
    "update",  # booking them on their requests
    "detokenize",  # tokens to text, and the outputs
]
"""A part of a step. The phases of a step follow one another; between them is what belongs to none."""

StepHook = Callable[[Phase | Literal["step"], float], None]
"""Told of each phase, and of each call of `Engine.step`, at its end; what it does lengthens the phase."""


class StepTimer(Protocol):
    """Measures the phases of one step: `with timer("forward"): ...`."""

    @property
    def seconds(self) -> Mapping[Phase, float]:
        """Of each phase so far; a phase may come several times."""
        ...

    def __call__(self, phase: Phase) -> AbstractContextManager[object]: ...


class PhaseTimer:
    """Reads the clock at both ends of a phase, and tells `hook` of it.

    On a GPU, where one is given, it first waits for what the device has been asked for.
    """

    __slots__ = ("_begun", "_gpu", "_hook", "_phase", "seconds")

    def __init__(self, gpu: torch.device | None, hook: StepHook | None) -> None:
        self.seconds: dict[Phase, float] = {}
        self._gpu = gpu
        self._hook = hook
        self._phase: Phase = "schedule"
        self._begun = 0.0

    def __call__(self, phase: Phase) -> PhaseTimer:
        self._phase = phase
        return self

    def __enter__(self) -> None:
        self._begun = self._now()

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None:
            return
        spent = self._now() - self._begun
        if self._hook is not None:
            self._hook(self._phase, spent)
            spent = time.perf_counter() - self._begun
        self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + spent

    def _now(self) -> float:
        if self._gpu is not None:
            torch.cuda.synchronize(self._gpu)
        return time.perf_counter()


class _Untimed:
    """Looks at no clock: what a step costs that nobody asks about."""

    seconds: Mapping[Phase, float] = MappingProxyType({})

    def __call__(self, phase: Phase) -> _Untimed:
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


UNTIMED: StepTimer = _Untimed()

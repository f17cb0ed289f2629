"""Phase timers: how long each phase of a step takes, measured if a recorder or a hook is set."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Literal, Protocol

import torch

Phase = Literal[
    "schedule",  # planning the step, and allocating its blocks
    "prepare_inputs",  # copying blocks; token ids, positions, slot mapping and block tables
    "draft",  # proposing draft tokens, and keeping the KV of the accepted ones
    "forward",  # the model's layers and LM head: eager, or replayed from a graph
    "sample",  # sampling tokens from the logits
    "fetch_tokens",  # copying them to the host
    "update",  # appending them to their requests
    "detokenize",  # tokens to text, and the outputs
]
"""A phase of a step. Phases do not overlap; some time between them belongs to none."""

StepHook = Callable[[Phase | Literal["step"], float], None]
"""Called with the seconds of each phase, and of each `Engine.step`, at its end; its own time counts too."""


class StepTimer(Protocol):
    """Measures the phases of one step: `with timer("forward"): ...`."""

    @property
    def seconds(self) -> Mapping[Phase, float]:
        """Seconds per phase so far, summed over repeated phases."""
        ...

    def __call__(self, phase: Phase) -> AbstractContextManager[object]: ...


class PhaseTimer:
    """Measures phases in wall-clock time, and calls `hook` at the end of each.

    With a `gpu` it synchronizes the device at both ends of a phase.
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
    """No measurement, at no cost."""

    seconds: Mapping[Phase, float] = MappingProxyType({})

    def __call__(self, phase: Phase) -> _Untimed:
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


UNTIMED: StepTimer = _Untimed()

"""Graph capture: the capture function of a device, what the graphs of a model share, tensor-parallel ranks.

Each rank captures and replays its own graphs, with the all-reduces of a step in them, as in vLLM and SGLang.
For a step rank 0 sends one small message by pipe, which graph is replayed, and how much of its static inputs
is new; these go from device to device, by broadcasts in the process group. A capture waits for no other rank:
its collectives are recorded (and left out of the call that warms a CUDA capture up). After it every rank
tells rank 0 whether it succeeded, so that all ranks have a graph or none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from ...base.errors import first_line
from ..kernels.common.devices import refuses_triton
from ..kernels.common.graphs import CpuGraph, CudaGraph, GraphMemoryPool, NotCapturable
from ..model.layers.attention import LayerCache, StepInputs
from ..model.layers.lora import AdapterBank
from ..model.layers.parallel import Group, PeerLost
from ..model.layers.projection import SlotMask
from ..scheduling.block_pool import NULL_BLOCK

_log = logging.getLogger(__name__)


class Graph(Protocol):
    """A captured call."""

    def replay(self) -> torch.Tensor:
        """The result, which the next replay overwrites."""
        ...


class StaticInputs(Protocol):
    """Input tensors of captured steps; rank 0 fills them."""

    def take_unshared(self) -> tuple[int, ...]:
        """How much of the values the other ranks lack, who then have it; sent to them."""
        ...

    def share(self, unshared: tuple[int, ...], broadcast: Callable[[torch.Tensor], None]) -> None:
        """Broadcast so much from rank 0 to all; every rank calls it."""
        ...


class GraphName(NamedTuple):
    """Name of a graph of a model, the same on every rank: "decode" or "tokens", and the key among these."""

    kind: str
    key: Any


class GraphReplay(NamedTuple):
    """The message of a replayed step.

    Attributes:
        unshared: of the static inputs.
        num_logits: of how many of the first rows the logits follow at once.
    """

    name: GraphName
    unshared: tuple[int, ...]
    num_logits: int


class Ranks(Protocol):
    """The other tensor-parallel ranks, as rank 0 sees them."""

    group: Group

    def broadcast(self, call: str, argument: Any) -> None:
        """Send a call to all."""
        ...

    def replies(self) -> list[str | None]:
        """Wait for each rank's reply to a capture: why it failed, or None."""
        ...

    def alone(self) -> AbstractContextManager[None]:
        """Within the block, this rank's calls of the model are not sent to the others."""
        ...


class CaptureFailed(RuntimeError):
    """A capture failed on another rank; the message tells on which, and why."""


class SharedGraph:
    """Rank 0's part of a graph that all ranks have.

    Raises:
        CaptureFailed: another rank has no such graph; it is this rank's `capture` that raises otherwise.
        PeerLost: another rank has ended.
    """

    def __init__(
        self,
        name: GraphName,
        static: StaticInputs,
        logits: Callable[[torch.Tensor], torch.Tensor],
        capture: Callable[[], Graph],
        ranks: Ranks,
    ) -> None:
        self._name, self._static, self._logits, self._ranks = name, static, logits, ranks
        ranks.broadcast("capture", name)
        try:
            with ranks.alone():
                self._graph = capture()
        finally:
            refusals = (
                ranks.replies()
            )  # also where this rank failed, so that none is left in the pipe
        for rank, refusal in enumerate(refusals, start=1):
            if refusal is not None:
                raise CaptureFailed(f"worker {rank}: {refusal}")

    def replay(self) -> torch.Tensor:
        return self._replay(0)

    def logits(self, rows: int) -> torch.Tensor:
        """Replay; the logits of the first `rows` rows, of which the other ranks compute their parts."""
        hidden = self._replay(rows)
        with self._ranks.alone():
            return self._logits(hidden[:rows])

    def _replay(self, num_logits: int) -> torch.Tensor:
        unshared = self._static.take_unshared()
        self._ranks.broadcast("replay", GraphReplay(self._name, unshared, num_logits))
        with self._ranks.alone(), torch.inference_mode():
            self._static.share(unshared, self._ranks.group.broadcast)
            return self._graph.replay()


Capture = Callable[[Callable[[], torch.Tensor]], Graph]
"""Captures a call as a graph; it may run the call."""


class SteppedModel(Protocol):
    """Interface of a `CausalModel`, or of a draft head, whose steps are captured."""

    lora_bank: AdapterBank | None

    @property
    def vocab_size(self) -> int: ...

    @property
    def is_capturable(self) -> bool: ...

    @property
    def captures_any_step(self) -> bool: ...

    def forward(self, inputs: StepInputs, caches: Sequence[LayerCache]) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


class Forward(NamedTuple):
    """A captured step whose inputs are in place.

    Attributes:
        run: the final hidden states [tokens, hidden], or of a decode batch the logits [rows, vocab]; valid
            until the next step, of whatever size.
        sample: argmax of each row of a greedy decode batch, to be called after `run`; None: the sampler takes
            the logits.
    """

    run: Callable[[], torch.Tensor]
    sample: Callable[[], Iterable[int]] | None = None


@dataclass(frozen=True, slots=True)
class GraphSetting:
    """A model on its KV cache, and how its steps are captured.

    Attributes:
        caches: the KV caches of the model's layers.
        block_size: tokens per KV block.
        max_blocks: blocks of a sequence.
        ranks: the other tensor-parallel ranks, which capture and replay the same steps; None: there are none,
            or this is one of them.
        follows: whether this is one of them.
        states: the tensors of the state cache.
    """

    model: SteppedModel
    caches: Sequence[LayerCache]
    block_size: int
    max_blocks: int
    device: torch.device
    dtype: torch.dtype
    capture: Capture
    ranks: Ranks | None = None
    follows: bool = False
    states: Sequence[torch.Tensor] = ()

    @property
    def in_parallel(self) -> bool:
        """Whether several ranks replay these steps."""
        return self.follows or self.ranks is not None

    def graph(
        self, name: GraphName, static: StaticInputs, inputs: Callable[[], StepInputs]
    ) -> Graph:
        """Capture the model's forward pass on `inputs()`, which are made of the tensors of `static`."""
        held: StepInputs

        def call() -> torch.Tensor:
            # New for each call, because a kernel computes the batch's layout on first use; and kept alive,
            # because the graph may point to it.
            nonlocal held
            held = inputs()
            return self.model.forward(held, self.caches)

        def capture() -> Graph:
            return self.capture(call)

        if self.ranks is None:
            graph = capture()
        else:
            graph = SharedGraph(name, static, self.model.logits, capture, self.ranks)
        # Capturing wrote meaningless values to the null block; padding in a table is read, with weight 0.
        for cache in self.caches:
            for part in cache.parts:
                part[NULL_BLOCK].zero_()
        return graph

    def logits(self, graph: Graph, rows: int) -> torch.Tensor:
        """Replay; the logits of the first `rows` rows."""
        if isinstance(graph, SharedGraph):
            return graph.logits(rows)
        return self.model.logits(graph.replay()[:rows])

    def give_up(self, kind: str) -> None:
        """Have the other ranks drop the graphs of a kind."""
        if self.ranks is not None:
            self.ranks.broadcast("give_up", kind)

    @property
    def with_and_without_adapters(self) -> tuple[bool, ...]:
        """Whether steps are captured without adapters, which then cost nothing, and with them."""
        bank = self.model.lora_bank
        return (False, True) if bank is not None and bank.has_slots else (False,)

    def slot_mask(self, slots: torch.Tensor) -> SlotMask:
        """The mask of the adapters in these slots, int64 [rows]."""
        assert self.model.lora_bank is not None
        return self.model.lora_bank.mask(slots)


class EagerGraph:
    """No capture: calls the function on every replay."""

    def __init__(self, call: Callable[[], torch.Tensor]) -> None:
        self._call = call

    def replay(self) -> torch.Tensor:
        return self._call()


def capture_on(
    device: torch.device, warming_up: Callable[[], AbstractContextManager[object]] | None = None
) -> Capture:
    """The capture function of a device; its graphs share a memory pool.

    `warming_up` is entered for the call before a CUDA capture; of a tensor-parallel rank.
    """
    if device.type == "cuda":
        memory = torch.cuda.graph_pool_handle()
        return lambda call: CudaGraph(call, memory, warming_up or nullcontext)
    if refuses_triton("cpu") is not None:
        pool = GraphMemoryPool()
        return lambda call: CpuGraph(call, pool)
    if warming_up is None:
        return EagerGraph  # Triton's interpreter launches no kernels to capture

    def called_once(call: Callable[[], torch.Tensor]) -> Graph:
        with warming_up():
            call()  # so that every rank knows which tiles its kernels take, as after a capture
        return EagerGraph(call)

    return called_once


def succeeds(capture: Callable[[], object], steps: str) -> bool:
    """Whether `capture` succeeds; of what fails unexpectedly, one warning line tells for which steps.

    Raises:
        PeerLost: a tensor-parallel worker has ended.
    """
    try:
        capture()
    except NotCapturable:
        # Some linear has data-dependent control flow, as those with outliers (LLM.int8) do.
        return False
    except PeerLost:
        raise
    except Exception as error:
        # A kernel that waits for the device, a driver that refuses, memory that does not suffice.
        reason = f"{type(error).__name__}: {first_line(error)}"
        _log.warning("%s run without graphs, as capturing them failed: %s", steps, reason)
        return False
    return True

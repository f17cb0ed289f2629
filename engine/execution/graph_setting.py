"""Graph capture: capture functions of devices, state that a model's graphs share, tensor-parallel ranks.

Each rank captures and replays its own graphs, all-reduces included. Rank 0 sends one small message a step:
the graph, and which inputs are new; values go by broadcasts. A capture waits for no other rank: collectives
are recorded, not run. Then all ranks have a graph or none.
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
    """Captured call."""

    def replay(self) -> torch.Tensor: ...


class StaticInputs(Protocol):
    """Input tensors of captured steps; rank 0 fills them."""

    def take_unshared(self) -> tuple[int, ...]:
        """Describe the values that the other ranks lack, and mark them as sent: `share` must follow."""
        ...

    def share(self, unshared: tuple[int, ...], broadcast: Callable[[torch.Tensor], None]) -> None:
        """Broadcast the described values from rank 0; every rank calls it."""


class GraphName(NamedTuple):
    """Name of a graph of a model, the same on every rank: "decode" or "tokens", and the key among these."""

    kind: str
    key: Any


class GraphReplay(NamedTuple):
    """Message of a replayed step: the part of its inputs that is new, and first rows that need logits."""

    name: GraphName
    unshared: tuple[int, ...]
    num_logits: int


class Ranks(Protocol):
    """Other tensor-parallel ranks, as rank 0 sees them (`Workers`)."""

    group: Group

    def broadcast(self, call: str, argument: Any) -> None: ...

    def replies(self) -> list[str | None]: ...

    def alone(self) -> AbstractContextManager[None]:
        """Within the block, calls of the model are not forwarded to the other ranks."""
        ...


class CaptureFailed(RuntimeError):
    """Capture failed on another rank; the message has the rank and the reason."""


class SharedGraph:
    """Rank 0's part of a graph of all ranks. CaptureFailed: another has none; PeerLost: one has ended."""

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
            refusals = ranks.replies()  # after a failure too, so that no reply stays in the pipe
        for rank, refusal in enumerate(refusals, start=1):
            if refusal is not None:
                raise CaptureFailed(f"worker {rank}: {refusal}")

    def replay(self) -> torch.Tensor:
        return self._replay(0)

    def logits(self, rows: int) -> torch.Tensor:
        """Replay; logits of the first `rows` rows. The other ranks compute their parts."""
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
    """Captured step with inputs in place: `run` gives hidden states [tokens, hidden] or logits [rows, vocab].
    They are valid until the next step. `sample`: argmax of rows, after `run`; None: the sampler does it."""

    run: Callable[[], torch.Tensor]
    sample: Callable[[], Iterable[int]] | None = None


@dataclass(frozen=True, slots=True)
class GraphSetting:
    """Model on its KV cache, and how its steps are captured.

    Attributes:
        ranks: other tensor-parallel ranks, which capture and replay the same steps; None on such a rank, or
            without tensor parallelism.
        follows: True on a rank other than 0, which replays what rank 0 broadcasts.
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

    def graph(
        self, name: GraphName, static: StaticInputs, inputs: Callable[[], StepInputs]
    ) -> Graph:
        """Capture the model's forward pass on `inputs()`, which consist of the tensors of `static`."""
        kept: StepInputs

        def call() -> torch.Tensor:
            # New for each call, because a kernel computes the batch's layout on first use; and kept alive,
            # because the graph may point to it.
            nonlocal kept
            kept = inputs()
            return self.model.forward(kept, self.caches)

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
        """Replay; logits of the first `rows` rows."""
        if isinstance(graph, SharedGraph):
            return graph.logits(rows)
        return self.model.logits(graph.replay()[:rows])

    def give_up(self, kind: str) -> None:
        if self.ranks is not None:
            self.ranks.broadcast("give_up", kind)

    @property
    def with_and_without_adapters(self) -> tuple[bool, ...]:
        bank = self.model.lora_bank
        return (False, True) if bank is not None and bank.has_slots else (False,)

    def slot_mask(self, slots: torch.Tensor) -> SlotMask:
        assert self.model.lora_bank is not None
        return self.model.lora_bank.mask(slots)


class EagerGraph:
    """No capture: every replay calls the function."""

    def __init__(self, call: Callable[[], torch.Tensor]) -> None:
        self._call = call

    def replay(self) -> torch.Tensor:
        return self._call()


def capture_on(
    device: torch.device, warming_up: Callable[[], AbstractContextManager[object]] | None = None
) -> Capture:
    """Capture function of a device, whose graphs share memory; `warming_up` guards a rank's first call."""
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


def try_capture(capture: Callable[[], object], steps: str) -> bool:
    """Run `capture`; if it fails, except by PeerLost, log one warning about `steps` and return False."""
    try:
        capture()
    except NotCapturable:
        # Some linear has data-dependent control flow, such as outliers (LLM.int8).
        return False
    except PeerLost:
        raise
    except Exception as error:
        # A kernel that waits for the device, a driver that refuses, memory that does not suffice.
        reason = f"{type(error).__name__}: {first_line(error)}"
        _log.warning("%s run without graphs, as capturing them failed: %s", steps, reason)
        return False
    return True

"""Launches of C kernels, and graphs of a step: CPU graphs of launches, and CUDA graphs.

A CPU graph records every torch operation, `launch` and collective in order, without running kernels, so the
result of a capture is meaningless. Replay launches the kernels from C and calls the rest again on the same
tensors, without the model's Python.

Shapes are static. Data-dependent operations raise `NotCapturable`; Python that reads values past torch's
dispatcher (`Tensor.tolist`) goes unnoticed, and must not be captured.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ....base.build import fields, native

Launch = tuple[Any, ctypes.Structure]
"""A C function and its only argument."""


class _LaunchCapture(threading.local):
    on_launch: Callable[[Launch], None] | None = None
    on_call: Callable[[Callable[[], object]], None] | None = None


_capture = _LaunchCapture()


def launch(function: Any, call: ctypes.Structure) -> int:
    """Call a C function (0: success), or only report it to a capture, which `call`'s memory must outlive."""
    if _capture.on_launch is not None:
        _capture.on_launch((function, call))
        return 0
    return function(ctypes.byref(call))


def struct(
    name: str, pointers: str = "", numbers: str = "", *others: tuple[str, Any]
) -> type[ctypes.Structure]:
    """Struct of C: pointers and 64-bit numbers by their names, then other fields."""
    members = [*fields(pointers, numbers), *others]
    return type(name, (ctypes.Structure,), {"_fields_": members})


def addresses(*tensors: torch.Tensor | None) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def call_or_capture(call: Callable[[], object]) -> None:
    """Make a call that is neither a launch nor an operation of torch's; under a capture only report it."""
    if _capture.on_call is not None:
        _capture.on_call(call)
    else:
        call()


@contextmanager
def capturing_launches(
    on_launch: Callable[[Launch], None], on_call: Callable[[Callable[[], object]], None]
) -> Iterator[None]:
    """Report this thread's launches and other calls within the block instead of running them."""
    before = _capture.on_launch, _capture.on_call
    _capture.on_launch, _capture.on_call = on_launch, on_call
    try:
        yield
    finally:
        _capture.on_launch, _capture.on_call = before


_Entry = struct("Entry", "function argument")  # of `replay.c`


def replay_launches(launches: Sequence[Launch]) -> Callable[[], None]:
    """A function that replays these launches in one C call; of none, nothing is called."""
    if not launches:
        return lambda: None
    library = native(Path(__file__).with_name("replay.c")).library
    assert library is not None, "captured launches need the same compiler as replay.c"
    kept = list(launches)  # alive as long as the returned function
    pairs = ((ctypes.cast(f, ctypes.c_void_p).value, ctypes.addressof(call)) for f, call in kept)
    entries, replay = (_Entry * len(kept))(*pairs), library.llmopt_replay

    def run() -> None:
        if replay(entries, ctypes.c_int64(len(kept))):
            raise MemoryError("no memory for a kernel's workspace")

    return run


_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
}
_DATA_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class NotCapturable(RuntimeError):
    """The function is data-dependent (needs tensor values on the host); the message names the operation."""


class GraphMemoryPool:
    """Memory pool of captured intermediates; its graphs overwrite each other's: one may run at a time."""

    def __init__(self) -> None:
        self._free: list[np.ndarray[Any, Any]] = []  # sorted by size, smallest first
        self._memory: dict[int, np.ndarray[Any, Any]] = {}  # by address
        self.num_bytes = 0

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """An uninitialised dense tensor of this shape and dtype, in the smallest free buffer that fits."""
        size = tensor.numel() * tensor.itemsize
        if size == 0:
            return tensor
        index = bisect_left(self._free, size, key=len)
        if index < len(self._free):
            memory = self._free.pop(index)
        else:
            memory = torch.empty(size, dtype=torch.uint8).numpy()
            self._memory[memory.ctypes.data] = memory
            self.num_bytes += size
        # Only the tensor's storage, shared by its views, references this array: its end frees the buffer.
        buffer = memory[:size]
        weakref.finalize(buffer, insort, self._free, memory, key=len).atexit = False
        return torch.from_numpy(buffer).view(tensor.dtype).view(tensor.shape)

    def shared(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values in memory that is free for others once `tensor` is dropped, if it is the pool's."""
        memory = self._memory.get(tensor.data_ptr())
        if memory is None:
            return tensor
        return torch.from_numpy(memory[: tensor.nbytes]).view(tensor.dtype).view(tensor.shape)


class CpuGraph:
    """Captured `call`, if not data-dependent (NotCapturable); a replay overwrites `result`. `is_native`: the
    `launches` are all of it, so that a replay calls nothing of torch."""

    def __init__(self, call: Callable[[], torch.Tensor], pool: GraphMemoryPool) -> None:
        self._parts: list[Callable[[], object]] = []
        self._unflushed: list[Launch] = []
        self.launches: list[Launch] = []
        self._call = call  # keeps alive what the captured launches point at
        self._pool = pool
        self.is_native = True
        with (
            capturing_launches(self._unflushed.append, self._add_operation),
            _CaptureMode(self._capture_operation, pool),
        ):
            self.result = call()
        self._flush_launches()

    def replay(self) -> torch.Tensor:
        with nullcontext() if self.is_native else torch.inference_mode():
            for part in self._parts:
                part()
        return self.result

    def share_result(self) -> None:
        """Let later graphs take the result's memory: it is valid until one of them is replayed."""
        self.result = self._pool.shared(self.result)

    def _add_operation(self, operation: Callable[[], object]) -> None:
        self._flush_launches()
        self._parts.append(operation)
        self.is_native = False

    def _flush_launches(self) -> None:
        if self._unflushed:
            self._parts.append(replay_launches(self._unflushed))
            self.launches += self._unflushed
            self._unflushed.clear()

    def _capture_operation(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        if function._schema.is_mutable:
            self._add_operation(lambda: function(*args, **kwargs))
            return
        # A result in its arguments' storage is a view. (The schema cannot tell: `to` may view or copy.)
        if (made := _storages(result)) and made <= _storages((args, kwargs)):
            return
        outputs = tree_leaves(result)  # several from operations with indices, such as `topk`
        if not all(isinstance(output, torch.Tensor) for output in outputs):
            raise NotCapturable(f"{function} returns something other than tensors")

        def operation() -> None:
            for output, new in zip(outputs, tree_leaves(function(*args, **kwargs)), strict=True):
                output.copy_(new)

        self._add_operation(operation)


class _CaptureMode(TorchDispatchMode):
    """Reports every operation, and allocates from a pool instead of torch's allocator."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler for two seconds, to guard what is never compiled."""
        return False

    def __init__(
        self, on_operation: Callable[[Any, Any, Any, Any], None], pool: GraphMemoryPool
    ) -> None:
        super().__init__()
        self._on_operation, self._pool = on_operation, pool

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _DATA_DEPENDENT.isdisjoint(func.tags):
            raise NotCapturable(f"{func} is data-dependent")
        result = func(*args, **kwargs)
        if func in _ALLOCATIONS:
            return self._pool.like(result)
        self._on_operation(func, args, kwargs, result)
        return result


def _storages(values: Any) -> set[int]:
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    # Weights that oneDNN has packed have no storage and no views.
    return {tensor.untyped_storage()._cdata for tensor in tensors if not tensor.is_mkldnn}


class CudaGraph:
    """Captured `call`; `replay` runs it. Its result is in memory of `pool`, which graphs may share. A replay
    overwrites the results of all graphs of its pool. `warming_up` is entered for the first call, which is not
    captured."""

    def __init__(
        self,
        call: Callable[[], torch.Tensor],
        pool: Any,
        warming_up: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        # Warm-up: a first call compiles kernels and allocates workspaces, which cannot be captured.
        with warming_up():
            call()
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may use CUDA during the capture.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._result = call()

    def replay(self) -> torch.Tensor:
        self._graph.replay()
        return self._result

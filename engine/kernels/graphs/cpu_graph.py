"""A function of tensors on a CPU, written down once and repeated: what a CUDA graph is on a GPU.

While the function runs, every operation of torch and every launch of a C kernel is written down in order.
The kernels are not launched, so what it computes then means nothing. To repeat it, the kernels are launched
from C, and torch's operations are called again with the same tensors; no Python of the model runs. A
repetition reads its arguments where they lay the first time, and its result lies where it lay: the caller
puts new values into the old tensors.

What the function decides by looking at values is decided once. Operations that look are refused; Python that
looks past torch (`Tensor.tolist`) is not seen, and must not be recorded.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..common.launch import Launch, capturing_launches, replay_launches

_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
}
_DATA_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class NotCapturable(RuntimeError):
    """The function looks at the values of its tensors; the message names the operation."""


class GraphMemoryPool:
    """Memory for what recorded functions write; a tensor that is dropped makes room for others.

    Recordings that share a pool overwrite each other's intermediate results: one may run at a time.
    """

    def __init__(self) -> None:
        self._free: list[np.ndarray[Any, Any]] = []  # the smallest first
        self.num_bytes = 0

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """An uninitialised dense tensor of this shape and dtype, in the smallest memory that holds it."""
        size = tensor.numel() * tensor.itemsize
        if size == 0:
            return tensor
        place = bisect_left(self._free, size, key=len)
        if place < len(self._free):
            memory = self._free.pop(place)
        else:
            memory = torch.empty(size, dtype=torch.uint8).numpy()
            self.num_bytes += size
        # The storage of the tensor, which its views share, holds this array and nothing else does.
        lent = memory[:size]
        weakref.finalize(lent, insort, self._free, memory, key=len).atexit = False
        return torch.from_numpy(lent).view(tensor.dtype).view(tensor.shape)


class CpuGraph:
    """`call`, written down; `replay` runs it.

    Raises:
        NotRecordable: it looks at values.
    """

    def __init__(self, call: Callable[[], torch.Tensor], pool: GraphMemoryPool) -> None:
        self._parts: list[Callable[[], object]] = []
        self._launches: list[Launch] = []
        self._call = call  # what it holds, C kernels point at
        with capturing_launches(self._launches.append), _CaptureMode(self._capture_operation, pool):
            self._result = call()
        self._flush_launches()

    def replay(self) -> torch.Tensor:
        """The result, which the next repetition overwrites."""
        for part in self._parts:
            part()
        return self._result

    def _flush_launches(self) -> None:
        if self._launches:
            self._parts.append(replay_launches(self._launches))
            self._launches.clear()

    def _capture_operation(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        if function._schema.is_mutable:
            self._flush_launches()
            self._parts.append(lambda: function(*args, **kwargs))
            return
        # Operations that may give a view or a copy, such as `to`, say of themselves that they give views.
        if (made := _storages(result)) and made <= _storages((args, kwargs)):
            return
        self._flush_launches()
        if isinstance(result, torch.Tensor):
            self._parts.append(lambda: result.copy_(function(*args, **kwargs)))
        else:
            raise NotCapturable(f"{function} gives something other than a tensor")


class _CaptureMode(TorchDispatchMode):
    """Tells of every operation, and takes memory from a pool instead of torch's allocator."""

    def __init__(
        self, on_operation: Callable[[Any, Any, Any, Any], None], pool: GraphMemoryPool
    ) -> None:
        super().__init__()
        self._on_operation, self._pool = on_operation, pool

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _DATA_DEPENDENT.isdisjoint(func.tags):
            raise NotCapturable(f"{func} looks at values")
        result = func(*args, **kwargs)
        if func in _ALLOCATIONS:
            return self._pool.like(result)
        self._on_operation(func, args, kwargs, result)
        return result


def _storages(values: Any) -> set[int]:
    """Which memory the tensors among some arguments or results are in."""
    tensors = (one for one in tree_leaves(values) if isinstance(one, torch.Tensor))
    # Weights that oneDNN has packed are nobody's view.
    return {tensor.untyped_storage()._cdata for tensor in tensors if not tensor.is_mkldnn}

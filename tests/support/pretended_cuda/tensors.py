"""Tensors of the pretended card: they say that they are on CUDA, and the CPU computes their values.

So what depends on values (quantized loading, draft tokens, log-probabilities) takes its way as on a GPU. Memory
that nobody has written is zero, as are the results of Triton's kernels, which are not run.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .card import Allocation, Card

_COPIES = ("aten._to_copy", "aten.copy_", "aten.copy.", "aten.to.")
_EMPTY = ("aten.empty", "aten.new_empty")
_WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_NO_KERNEL = ("prim.", "aten.empty", "aten.new_empty", "aten.detach", "aten.lift", "aten.alias")
_RESHAPING = ("resize_", "set_", "t_", "squeeze_", "unsqueeze_", "transpose_")


class CudaTensor(torch.Tensor):
    """A tensor on the card; `host` has its values, `allocation` its memory, which views share."""

    host: torch.Tensor
    allocation: Allocation
    card: Card

    @staticmethod
    def __new__(
        cls, host: torch.Tensor, device: torch.device, allocation: Allocation, card: Card
    ) -> CudaTensor:
        # Not an inference tensor: of a view of one that is none, autograd would want its version.
        with torch._C._InferenceMode(False):
            made: Any = torch.Tensor._make_wrapper_subclass(
                cls,
                host.shape,
                strides=host.stride(),
                storage_offset=host.storage_offset(),
                dtype=host.dtype,
                device=device,
            )
        made.host, made.allocation, made.card = host, allocation, card
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        (first, *_) = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        return Dispatch(first.card).run(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def tolist(self) -> Any:
        self.card.add("sync", "tolist")
        self.card.refuse_in_capture("tolist")
        return self.host.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy")

    def is_pinned(self, device: Any = None) -> bool:
        return False

    def __repr__(self, **_: Any) -> str:
        return f"<on {self.device}: {tuple(self.shape)} {self.dtype}>"


class Pinned:
    """Which host memory is pinned. It is held, so that no other memory takes its address; what is registered
    is unregistered before it is freed."""

    def __init__(self) -> None:
        self._held: dict[int, torch.Tensor] = {}
        self.registered: dict[int, int] = {}

    def register(self, address: int, count: int) -> None:
        assert address not in self.registered
        self.registered[address] = count

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        self._held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def __contains__(self, tensor: torch.Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        return address in self._held or address in self.registered


class Dispatch(TorchDispatchMode):
    """Runs every operation: on the host, or on the card, with its launch, copy or wait in the log."""

    pinned = Pinned()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, card: Card) -> None:
        super().__init__()
        self._card = card
        self.read: dict[int, weakref.ref[Allocation]] | None = None
        self.own: weakref.WeakSet[Allocation] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        there = [leaf for leaf in leaves if isinstance(leaf, CudaTensor)]
        device = kwargs.get("device")
        if name_of(func) == "aten.to" and device is None:
            device = next((each for each in args if isinstance(each, torch.device)), None)
        to = None if device is None else torch.device(device)
        if not there and (to is None or to.type != "cuda"):
            return self._on_host(func, args, kwargs)
        if name_of(func) == "aten.to" and to is not None:
            return self.run(torch.ops.aten._to_copy.default, *_as_copy(args, kwargs))
        if there and func._can_decompose() and func.namespace == "aten":
            with self:
                return func.decompose(*args, **kwargs)
        name = str(func)
        if name_of(func).removeprefix("aten.") in _RESHAPING:
            raise NotImplementedError(f"{name} on the pretended card")
        if name.startswith(_COPIES):
            return self._copy(func, name, args, kwargs, leaves, to)
        place = self._place(name, args, leaves, there, to)
        if self._waits(func, name, args):
            self._card.add("sync", name)
            self._card.refuse_in_capture(name)
        return self._computed(func, name, args, kwargs, there, place)

    def _on_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        is_pinned = bool(kwargs.get("pin_memory"))
        if is_pinned:
            kwargs = {**kwargs, "pin_memory": False}
        result = func(*args, **kwargs)
        if self._card.host_bytes < math.inf and not is_pinned:
            self._note_computed(func, args, kwargs, result)
        return self.pinned.add(result) if is_pinned else result

    def _note_computed(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Tell of a large result that the host made: not of pinned memory, which is sent, or a mapped file's."""
        if func is torch.ops.aten.set_.source_Storage:
            return
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        known = {leaf.untyped_storage().data_ptr() for leaf in leaves}
        for made in tree_leaves(result):
            if not isinstance(made, torch.Tensor) or made.nbytes <= self._card.host_bytes:
                continue
            is_new = func._schema.is_mutable or made.untyped_storage().data_ptr() not in known
            if is_new and made not in self.pinned:
                self._card.add("host", f"{func} makes {made.nbytes} bytes")

    def _place(
        self,
        name: str,
        args: Any,
        leaves: Sequence[torch.Tensor],
        there: Sequence[CudaTensor],
        to: torch.device | None,
    ) -> torch.device:
        """The device of an operation's result; as CUDA, it takes no tensors of another one, but scalars, and
        indices of the host, which it copies.

        Raises:
            RuntimeError: the tensors are on several devices.
        """
        if to is not None:
            return torch.device("cuda", self._card.current if to.index is None else to.index)
        devices = {leaf.device for leaf in there if leaf.dim()} or {there[0].device}
        stray = [leaf for leaf in leaves if not isinstance(leaf, CudaTensor) and leaf.dim()]
        if stray and name.startswith("aten.index") and isinstance(args[0], CudaTensor):
            indices = [each for each in tree_leaves(args[1]) if isinstance(each, torch.Tensor)]
            if all(any(each is index for index in indices) for each in stray):
                self._card.add("pageable copy", f"{name}, with indices of the host")
                self._card.refuse_in_capture(name)
                stray = []
        if stray or len(devices) > 1:
            told = sorted({str(leaf.device) for leaf in leaves})
            self._card.add("wrong device", f"{name} of {', '.join(told)}")
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found {', '.join(told)}: {name}"
            )
        return devices.pop()

    def _waits(self, func: Any, name: str, args: Any) -> bool:
        """Whether the host waits for the result, or for its shape."""
        if name.startswith(("aten.index.", "aten.index_put")):
            masks = [each for each in tree_leaves(args[1]) if isinstance(each, torch.Tensor)]
            is_mask = any(mask.dtype in (torch.bool, torch.uint8) for mask in masks)
            fills = "index_put" in name and args[2].numel() == 1  # which is a masked fill
            return is_mask and not fills
        return not _WAITING.isdisjoint(func.tags)

    def _copy(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: dict[str, Any],
        leaves: Sequence[torch.Tensor],
        to: torch.device | None,
    ) -> Any:
        is_into = name.startswith("aten.copy")
        source, target = (args[1], args[0]) if is_into else (args[0], None)
        if is_into:
            to = args[0].device
        else:
            to = source.device if to is None else to
        assert to is not None
        to = torch.device("cuda", self._card.current) if str(to) == "cuda" else to
        is_async = bool(kwargs.get("non_blocking", is_into and len(args) > 2 and args[2]))
        if source.device.type != to.type:
            self._log_transfer(name, source, target, is_async=is_async)
        elif source.device != to:
            self._card.add("copy", f"{source.device} to {to}")
        else:
            self._card.add("kernel", name)
        inner, more = _hosts((args, kwargs))
        if not is_into and to.type == "cpu":
            return func(*inner, **{**more, "device": torch.device("cpu")})
        if is_into:
            self._result(func, inner, more)
            return target
        result = self._result(func, inner, {**more, "device": torch.device("cpu")})
        if (
            result is inner[0]
            or result.untyped_storage().data_ptr() == inner[0].untyped_storage().data_ptr()
        ):
            result = result.clone()
        return self._wrapped(result, to, {})

    def _log_transfer(
        self, name: str, source: torch.Tensor, target: torch.Tensor | None, *, is_async: bool
    ) -> None:
        if not source.numel():
            return  # CUDA is not asked for a copy of nothing
        on_host = target if isinstance(source, CudaTensor) else source
        is_pinned = on_host is not None and on_host in self.pinned
        what = f"{name} {tuple(source.shape)} {source.device}"
        if isinstance(source, CudaTensor) and not (is_pinned and is_async):
            self._card.add("sync", what)
        elif is_pinned and is_async:
            self._card.add("copy", what)
            return
        else:
            self._card.add("pageable copy" if not is_pinned else "sync", what)
        self._card.refuse_in_capture(what)

    def _computed(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: dict[str, Any],
        there: Sequence[CudaTensor],
        place: torch.device,
    ) -> Any:
        inner, more = _hosts((args, kwargs))
        if "device" in more:
            more["device"] = torch.device("cpu")
        more.pop("pin_memory", None)
        result = self._result(func, inner, more)
        if name.startswith(_EMPTY):
            self._result(torch.ops.aten.zero_.default, (result,), {})
        known = {leaf.host.untyped_storage().data_ptr(): leaf.allocation for leaf in there}
        made = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        is_new = any(each.untyped_storage().data_ptr() not in known for each in made)
        if (is_new or func._schema.is_mutable) and not name.startswith(_NO_KERNEL):
            self._card.add("kernel", name)
        if self.read is not None:
            for leaf in there:
                self.note_read(leaf)
        outer = {id(leaf.host): leaf for leaf in there}

        def wrap(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            same = outer.get(id(leaf))
            return self._wrapped(leaf, place, known) if same is None else same

        return tree_map(wrap, result)

    def _result(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Compute on the host; zeros of the result's shape where a tensor is larger than the card computes."""
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if all(leaf.numel() <= self._card.computed for leaf in leaves):
            return _BY_DEFINITION.get(func, func)(*args, **kwargs)
        if func._schema.is_mutable:
            for place, arg in enumerate(func._schema.arguments):
                if arg.alias_info is not None and arg.alias_info.is_write:
                    return kwargs[arg.name] if arg.name in kwargs else args[place]
        if any(leaf.alias_info for leaf in func._schema.returns):  # a view costs nothing
            return func(*args, **kwargs)
        moved = tree_map(
            lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs)
        )
        if "device" in moved[1]:
            moved[1]["device"] = torch.device("meta")
        made = func(*moved[0], **moved[1])
        return tree_map(
            lambda leaf: (
                torch.zeros_like(leaf, device="cpu") if isinstance(leaf, torch.Tensor) else leaf
            ),
            made,
        )

    def note_read(self, tensor: CudaTensor) -> None:
        """In a capture: the graph points at this memory, which must live as long as it does."""
        if self.read is not None and tensor.allocation not in self.own:
            self.read[id(tensor.allocation)] = weakref.ref(tensor.allocation)

    def _wrapped(
        self, host: torch.Tensor, device: torch.device, known: dict[int, Allocation]
    ) -> CudaTensor:
        allocation = known.get(host.untyped_storage().data_ptr())
        if allocation is None:
            if device.index >= self._card.count:
                raise RuntimeError(f"CUDA error: invalid device ordinal {device.index}")
            allocation = self._card.allocate(device.index, host.untyped_storage().nbytes())
            if self.read is not None:
                self.own.add(allocation)
        return CudaTensor(host, device, allocation, self._card)


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: None = None,
    scale_result: None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """`aten._scaled_mm` by its definition, with a scale for each row and column."""
    assert bias is None and scale_result is None, "not asked for so far"
    return ((a.float() * scale_a) @ (b.float() * scale_b)).to(out_dtype or a.dtype)


_BY_DEFINITION: dict[Any, Any] = {torch.ops.aten._scaled_mm.default: scaled_mm}
"""Operations that a card has and the CPU of torch 2.11 lacks: products with a scale for each row."""


def name_of(func: Any) -> str:
    """The operation's name without that of its overload."""
    return str(func).rpartition(".")[0]


def _as_copy(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of `to`, which names a device, as those of `_to_copy`."""
    copied = {key: value for key, value in kwargs.items() if key not in ("copy", "layout")}
    for each in args[1:]:
        if isinstance(each, torch.device | torch.dtype):
            copied["device" if isinstance(each, torch.device) else "dtype"] = each
        else:
            copied.setdefault("non_blocking", bool(each))
    return args[:1], copied


def _hosts(values: Any) -> Any:
    return tree_map(lambda leaf: leaf.host if isinstance(leaf, CudaTensor) else leaf, values)

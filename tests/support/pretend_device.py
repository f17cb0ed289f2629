"""A pretended second device on the CPU: tensors that say they are there, and an error where devices are mixed.

torch's `privateuseone` backend, registered in Python; the arithmetic is the CPU's. So code that would mix the
host and a GPU fails here as it would there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NAME = "pretend"
_INDEXING = ("aten.index.", "aten.index_put", "aten._index_put_impl", "aten._unsafe_index")


def pretended() -> torch.device:
    """The device."""
    return torch.device(NAME)


# When tests are collected: autograd makes a queue for each device at the first backward pass of a process.
backend_registration._setup_privateuseone_for_python_backend(NAME)


class _There(torch.Tensor):
    """A tensor on the pretended device; `host` holds its values."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> _There:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device(NAME, 0),  # autograd has a queue for each number
        )
        made.host = host
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.host.tolist()

    def __repr__(self, **_: Any) -> str:
        return f"<on {NAME}: {self.host!r}>"


class _Mode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = _run(func, args, kwargs or {})
        self.operations += any(isinstance(leaf, _There) for leaf in tree_leaves(result))
        return result


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    there = [isinstance(leaf, _There) for leaf in leaves]
    name, is_there = str(func), any(there)
    if is_there and not all(there) and not name.startswith(("aten._to_copy", "aten.copy_")):
        # As on CUDA: only tensors of one element without dimensions mix, and indices on the host.
        allowed: list[Any] = []
        if name.startswith(_INDEXING) and isinstance(args[0], _There):
            allowed = [id(leaf) for leaf in tree_leaves(args[1])]
        stray = [leaf for leaf, at in zip(leaves, there, strict=True) if not at and leaf.dim()]
        if any(id(leaf) not in allowed for leaf in stray):
            raise RuntimeError(f"Expected all tensors to be on the same device: {name}")
    inner_args, inner = tree_map(
        lambda leaf: leaf.host if isinstance(leaf, _There) else leaf, (args, kwargs)
    )
    if inner.get("device") is not None:
        is_there = torch.device(inner["device"]).type == pretended().type
        inner["device"] = torch.device("cpu")
    elif name.startswith("aten.copy_"):
        is_there = there[0]
    generators = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator)]
    if is_there and any(each.device.type == "cpu" for each in generators):
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu': {name}")
    result = func(*inner_args, **inner)
    if func._schema.is_mutable and args and result is inner_args[0]:
        return args[0]
    wrap = lambda leaf: _There(leaf) if isinstance(leaf, torch.Tensor) else leaf  # noqa: E731
    return tree_map(wrap, result) if is_there else result


@contextmanager
def pretended_device() -> Iterator[_Mode]:
    """A context in which the device can be used; its `operations` counts what was computed there."""
    with _Mode() as mode:
        # So that `torch.tensor(...)` asks the mode for the copy.
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            yield mode
        finally:
            torch._C._set_only_lift_cpu_tensors(False)

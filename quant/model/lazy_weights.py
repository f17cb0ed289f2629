"""Lazy weights around the decoder layers: each module outside them loads its own when it is called.

Embedding tables stay on disk: a lookup reads the rows of its ids, so that a large vocabulary needs no memory.
Modules that a text does not reach, such as a vision tower, are never loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ...base.errors import BadInput

_DEVICE: Any = torch.Tensor.device.__get__  # pyright: ignore[reportAttributeAccessIssue]


class LazyWeights:
    """A context in which a meta-device model runs with `layers` of the caller's; `lookup`: for a pass."""

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[nn.Module],
        read: Callable[[str], torch.Tensor],
        folder: Path,
    ):
        self._read = read
        self._folder = folder
        inside = {id(module) for layer in layers for module in layer.modules()}
        self._paths = {
            module: path for path, module in model.named_modules() if id(module) not in inside
        }
        self._undo = ExitStack()
        tables = {
            id(module.weight): (f"{path}.weight", module.weight)
            for module, path in self._paths.items()
            if isinstance(module, nn.Embedding)
        }
        self.lookup = _TablesOnDisk(tables, self._checked)

    def __enter__(self) -> None:
        for module in self._paths:
            if not isinstance(module, nn.Embedding) and any(_meta_tensors(module)):
                self._undo.callback(module.register_forward_pre_hook(self._fill).remove)

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _fill(self, module: nn.Module, _: Any) -> None:
        """A forward pre-hook that loads a module's own tensors, without its children's, in float32."""
        for slots, name, empty in _meta_tensors(module):
            path = f"{self._paths[module]}.{name}".lstrip(".")
            tensor = self._checked(path, empty)
            tensor = tensor.to(torch.float32) if tensor.is_floating_point() else tensor
            self._undo.callback(slots.__setitem__, name, empty)
            is_parameter = slots is module._parameters
            slots[name] = nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor

    def _checked(self, name: str, empty: torch.Tensor) -> torch.Tensor:
        tensor = self._read(name)
        if tensor.shape != empty.shape:
            raise BadInput(
                f"{self._folder}: {name} has shape {list(tensor.shape)}, "
                f"but its config says {list(empty.shape)}"
            )
        return tensor


def _meta_tensors(module: nn.Module) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
    """A module's own tensors on meta that a checkpoint holds: the dict that each is in, and its name."""
    slots: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    return [
        (slot, name, tensor)
        for slot in slots
        for name, tensor in slot.items()
        if tensor is not None and tensor.is_meta and name not in module._non_persistent_buffers_set
    ]


class _TablesOnDisk(TorchFunctionMode):
    """Lookups in embedding tables on the meta device read rows from disk; tensors say CPU."""

    def __init__(
        self,
        tables: dict[int, tuple[str, torch.Tensor]],
        read: Callable[[str, torch.Tensor], torch.Tensor],
    ):
        super().__init__()
        self._tables, self._read = tables, read

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Meta tensors are there once they are needed: inputs are not moved to meta.
        if func == _DEVICE:
            return torch.device("cpu")
        given = dict(zip(("input", "weight"), args, strict=False)) | (kwargs or {})
        if func is not functional.embedding or id(given["weight"]) not in self._tables:
            return func(*args, **(kwargs or {}))
        ids, inverse = given["input"].unique(return_inverse=True)
        rows = self._read(*self._tables[id(given["weight"])])[ids].to(torch.float32)
        return functional.embedding(inverse, rows)

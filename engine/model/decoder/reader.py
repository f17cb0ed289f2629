"""Reading weights out of a checkpoint by name, with account of what has been read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from ....quant.base.errors import BadInput
from ....quant.convert.read import quantized_modules, read_quantized, tensor_names
from ....quant.formats.mxfp4 import METHOD, mxfp4_names, read_mxfp4
from ....quant.model.checkpoint import Checkpoint
from ....quant.tensors.base import QuantizedTensor
from ...kernels.elementwise.dispatch import RowKernelQuery
from ...kernels.moe.dispatch import ExpertsKernelQuery
from ..layers.projection import LinearSite, Projection
from ..parallel.shard import Shard
from ..parallel.weight_slice import WeightSlice, take, take_rows

_log = logging.getLogger(__name__)

KV_CACHE_SCALES = (
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".k_proj.output_scale",
    ".v_proj.output_scale",
)
"""Endings of the scales that others use for a cache in 8 bits; the cache here keeps the model's dtype."""


class CheckpointReader:
    """Reads weights by module name, and keeps count of what has been read.

    Each tensor goes from its shard to the device in the engine's dtype; quantized ones stay codes, and
    with `input_bits` 8 their kernels may round what they multiply with.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        input_bits: int = 16,
        shard: Shard | None = None,
    ) -> None:
        self._shard = shard
        self._checkpoint = checkpoint
        self._device = device
        self._dtype = dtype
        self._input_bits = input_bits
        # MXFP4 holds whole layers of experts in a tensor, not modules.
        self._has_mxfp4 = (checkpoint.quantization_config or {}).get("quant_method") == METHOD
        self._quantized = set() if self._has_mxfp4 else quantized_modules(checkpoint)
        self._unread = set(checkpoint.names)
        self.linears: dict[str, LinearSite] = {}
        """Where each linear that was read as a projection lies."""

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A plain tensor, which must have `shape`; in the engine's dtype or the one given."""
        tensor = self._checkpoint.tensor(name)
        if tuple(tensor.shape) != shape:
            raise BadInput(
                f"{self._checkpoint.folder}: {name} has shape {tuple(tensor.shape)}, "
                f"but config.json makes it {shape}"
            )
        if not tensor.is_floating_point():
            raise BadInput(f"{self._checkpoint.folder}: {name} holds {tensor.dtype}, not floats")
        self._unread.discard(name)
        found = tensor.to(self._device, dtype or self._dtype)
        # One that still lies in the mapped file would keep all of the file in memory.
        return found.clone() if found.data_ptr() == tensor.data_ptr() else found

    def release(self) -> None:
        """Let go of the pages of the checkpoint's files."""
        self._checkpoint.release()

    def rows(self, size: int) -> RowKernelQuery:
        """What the choice of a kernel for rows of activations depends on."""
        return RowKernelQuery(self._device.type, self._dtype, size)

    def experts_kernel_query(self, is_whole: bool) -> ExpertsKernelQuery:
        """What the choice of a kernel for experts depends on; `is_whole`: they are all here."""
        return ExpertsKernelQuery(self._device.type, self._dtype, is_whole)

    def drop_linears(self, prefix: str) -> None:
        """Forget where the linears below `prefix` lie: no adapter goes there."""
        self.linears = {
            name: site for name, site in self.linears.items() if not name.startswith(prefix)
        }

    def numbers(self, name: str, size: int) -> torch.Tensor:
        """Whole numbers, int64 [size]."""
        tensor = self._checkpoint.tensor(name)
        if tuple(tensor.shape) != (size,) or tensor.is_floating_point():
            raise BadInput(
                f"{self._checkpoint.folder}: {name} is {tensor.dtype} of shape {tuple(tensor.shape)}, but "
                f"config.json makes it {size} whole numbers"
            )
        self._unread.discard(name)
        return tensor.to(self._device, torch.int64)

    def is_quantized(self, module: str) -> bool:
        """Whether the checkpoint holds codes for the weight of a module."""
        return module in self._quantized

    def projection(
        self,
        modules: Sequence[str],
        in_features: int,
        out_features: Sequence[int],
        *,
        bias: bool,
        transposed: bool = False,
        weight_slice: WeightSlice | None = None,
    ) -> Projection:
        """Linears that share their input, stacked in the order given; `transposed` ones lie [in, out].

        With `weight_slice`, the part of them that this reader's shard holds.
        """
        read = self._transposed if transposed else self._weight
        rows = (
            ((),) * len(modules)
            if weight_slice is None or not weight_slice.rows
            else weight_slice.rows
        )
        columns = None if weight_slice is None else weight_slice.columns
        weights: list[torch.Tensor | QuantizedTensor] = []
        biases: list[torch.Tensor] = []
        for module, out, runs in zip(modules, out_features, rows, strict=True):
            weights.append(take(module, read(module, out, in_features), runs, columns))
            if bias:
                whole = self.tensor(f"{module}.bias", out)
                biases.append(take_rows(whole, runs) if runs else whole)
        if columns is not None and self._shard is not None and self._shard.rank:
            biases.clear()  # one part of a sum brings the bias
        projection = self.stacked(weights, torch.cat(biases) if biases else None)
        if columns is not None and self._shard is not None:
            projection.then(self._shard.group.all_reduce)
        begin = 0
        for module, out, runs, weight in zip(modules, out_features, rows, weights, strict=True):
            outputs = slice(begin, begin + weight.shape[0])
            begin = outputs.stop
            self.linears[module] = LinearSite(projection, outputs, out, in_features, runs, columns)
        return projection

    def stacked(
        self, weights: Sequence[torch.Tensor | QuantizedTensor], bias: torch.Tensor | None
    ) -> Projection:
        """Weights that were read, stacked in the order given."""
        return Projection(weights, bias, self._dtype, self._input_bits)

    def experts(
        self, projection: str, num_experts: int, out_features: int, in_features: int
    ) -> Sequence[torch.Tensor | QuantizedTensor]:
        """Each expert's weight [out, in], of experts that lie in one tensor with their inputs first."""
        if not self._has_mxfp4:
            whole = self.tensor(projection, num_experts, in_features, out_features)
            return whole.transpose(1, 2).unbind()
        self._unread.difference_update(mxfp4_names(projection))
        codes = read_mxfp4(self._checkpoint, projection, num_experts, out_features, in_features)
        return [weight.to(self._device) for weight in codes]

    def dense(self, module: str, out_features: int, in_features: int) -> torch.Tensor:
        """The weight of a linear as floats, also where the checkpoint holds codes."""
        weight = self._weight(module, out_features, in_features)
        return weight if isinstance(weight, torch.Tensor) else weight.dequantize(self._dtype)

    def finish(self, may_remain: Callable[[str], bool]) -> None:
        """Complain about tensors that nobody asked for, but for scales of a KV cache in 8 bits and
        those that `may_remain` says yes to."""
        scales = tuple(name for name in self._unread if name.endswith(KV_CACHE_SCALES))
        if scales:
            _log.warning(
                "%s has scales for a quantized KV cache; they are not used: the cache keeps the "
                "engine's dtype",
                self._checkpoint.folder,
            )
        left = sorted(
            name
            for name in self._unread.difference(scales)
            if not name.endswith(".g_idx") and not may_remain(name)
        )
        if left:
            raise BadInput(
                f"{self._checkpoint.folder}: {len(left)} tensors have no place in the model that "
                f"config.json describes, the first is {left[0]}"
            )

    def _weight(
        self, module: str, out_features: int, in_features: int
    ) -> torch.Tensor | QuantizedTensor:
        if module not in self._quantized:
            return self.tensor(f"{module}.weight", out_features, in_features)
        weight = read_quantized(self._checkpoint, module)
        if weight.shape != (out_features, in_features):
            raise BadInput(
                f"{self._checkpoint.folder}: {module} unpacks to {weight.shape}, "
                f"but config.json makes it {(out_features, in_features)}"
            )
        self._unread -= tensor_names(self._checkpoint, module)
        return weight.to(self._device)

    def _transposed(self, module: str, out_features: int, in_features: int) -> torch.Tensor:
        return self.tensor(f"{module}.weight", in_features, out_features).T.contiguous()

"""Linear projections: dense or quantized, single or stacked (QKV, gate/up), with LoRA deltas.

In a captured step LoRA weights are in slots: all adapters' A are one GEMM, masked by the adapter of each row,
and all B another. So shapes and addresses are those of any adapters, loaded later too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import functional

from ....quant.kinds.base.tensor import QuantizedTensor
from ....quant.kinds.codebook.kind import CodebookTensor
from ....quant.kinds.fp4.kind import Fp4Tensor
from ....quant.kinds.fp8.kind import BLOCK, Fp8Tensor
from ....quant.kinds.ggml.tensor import GgufTensor
from ....quant.kinds.integer.kind import IntTensor
from ....quant.kinds.vectorwise.kind import VectorwiseTensor
from ...kernels.elementwise.reference import (
    ActivationQuant,
    QuantizedActivations,
    Rows,
    TakesQuantizedInput,
)
from ...kernels.linear.linear import (
    FusesBias,
    GivesFloat32,
    LinearKernel,
    TorchLinear,
    prepare_linear,
)
from ...kernels.linear.quantized_linear import prepare_quantized_linear

NO_SLOT = 0
"""The slot of rows without an adapter; slots are numbered from 1."""
LEAST_RANK = 16
"""Rank of the slots where adapters may be loaded later (vLLM's default for `max_lora_rank`)."""


@dataclass(frozen=True, slots=True)
class SlotMask:
    """Which columns of the stacked LoRA A belong to the adapter of a row: 0 or 1, [rows, slots * rank]."""

    weights: torch.Tensor

    @classmethod
    def of(cls, slots: torch.Tensor, slot_of_column: torch.Tensor, dtype: torch.dtype) -> SlotMask:
        return cls((slots[:, None] == slot_of_column[None, :]).to(dtype))


AdapterRows = Mapping[str, torch.Tensor | None] | SlotMask
"""Rows of a step, int64, by LoRA adapter name, None: all rows; of a captured step the mask of its slots."""

NO_ADAPTERS: AdapterRows = MappingProxyType({})


class Weights:
    """A dataclass of weights, or of parts with weights: what it is as a whole follows from its fields."""

    __slots__ = ()

    @property
    def weight_bytes(self) -> int:
        return sum(map(_weight_bytes, self._parts()))

    @property
    def is_capturable(self) -> bool:
        return all(getattr(part, "is_capturable", True) for part in self._parts())

    @property
    def state_layouts(self) -> tuple[Any, ...]:
        """The tensors of a sequence's constant state; () of what keeps none."""
        states = (getattr(part, "state_layouts", ()) for part in self._parts())
        return tuple(layout for of_part in states for layout in of_part)

    @property
    def activation_quant(self) -> ActivationQuant | None:
        """Quantization of its input that a preceding kernel may fuse; None: it needs unquantized input."""
        return None

    def _parts(self) -> Iterator[Any]:
        parts: Any = self
        return (getattr(parts, part.name) for part in fields(parts))


def _weight_bytes(part: Any) -> int:
    if isinstance(part, torch.Tensor):
        return part.nbytes
    if isinstance(part, list | tuple):
        return sum(map(_weight_bytes, part))
    return getattr(part, "weight_bytes", 0)


Delta = Callable[[torch.Tensor, torch.Tensor, AdapterRows], None]
"""Adds the LoRA deltas of the rows of `x [tokens, in]` to `y [tokens, out]`, in place."""


class Projection:
    """`y [tokens, out] = x [tokens, in] @ W.T + bias`, where W stacks one or more weights along `out`.
    Consecutive weights of one kind are one GEMM. `input_bits` 8: kernels may quantize `x`, per token."""

    def __init__(
        self,
        weights: Sequence[torch.Tensor | QuantizedTensor],
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        input_bits: int = 16,
    ) -> None:
        self._kernels: list[LinearKernel] = []
        run: list[torch.Tensor | QuantizedTensor] = []
        for weight in weights:
            if run and _kind(weight) != _kind(run[0]):
                self._kernels.append(_prepare(run, dtype, input_bits))
                run = []
            run.append(weight)
        self._kernels.append(_prepare(run, dtype, input_bits))
        only = self._kernels[0]
        self._takes_quantized_input: TakesQuantizedInput | None = (
            only if isinstance(only, TakesQuantizedInput) else None
        )
        if bias is not None and len(self._kernels) == 1 and isinstance(only, FusesBias):
            only.fuse_bias(bias)
            bias = None
        self.bias = bias
        self.delta: Delta | None = None
        self._then: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.weight_bytes = sum(kernel.weight_bytes for kernel in self._kernels)
        if bias is not None:
            self.weight_bytes += bias.nbytes

    @property
    def holds_a_copy(self) -> bool:
        return len(self._kernels) > 1 or not isinstance(self._kernels[0], TorchLinear)

    @property
    def kernel(self) -> LinearKernel | None:
        """The GEMM kernel; None: there are several, or a LoRA delta or an epilogue follows."""
        alone = len(self._kernels) == 1 and self.delta is None and self._then is None
        return self._kernels[0] if alone else None

    @property
    def activation_quant(self) -> ActivationQuant | None:
        """Activation quantization of the kernel, if it takes quantized input; None with a LoRA delta."""
        if len(self._kernels) > 1 or self.delta is not None or self._takes_quantized_input is None:
            return None
        return self._takes_quantized_input.activation_quant

    def then(self, step: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Set an epilogue (all-reduce, all-gather): `step` maps every output, possibly in place."""
        self._then = step

    def in_float32(self, x: torch.Tensor) -> torch.Tensor:
        """The output in float32, unrounded where the kernel gives it; without adapters."""
        kernel = self.kernel
        if isinstance(kernel, GivesFloat32) and self.bias is None:
            return kernel.in_float32(x)
        return self(x).float()

    def __call__(self, x: Rows, adapters: AdapterRows = NO_ADAPTERS) -> torch.Tensor:
        if isinstance(x, QuantizedActivations):
            assert self._takes_quantized_input is not None and self.delta is None
            y = self._takes_quantized_input(x)
        elif len(self._kernels) == 1:
            y = self._kernels[0](x)
        else:
            y = torch.cat([kernel(x) for kernel in self._kernels], dim=-1)
        if self.bias is not None:
            y = y + self.bias
        if adapters and self.delta is not None and isinstance(x, torch.Tensor):
            self.delta(x, y, adapters)
        return y if self._then is None else self._then(y)


class SlottedWeights:
    """LoRA A and B in slots, for slices `outputs` of a projection, one a linear; `like`: dtype and device."""

    def __init__(
        self,
        outputs: Sequence[slice],
        in_features: int,
        num_slots: int,
        rank: int,
        like: torch.Tensor,
    ) -> None:
        self._places = {(out.start, out.stop): index for index, out in enumerate(outputs)}
        self._outputs, self._rank = tuple(outputs), rank
        self._down = like.new_zeros(len(outputs), num_slots, rank, in_features)
        # Transposed: a slot is a contiguous range of rows.
        self._up = [like.new_zeros(num_slots, rank, out.stop - out.start) for out in outputs]

    @property
    def num_bytes(self) -> int:
        return self._down.nbytes + sum(up.nbytes for up in self._up)

    def takes(self, outputs: slice, rank: int) -> bool:
        return (outputs.start, outputs.stop) in self._places and rank <= self._rank

    def clear(self, slot: int) -> None:
        for weights in (*self._down, *self._up):
            weights[slot - 1].zero_()

    def put(
        self, slot: int, outputs: slice, down: torch.Tensor, up: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy A [rank, in] and B [out, rank] to a slot; returns them as views of it."""
        index, rank = self._places[outputs.start, outputs.stop], len(down)
        slot_down, slot_up = self._down[index, slot - 1, :rank], self._up[index][slot - 1, :rank]
        return slot_down.copy_(down), slot_up.copy_(up.T).T

    def add(self, x: torch.Tensor, y: torch.Tensor, mask: SlotMask) -> None:
        """Add each row's LoRA delta to `y [rows, out]`, in place."""
        inner = functional.linear(x, self._down.flatten(0, 2))
        inner = inner.view(len(x), len(self._up), -1) * mask.weights[:, None]
        for index, (outputs, up) in enumerate(zip(self._outputs, self._up, strict=True)):
            # Not `addmm_`: the delta is rounded before it is added, as in eager steps.
            y[:, outputs].add_(inner[:, index] @ up.flatten(0, 1))


@dataclass(frozen=True, slots=True)
class LinearSite:
    """Slice of a projection's outputs: a linear [out_features, in_features], and this rank's part of it."""

    projection: Projection
    outputs: slice
    out_features: int
    in_features: int
    rows: Sequence[slice] = ()
    columns: slice | None = None


def _kind(weight: torch.Tensor | QuantizedTensor) -> object:
    """Key that is equal for weights that can be stacked into one matrix."""
    if isinstance(weight, torch.Tensor):
        return None
    if not _stacks(weight):
        return id(weight)
    whole = weight.parts().get("global_scale")
    return (type(weight), weight.scheme, None if whole is None else float(whole))


def _stacks(weight: QuantizedTensor) -> bool:
    """True if a quantized weight can be concatenated: its parts are per output row, or of equal wholes."""
    parts = weight.parts()
    if isinstance(weight, IntTensor):
        return "group_index" not in parts and "input_scale" not in parts
    if isinstance(weight, Fp8Tensor):
        whole_blocks = weight.scheme.granularity == "block" and weight.out_features % BLOCK == 0
        by_row = weight.scheme.granularity == "channel" or whole_blocks
        return by_row and "input_scale" not in parts
    if isinstance(weight, CodebookTensor):
        whole_blocks = weight.codes.numel() % weight.scheme.block_size == 0
        return whole_blocks and not weight.scheme.double_quant
    if isinstance(weight, Fp4Tensor):
        return "input_scale" not in parts
    return isinstance(weight, GgufTensor | VectorwiseTensor)


def _prepare(
    run: list[torch.Tensor | QuantizedTensor], dtype: torch.dtype, input_bits: int
) -> LinearKernel:
    plain = [weight for weight in run if isinstance(weight, torch.Tensor)]
    if plain:
        return prepare_linear(plain[0] if len(plain) == 1 else torch.cat(plain), dtype)
    stack = [weight for weight in run if isinstance(weight, QuantizedTensor)]
    whole: Any = stack[0]
    if len(stack) > 1:
        names = whole.parts().keys() - {"global_scale"}
        whole = replace(whole, **{n: torch.cat([w.parts()[n] for w in stack]) for n in names})
    return prepare_quantized_linear(whole, dtype, input_bits)

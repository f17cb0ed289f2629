"""The one seam for linear layers: plain or quantized, single or several that share their input."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...quant.tensors.base import QuantizedTensor
from ...quant.tensors.integer import IntTensor
from ..kernels.linear import LinearKernel, TorchLinear, prepare_linear
from ..kernels.quantized_linear import prepare_quantized_linear


class Projection:
    """`y [tokens, out] = x [tokens, in] @ W.T + bias`, where W stacks one or more weights along `out`.

    Weights of one kind (all plain, or all of one quantization scheme) become one matrix and one kernel
    call; a mixed stack runs a call for each run of equals.
    """

    def __init__(
        self,
        weights: Sequence[torch.Tensor | QuantizedTensor],
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        self._kernels: list[LinearKernel] = []
        run: list[torch.Tensor | QuantizedTensor] = []
        for weight in weights:
            if run and _kind(weight) != _kind(run[0]):
                self._kernels.append(_prepare(run, dtype))
                run = []
            run.append(weight)
        self._kernels.append(_prepare(run, dtype))
        self._bias = bias
        self.weight_bytes = sum(kernel.weight_bytes for kernel in self._kernels)
        if bias is not None:
            self.weight_bytes += bias.nbytes

    @property
    def holds_a_copy(self) -> bool:
        """Whether the kernels read weights of their own, and not the tensors that were given."""
        return len(self._kernels) > 1 or not isinstance(self._kernels[0], TorchLinear)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(self._kernels) == 1:
            y = self._kernels[0](x)
        else:
            y = torch.cat([kernel(x) for kernel in self._kernels], dim=-1)
        return y if self._bias is None else y + self._bias


def _kind(weight: torch.Tensor | QuantizedTensor) -> object:
    """Equal for weights that can be stacked into one matrix."""
    if isinstance(weight, torch.Tensor):
        return None
    stackable = isinstance(weight, IntTensor) and weight.group_index is weight.input_scale is None
    return weight.scheme if stackable else id(weight)


def _prepare(run: list[torch.Tensor | QuantizedTensor], dtype: torch.dtype) -> LinearKernel:
    plain = [weight for weight in run if isinstance(weight, torch.Tensor)]
    if plain:
        return prepare_linear(plain[0] if len(plain) == 1 else torch.cat(plain))
    if isinstance(run[0], QuantizedTensor) and len(run) == 1:
        return prepare_quantized_linear(run[0], dtype)
    stack = [weight for weight in run if isinstance(weight, IntTensor)]
    return prepare_quantized_linear(IntTensor.concat(stack), dtype)

"""What a way of laying out quantized weights on disk must be able to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..errors import BadInput
from ..scheme import QuantScheme
from ..tensor import QuantizedTensor

GetTensor = Callable[[str], torch.Tensor]


class WeightFormat(Protocol):
    """One on-disk format: its tensors, its `quantization_config`, and what it cannot hold.

    Attributes:
        name: as in `--format` and in `quant_method`.
        suffixes: endings of the tensors of one module; the first is always there and marks a
            quantized module.
    """

    name: str
    suffixes: tuple[str, ...]

    def check_scheme(self, scheme: QuantScheme) -> None:
        """Raises BadInput where the format has no place for such a scheme."""
        ...

    def check(self, module: str, out_features: int, in_features: int, scheme: QuantScheme) -> None:
        """Raises BadInput naming the module whose widths the format cannot pack."""
        ...

    def scale_dtype(self, weights: torch.dtype) -> torch.dtype:
        """The dtype of stored scales for a model whose weights have dtype `weights`."""
        ...

    def loads_in(self, scheme: QuantScheme) -> str:
        """Who can read a checkpoint of this scheme, and what they need for it."""
        ...

    def pack(self, module: str, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
        """The tensors of one module by their full names."""
        ...

    def unpack(self, module: str, get: GetTensor, scheme: QuantScheme) -> QuantizedTensor:
        """Read one module back through `get(full tensor name)`; BadInput where the shapes disagree."""
        ...

    def config(self, scheme: QuantScheme, ignore: list[str]) -> dict[str, Any]:
        """The `quantization_config` of `config.json`; `ignore` are the linears left alone."""
        ...

    def scheme(self, config: dict[str, Any]) -> QuantScheme:
        """The scheme that a `quantization_config` states; BadInput where we cannot read it."""
        ...


def pack_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack the last axis into int32 words, the first code in the lowest bits.

    Args:
        codes: uint8 `[..., n]`, where `n * bits` is a multiple of 32.

    Returns:
        int32 `[..., n * bits / 32]`.
    """
    per_word = 32 // bits
    fields = codes.unflatten(-1, (-1, per_word))
    words = torch.zeros(fields.shape[:-1], dtype=torch.int32)
    for index in range(per_word):
        words |= fields[..., index].to(torch.int32) << (bits * index)
    return words


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Undo `pack_words`: uint8 `[..., n]` from int32 `[..., n * bits / 32]`."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    fields = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return fields.flatten(-2).to(torch.uint8)


def expect_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor itself, or BadInput when the file holds another shape than the config implies."""
    if tuple(tensor.shape) != shape:
        raise BadInput(
            f"{name} has shape {tuple(tensor.shape)}, but its quantization_config implies {shape}"
        )
    return tensor


def check_groups(module: str, in_features: int, scheme: QuantScheme) -> None:
    """Raises BadInput naming the module whose rows the group size does not divide."""
    if not scheme.divides(in_features):
        raise BadInput(
            f"group size {scheme.group_size} does not divide the {in_features} inputs of {module}: "
            "choose one that does, or leave --group-size out"
        )

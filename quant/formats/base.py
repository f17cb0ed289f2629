"""What a way of laying out quantized weights on disk must be able to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from ..errors import BadInput
from ..scheme import IntScheme, Scheme
from ..tensors.base import QuantizedTensor

Config = Mapping[str, Any]


class TensorSource(Protocol):
    """Where tensors come from by name: a `Checkpoint`, or what stands for one."""

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor; BadInput where there is none of that name."""
        ...

    def __contains__(self, name: str) -> bool: ...


class WeightFormat(Protocol):
    """One on-disk format: its tensors, its `quantization_config`, and what it cannot hold.

    Attributes:
        name: as in `--format`.
        markers: a module is quantized where a tensor with one of these endings is there.
        suffixes: endings of all the tensors that a quantized module may have (its bias is not one).
    """

    name: str
    markers: tuple[str, ...]
    suffixes: tuple[str, ...]

    def check_scheme(self, scheme: Scheme) -> None:
        """Raises BadInput where the format has no place for such a scheme."""
        ...

    def check(self, module: str, out_features: int, in_features: int, scheme: Scheme) -> None:
        """Raises BadInput naming the module whose widths the format cannot pack."""
        ...

    def scale_dtype(self, weights: torch.dtype, scheme: Scheme) -> torch.dtype:
        """The dtype of stored scales for a model whose weights have dtype `weights`."""
        ...

    def loads_in(self, scheme: Scheme) -> str:
        """Who can read a checkpoint of this scheme, and what they need for it."""
        ...

    def pack(self, module: str, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
        """The tensors of one module by their full names."""
        ...

    def unpack(self, module: str, source: TensorSource, config: Config) -> QuantizedTensor:
        """Read one module back; BadInput where the tensors contradict the `quantization_config`."""
        ...

    def config(self, schemes: Mapping[str, Scheme], ignore: Sequence[str]) -> dict[str, Any]:
        """The `quantization_config` of `config.json`.

        Args:
            schemes: of every quantized module, by full name.
            ignore: the linears left alone.

        Raises:
            BadInput: the format cannot mix such schemes in one model.
        """
        ...

    def scheme(self, config: Config, module: str) -> Scheme:
        """The scheme that a `quantization_config` gives a module; BadInput where we cannot read it."""
        ...


def int_scheme(name: str, scheme: Scheme) -> IntScheme:
    """The scheme itself, or BadInput where format `name` holds integer codes only."""
    if not isinstance(scheme, IntScheme):
        raise BadInput(f"format {name} cannot hold {scheme.label} weights")
    return scheme


def only_scheme(name: str, schemes: Mapping[str, Scheme]) -> Scheme:
    """The one scheme of all modules, or BadInput where format `name` cannot mix several."""
    kinds = list(dict.fromkeys(schemes.values()))
    if len(kinds) != 1:
        labels = ", ".join(scheme.label for scheme in kinds)
        raise BadInput(f"format {name} holds one scheme for all modules, not {labels}")
    return kinds[0]


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


def check_groups(module: str, in_features: int, scheme: IntScheme) -> None:
    """Raises BadInput naming the module whose rows the group size does not divide."""
    if not scheme.divides(in_features):
        raise BadInput(
            f"group size {scheme.group_size} does not divide the {in_features} inputs of {module}: "
            "choose one that does, or leave --group-size out"
        )

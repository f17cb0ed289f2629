"""What a way of laying out quantized weights on disk must be able to do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from ..base.errors import BadInput
from ..base.scheme import IntScheme, Scheme
from ..tensors.base import QuantizedTensor

Config = Mapping[str, Any]
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_STREAM = 32  # codes after which a dense stream is at a word's beginning again, whatever its width


class TensorSource(Protocol):
    """Where tensors come from by name: a `Checkpoint`, or what stands for one."""

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor; BadInput where there is none of that name."""
        ...

    def __contains__(self, name: str, /) -> bool: ...


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
    """Pack the last axis into int32 words as one stream of bits, the first code in the lowest ones.

    Widths that do not divide 32 lie dense: a code may begin in one word and end in the next.

    Args:
        codes: uint8 `[..., n]`, each below `2**bits`.

    Returns:
        int32 `[..., ceil(n * bits / 32)]`; what is left of the last word is zero.
    """
    num_words = -(-codes.shape[-1] * bits // 32)
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % _STREAM))
    if 8 % bits == 0:  # whole codes in every byte, and words are bytes in a row
        per_byte = 8 // bits
        packed = padded[..., 0::per_byte].clone(memory_format=torch.contiguous_format)
        for index in range(1, per_byte):
            packed |= padded[..., index::per_byte] << (bits * index)
        return packed.view(torch.int32)[..., :num_words].contiguous()
    planes = padded.unflatten(-1, (-1, _STREAM)).movedim(-1, 0).contiguous()
    words = torch.zeros((bits, *planes.shape[1:]), dtype=torch.int32)
    for index in range(_STREAM):
        word, shift = divmod(index * bits, 32)
        fields = planes[index].to(torch.int32)
        words[word] |= fields << shift
        if shift + bits > 32:
            words[word + 1] |= fields >> (32 - shift)
    return words.movedim(0, -1).flatten(-2)[..., :num_words].contiguous()


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Undo `pack_words`: uint8 `[..., n]`, the codes that fit wholly into int32 `[..., words]`."""
    if 8 % bits == 0:
        # Flat first: strides of an axis of length 1 may be anything, and `view` looks at them.
        packed = words.reshape(-1).view(torch.uint8).view(*words.shape[:-1], -1)
        codes = torch.empty(*packed.shape, 8 // bits, dtype=torch.uint8)
        for index in range(8 // bits):
            torch.bitwise_right_shift(packed, index * bits, out=codes[..., index])
        return codes.bitwise_and_(2**bits - 1).flatten(-2)
    count = words.shape[-1] * 32 // bits
    stream = torch.nn.functional.pad(words, (0, -words.shape[-1] % bits))
    planes = stream.unflatten(-1, (-1, bits)).movedim(-1, 0).contiguous()
    codes = torch.empty((_STREAM, *planes.shape[1:]), dtype=torch.uint8)
    for index in range(_STREAM):
        word, shift = divmod(index * bits, 32)
        # A shift to the right copies the sign: what counts is in the lowest `32 - shift` bits.
        fields = (planes[word] >> shift) & (2 ** min(bits, 32 - shift) - 1)
        if shift + bits > 32:
            fields |= planes[word + 1] << (32 - shift)
        codes[index] = fields & (2**bits - 1)
    return codes.movedim(0, -1).flatten(-2)[..., :count].contiguous()


def expect_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor itself, or BadInput when the file holds another shape than the config implies."""
    if tuple(tensor.shape) != shape:
        raise BadInput(
            f"{name} has shape {tuple(tensor.shape)}, but its quantization_config implies {shape}"
        )
    return tensor


def expect_dtype(name: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> torch.Tensor:
    """The tensor itself, or BadInput when the file holds numbers of another kind."""
    if tensor.dtype not in dtypes:
        wanted = " or ".join(dtype_name(dtype) for dtype in dtypes)
        raise BadInput(
            f"{name} holds {dtype_name(tensor.dtype)}, but the format has {wanted} there"
        )
    return tensor


def expect_matrix(name: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> torch.Tensor:
    """The tensor itself, or BadInput when it is no matrix of such numbers."""
    if tensor.dim() != 2:
        raise BadInput(f"{name} has shape {tuple(tensor.shape)}, but the format has a matrix there")
    return expect_dtype(name, tensor, *dtypes)


def matches(pattern: str, module: str) -> bool:
    """Whether a regular expression of a config matches the beginning of a module's name."""
    try:
        return re.match(pattern, module) is not None
    except re.error as error:
        raise BadInput(
            f"the quantization_config has {pattern!r}, which is no regular expression: {error}"
        ) from error


def dtype_name(dtype: torch.dtype) -> str:
    """How a dtype is called in config files and messages: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def check_groups(module: str, in_features: int, scheme: IntScheme) -> None:
    """Raises BadInput naming the module whose rows the group size does not divide."""
    if not scheme.divides(in_features):
        raise BadInput(
            f"group size {scheme.group_size} does not divide the {in_features} inputs of {module}: "
            "choose one that does, or leave --group-size out"
        )

"""AWQ format (AutoAWQ, `quant_method: awq`), read by vLLM, transformers and this engine.

GEMM is the only layout that is written (`docs/formats.md`), transposed and interleaved, so that a GPU unpacks
a word into four half2. GEMV, which is read too, is neither; its groups are padded to whole words.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import product
from typing import Any

import torch

from ....base.errors import BadInput
from ...base.scheme import PER_CHANNEL, Scheme
from ..base.format import (
    Config,
    Skips,
    Stored,
    TensorSource,
    WeightFormat,
    held_scheme,
    only_scheme,
    pack_words,
    plain_entries,
    unpack_words,
)
from ..base.tensor import SCALE_DTYPES, QuantizedTensor
from .kind import IntTensor
from .raw import read_awq
from .scheme import IntScheme

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # channels of a word: pairs unpack into half2
_UNDO = tuple(ORDER.index(position) for position in range(8))
_BITS = 4
_PER_WORD = 8


def _reorder(codes: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    return codes.unflatten(-1, (-1, _PER_WORD))[..., list(order)].flatten(-2)


class AwqFormat(WeightFormat):
    """AutoAWQ's format: 4 bits, asymmetric, float16 scales."""

    name = "awq"
    markers: tuple[str, ...] = (".qweight",)
    suffixes: tuple[str, ...] = (".qweight", ".qzeros", ".scales")
    irrelevant: tuple[str, ...] = ("lm_head", "desc_act", "sym", "version", "checkpoint_format")
    plain_head = True
    read_raw = staticmethod(read_awq)

    def skips(self, config: Config) -> Skips:
        """Entries are parts of names, as AutoAWQ and vLLM search for them."""
        entries = plain_entries(config)
        return lambda name: any(entry in name for entry in entries)

    def check_scheme(self, scheme: Scheme) -> None:
        scheme = held_scheme(self.name, scheme, IntScheme)
        if scheme.activations is not None or scheme.permuted:
            raise BadInput(f"format awq cannot hold {scheme.label} weights")
        if scheme.bits != _BITS:
            raise BadInput(
                f"format awq holds 4-bit weights only, not {scheme.bits}-bit: "
                "use --format compressed-tensors"
            )
        if scheme.symmetric:
            raise BadInput(
                "format awq has no symmetric form: leave --symmetric out, "
                "or use --format compressed-tensors"
            )

    def check(self, module: str, out_features: int, in_features: int, scheme: Scheme) -> None:
        if out_features % _PER_WORD:
            raise BadInput(
                f"format awq cannot pack {module}: its {out_features} outputs are no multiple of "
                f"{_PER_WORD}; leave it out with --ignore, or use 8 bits with "
                "--format compressed-tensors"
            )
        held_scheme(self.name, scheme, IntScheme).check_groups(module, in_features)

    def pack(self, module: str, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
        assert isinstance(tensor, IntTensor)
        return {
            f"{module}.qweight": pack_words(_reorder(tensor.codes.t(), ORDER), _BITS),
            f"{module}.qzeros": pack_words(_reorder(tensor.zeros.t(), ORDER), _BITS),
            f"{module}.scales": tensor.scales.t().contiguous(),
        }

    def unpack(self, module: str, source: TensorSource, config: Config) -> IntTensor:
        scheme, stored = self.scheme(config, module), Stored(source, module)
        words = stored.matrix("qweight", torch.int32)
        unpack = self._unpack_gemv if _layout(config) == "gemv" else self._unpack_gemm
        tensor = unpack(stored, scheme, words)
        # auto-round's symmetric files have zero_point false, and the middle code as every zero point.
        if not config.get("zero_point", True) and (tensor.zeros != 8).any():
            raise BadInput(f"zero_point is false, but {module}.qzeros has other codes than 8")
        return tensor

    @staticmethod
    def _unpack_gemm(stored: Stored, scheme: IntScheme, words: torch.Tensor) -> IntTensor:
        in_features, out_features = words.shape[0], words.shape[1] * _PER_WORD
        scheme.check_groups(stored.module, in_features)
        groups = scheme.num_groups(in_features)
        shape = groups, out_features // _PER_WORD
        zeros = unpack_words(stored.tensor("qzeros", torch.int32, shape=shape), _BITS)
        scales = stored.tensor("scales", *SCALE_DTYPES, shape=(groups, out_features))
        return IntTensor(
            codes=_reorder(unpack_words(words, _BITS), _UNDO).t().contiguous(),
            scales=scales.t().contiguous(),
            zeros=_reorder(zeros, _UNDO).t().contiguous(),
            scheme=scheme,
        )

    @staticmethod
    def _unpack_gemv(stored: Stored, scheme: IntScheme, words: torch.Tensor) -> IntTensor:
        out_features, in_features = words.shape[0], words.shape[1] * _PER_WORD
        scheme.check_groups(stored.module, in_features)
        groups = scheme.num_groups(in_features)
        zeros = stored.matrix("qzeros", torch.int32)
        width = max(zeros.shape[1], -(-groups // _PER_WORD))
        stored.tensor("qzeros", shape=(out_features, width))
        shape = out_features, zeros.shape[1] * _PER_WORD
        scales = stored.tensor("scales", *SCALE_DTYPES, shape=shape)
        return IntTensor(
            codes=unpack_words(words, _BITS),
            scales=scales[:, :groups].contiguous(),
            zeros=unpack_words(zeros, _BITS)[:, :groups].contiguous(),
            scheme=scheme,
        )

    def config(self, schemes: Mapping[str, Scheme], ignore: Sequence[str]) -> dict[str, Any]:
        scheme = held_scheme(self.name, only_scheme(self.name, schemes), IntScheme)
        for name, part in product(schemes, ignore):
            if part in name:
                raise BadInput(
                    f"format awq skips modules by parts of their names, and {part}, which is not quantized, "
                    f"is part of {name}: use --format compressed-tensors"
                )
        config = {
            "quant_method": "awq",
            "bits": scheme.bits,
            "group_size": scheme.group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": list(ignore),
        }
        # vLLM's key: without it, it makes a float head for the packed one.
        return config | ({"lm_head": True} if "lm_head" in schemes else {})

    def read_config(self, config: Config, modules: Collection[str]) -> None:
        self.scheme(config, min(modules))
        dynamic: Config = config.get("dynamic") or {}
        if positive := [key for key, fields in dynamic.items() if key[:2] != "-:" and fields]:
            raise BadInput(f"quant_method awq with dynamic[{positive[0]!r}] is not supported")
        self.expect(config, pack_dtype=("int32",), act_bits=(16, 32), zero_point=(True, False))

    def scheme(self, config: Config, module: str) -> IntScheme:
        if _layout(config) not in ("gemm", "gemv"):
            raise BadInput(
                f"quant_method awq with the {_layout(config)!r} layout is not supported: "
                "only gemm and gemv"
            )
        bits = config.get("bits", config.get("w_bit", _BITS))
        if bits != _BITS:
            raise BadInput(f"quant_method awq with {bits} bits is not supported: only 4")
        group_size = int(config.get("group_size", config.get("q_group_size", 128)))
        return IntScheme(_BITS, PER_CHANNEL if group_size < 1 else group_size, symmetric=False)


def _layout(config: Config) -> str:
    """The layout: key `format` in transformers 5, `version` in AutoAWQ, in either case."""
    return str(config.get("format") or config.get("version") or "gemm").lower()

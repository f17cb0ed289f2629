"""bitsandbytes format (`quant_method: bitsandbytes`), written without that package.

Per linear `P` of `n` weights in 4 bits, `nf4` or `fp4`:

    P.weight            uint8    [n/2, 1]   row after row, the first of two codes in the high nibble
    P.weight.absmax     float32  [n/64]     or uint8 with double quantization
    P.weight.quant_map  float32  [16]       the table
    P.weight.quant_state.bitsandbytes__nf4  uint8, JSON as text: block size, dtype, shape, nested_offset
    P.weight.nested_absmax, P.weight.nested_quant_map   float32 [n/64/256], [256]; double only

and for LLM.int8(): `P.weight` int8 `[out, in]`, `P.SCB` float32 `[out]`, `P.weight_format` uint8 `0`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from ..base.errors import BadInput
from ..base.scheme import Scheme
from ..kinds.codebook.scheme import CodebookScheme
from ..kinds.vectorwise.scheme import VectorwiseScheme
from ..tensors.base import QuantizedTensor
from ..tensors.codebook import NESTED_BLOCK, CodebookTensor, codebook
from ..tensors.vectorwise import VectorwiseTensor
from .base import Config, TensorSource, expect_dtype, expect_matrix, expect_shape, only_scheme

_STATE = ".weight.quant_state.bitsandbytes__"
_Kind = Literal["nf4", "fp4"]
_KINDS: tuple[_Kind, ...] = ("nf4", "fp4")
# Compute dtype of its kernels; bitsandbytes casts to the model's dtype afterwards.
_COMPUTE_DTYPE = "bfloat16"

BnbScheme = CodebookScheme | VectorwiseScheme


class BitsAndBytesFormat:
    """bitsandbytes: nf4, fp4 and LLM.int8()."""

    name = "bitsandbytes"
    markers: tuple[str, ...] = (".weight.absmax", ".SCB")
    suffixes: tuple[str, ...] = (
        ".weight",
        ".weight.absmax",
        ".weight.quant_map",
        ".weight.nested_absmax",
        ".weight.nested_quant_map",
        *(_STATE + kind for kind in _KINDS),
        ".SCB",
        ".weight_format",
    )

    def _scheme(self, scheme: Scheme) -> BnbScheme:
        if not isinstance(scheme, CodebookScheme | VectorwiseScheme):
            raise BadInput(
                f"format bitsandbytes cannot hold {scheme.label} weights: only nf4, fp4 and LLM.int8()"
            )
        return scheme

    def check_scheme(self, scheme: Scheme) -> None:
        self._scheme(scheme)

    def check(self, module: str, out_features: int, in_features: int, scheme: Scheme) -> None:
        if isinstance(scheme, CodebookScheme) and out_features * in_features % 2:
            raise BadInput(
                f"format bitsandbytes cannot pack {module}: its {out_features} × {in_features} weights "
                "are an odd number; leave it out with --ignore"
            )

    def scale_dtype(self, weights: torch.dtype, scheme: Scheme) -> torch.dtype:
        return torch.float32

    def pack(self, module: str, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
        if isinstance(tensor, VectorwiseTensor):
            return {
                f"{module}.weight": tensor.codes,
                f"{module}.SCB": tensor.absmax,
                f"{module}.weight_format": torch.tensor(0, dtype=torch.uint8),
            }
        assert isinstance(tensor, CodebookTensor)
        codes = tensor.codes.flatten()
        state: dict[str, Any] = {
            "quant_type": tensor.scheme.kind,
            "blocksize": tensor.scheme.block_size,
            "dtype": _COMPUTE_DTYPE,
            "shape": list(tensor.shape),
        }
        stored = {
            f"{module}.weight": ((codes[0::2] << 4) | codes[1::2]).view(-1, 1),
            f"{module}.weight.absmax": tensor.absmax,
            f"{module}.weight.quant_map": codebook(tensor.scheme.kind),
        }
        if tensor.nested_absmax is not None:
            assert tensor.nested_map is not None and tensor.nested_offset is not None
            stored[f"{module}.weight.nested_absmax"] = tensor.nested_absmax
            stored[f"{module}.weight.nested_quant_map"] = tensor.nested_map
            state |= {
                "nested_blocksize": NESTED_BLOCK,
                "nested_dtype": "float32",
                "nested_offset": tensor.nested_offset.item(),
            }
        text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        return stored | {module + _STATE + tensor.scheme.kind: text}

    def unpack(self, module: str, source: TensorSource, config: Config) -> QuantizedTensor:
        if f"{module}.SCB" in source:
            return self._unpack_int8(module, source, config)
        kind: _Kind = "fp4" if f"{module}{_STATE}fp4" in source else "nf4"
        state = _read_state(module + _STATE + kind, source)
        out_features, in_features = state["shape"]
        size, count = state["blocksize"], out_features * in_features
        scheme = CodebookScheme(kind, size, double_quant="nested_offset" in state)
        name = f"{module}.weight"
        packed = expect_dtype(name, source.tensor(name), torch.uint8)
        if packed.numel() * 2 != count:
            raise BadInput(
                f"{name} has {packed.numel()} bytes, but its quant_state implies {count // 2}"
            )
        _expect_table(f"{module}.weight.quant_map", source, kind)
        name = f"{module}.weight.absmax"
        absmax = expect_shape(name, source.tensor(name), (-(-count // size),))
        codes = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], dim=1)
        codes = codes.view(out_features, in_features)
        if not scheme.double_quant:
            return CodebookTensor(codes, expect_dtype(name, absmax, torch.float32), scheme)
        nested_name, map_name = (
            f"{module}.weight.nested_{part}" for part in ("absmax", "quant_map")
        )
        blocks = -(-absmax.numel() // NESTED_BLOCK)
        return CodebookTensor(
            codes,
            expect_dtype(name, absmax, torch.uint8),
            scheme,
            nested_absmax=_floats(nested_name, source, blocks),
            nested_map=_floats(map_name, source, NESTED_BLOCK),
            nested_offset=torch.tensor([state["nested_offset"]], dtype=torch.float32),
        )

    def _unpack_int8(self, module: str, source: TensorSource, config: Config) -> VectorwiseTensor:
        name = f"{module}.weight"
        codes = expect_matrix(name, source.tensor(name), torch.int8)
        scheme = VectorwiseScheme(float(config.get("llm_int8_threshold", 6.0)))
        return VectorwiseTensor(codes, _floats(f"{module}.SCB", source, codes.shape[0]), scheme)

    def config(self, schemes: Mapping[str, Scheme], ignore: Sequence[str]) -> dict[str, Any]:
        scheme = self._scheme(only_scheme(self.name, schemes))
        four = isinstance(scheme, CodebookScheme)
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": four,
            "load_in_8bit": not four,
            "_load_in_4bit": four,
            "_load_in_8bit": not four,
            "bnb_4bit_quant_type": scheme.kind if four else "fp4",
            "bnb_4bit_use_double_quant": four and scheme.double_quant,
            "bnb_4bit_compute_dtype": _COMPUTE_DTYPE,
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_threshold": 6.0 if four else scheme.threshold,
            "llm_int8_skip_modules": list(ignore),
            "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_has_fp16_weight": False,
        }

    def scheme(self, config: Config, module: str) -> BnbScheme:
        if config.get("load_in_8bit") or config.get("_load_in_8bit"):
            return VectorwiseScheme(float(config.get("llm_int8_threshold", 6.0)))
        kind = config.get("bnb_4bit_quant_type", "fp4")
        if kind not in _KINDS:
            raise BadInput(f"quant_method bitsandbytes with {kind!r} is not supported")
        if config.get("bnb_4bit_quant_storage", "uint8") != "uint8":
            raise BadInput("quant_method bitsandbytes with codes stored as floats is not supported")
        return CodebookScheme(kind, double_quant=bool(config.get("bnb_4bit_use_double_quant")))


def _read_state(name: str, source: TensorSource) -> dict[str, Any]:
    """The checked `quant_state` JSON of a 4-bit weight."""
    data = expect_dtype(name, source.tensor(name), torch.uint8)
    try:
        state = json.loads(bytes(data.tolist()))
        size, shape = int(state["blocksize"]), [int(width) for width in state["shape"]]
        if len(shape) != 2 or size < 1 or min(shape) < 1:
            raise ValueError("its shape is no matrix")
        if "nested_offset" in state and state.get("nested_blocksize") != NESTED_BLOCK:
            raise ValueError(f"its nested blocks are not {NESTED_BLOCK}")
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{name} cannot be read: {error}") from error
    return state | {"blocksize": size, "shape": shape}


def _expect_table(name: str, source: TensorSource, kind: str) -> None:
    table = expect_shape(name, source.tensor(name), (16,)).to(torch.float32)
    if not torch.allclose(table, codebook(kind), rtol=0, atol=1e-6):
        raise BadInput(f"{name} is not the table of {kind}: its codes would be read wrong")


def _floats(name: str, source: TensorSource, count: int) -> torch.Tensor:
    return expect_dtype(name, expect_shape(name, source.tensor(name), (count,)), torch.float32)

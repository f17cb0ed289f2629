"""Quantized tensors with random parts, and checkpoints of one module, for the tests of formats."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from llmopt.base.errors import BadInput
from llmopt.quant.base.scheme import Activations, Scheme
from llmopt.quant.formats.registry import FORMATS
from llmopt.quant.kinds.base.kind import kind_of
from llmopt.quant.kinds.base.tensor import QuantizedTensor
from llmopt.quant.kinds.codebook.scheme import CodebookScheme
from llmopt.quant.kinds.e8p.scheme import E8pScheme
from llmopt.quant.kinds.fp4.kind import global_scale_of
from llmopt.quant.kinds.fp4.scheme import Fp4Scheme
from llmopt.quant.kinds.fp8.scheme import FloatScheme
from llmopt.quant.kinds.integer.kind import IntTensor
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.quant.kinds.lookup.kind import LookupTensor
from llmopt.quant.kinds.lookup.scheme import LookupScheme
from llmopt.quant.kinds.trellis.kind import TrellisTensor
from llmopt.quant.kinds.trellis.scheme import TrellisScheme
from llmopt.quant.kinds.vectorwise.scheme import VectorwiseScheme
from llmopt.quant.model.checkpoint import Checkpoint
from safetensors.torch import save_file

MODULE = "model.layers.0.mlp.up_proj"

_STATIC = Activations("fp8", "tensor", dynamic=False)
NVFP4_INPUTS = Activations("nvfp4", "group16", dynamic=False)
_FP4 = [Fp4Scheme("nvfp4"), Fp4Scheme("nvfp4", NVFP4_INPUTS)]
# What each format holds: every bit width and every granularity.
HELD: dict[str, Sequence[Scheme]] = {
    "awq": [IntScheme(4, 32, False), IntScheme(4, -1, False)],
    "gptq": [
        IntScheme(bits, group, symmetric)
        for bits in (2, 3, 4, 8)
        for group in (32, -1)
        for symmetric in (True, False)
    ]
    + [IntScheme(4, 32, True, permuted=True), IntScheme(3, 32, False, permuted=True)],
    "compressed-tensors": [
        *(
            IntScheme(bits, group, symmetric)
            for bits in (2, 3, 4, 5, 6, 8)
            for group in (32, -1)
            for symmetric in (True, False)
        ),
        IntScheme(8, -1, True, Activations("int8")),
        IntScheme(8, -1, False, Activations("int8")),
        IntScheme(8, -1, True, Activations("int8", "tensor", dynamic=False)),
        *(FloatScheme(granularity) for granularity in ("tensor", "channel", "block")),
        FloatScheme("channel", Activations("fp8")),
        FloatScheme("tensor", _STATIC),
        FloatScheme("channel", _STATIC),
        *_FP4,
        Fp4Scheme("mxfp4"),
        Fp4Scheme("mxfp4", Activations("mxfp4", "group32")),
        FloatScheme("block", Activations("fp8", "group128")),
    ],
    "modelopt": [
        *_FP4,
        FloatScheme("tensor", _STATIC),
        FloatScheme("channel", Activations("fp8")),
        FloatScheme("block"),
    ],
    "fp8": [FloatScheme("block", Activations("fp8", "group128"))],
    "bitsandbytes": [
        *(CodebookScheme(kind, 64, double) for kind in ("nf4", "fp4") for double in (False, True)),
        VectorwiseScheme(),
    ],
    "squeezellm": [LookupScheme(bits) for bits in (2, 3, 4, 8)] + [LookupScheme(4, 0.01)],
    "quip": [E8pScheme(bits) for bits in (2, 3, 4)],
    "exl3": [*(TrellisScheme(bits) for bits in (1, 2, 3, 8)), TrellisScheme(5, "mcg")],
}
CASES = [(name, scheme) for name, schemes in HELD.items() for scheme in schemes]


def case_id(value: object) -> str:
    return value if isinstance(value, str) else value.label.replace(" ", "-")  # pyright: ignore[reportAttributeAccessIssue]


class Tensors(dict[str, torch.Tensor]):
    """A `TensorSource` in memory."""

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self:
            raise BadInput(f"no tensor {name!r}")
        return self[name]


def random_weight(out: int, inner: int, seed: int) -> torch.Tensor:
    """A weight with what weights may have: an input channel and an output channel that are dead."""
    weight = torch.randn(out, inner, generator=torch.Generator().manual_seed(seed))
    weight[:, inner // 3] = 0
    weight[out // 2] = 0
    return weight


def make(
    scheme: Scheme, out: int, inner: int, seed: int = 0, scale_dtype: torch.dtype = torch.float16
) -> QuantizedTensor:
    """A weight of this scheme; integer codes are random, so that every code and zero code occurs."""
    generator = torch.Generator().manual_seed(seed)
    static = scheme.activations is not None and not scheme.activations.dynamic
    input_scale = torch.tensor([0.037]) if static else None
    weight = random_weight(out, inner, seed)
    if isinstance(scheme, Fp4Scheme) and static:
        input_scale = global_scale_of(torch.tensor(3.7))
    if isinstance(scheme, FloatScheme | Fp4Scheme | CodebookScheme | VectorwiseScheme):
        return kind_of(scheme).round(weight, scale_dtype, input_scale=input_scale)
    if isinstance(scheme, LookupScheme):
        return _lookup(scheme, out, inner, generator)
    if isinstance(scheme, E8pScheme):
        out, inner = -(-out // 8) * 8, -(-inner // 32) * 32
        return kind_of(scheme).round(
            random_weight(out, inner, seed), torch.float16, name="the weight"
        )
    if isinstance(scheme, TrellisScheme):
        out, inner = (-(-width // 128) * 128 for width in (out, inner))  # blocks of the transforms
        return trellis_tensor(scheme, out, inner, generator)
    assert isinstance(scheme, IntScheme)
    groups = scheme.num_groups(inner)
    zeros = torch.full((out, groups), scheme.middle, dtype=torch.uint8)
    if not scheme.symmetric:
        zeros = _codes(scheme.max_code, (out, groups), generator)
    index = None
    if scheme.permuted:
        order = torch.randperm(inner, generator=generator)
        index = (order // scheme.group_size).to(torch.int32)
    return IntTensor(
        codes=_codes(scheme.max_code, (out, inner), generator),
        scales=(torch.rand(out, groups, generator=generator) + 0.01).to(scale_dtype),
        zeros=zeros,
        scheme=scheme,
        group_index=index,
        input_scale=input_scale,
    )


def _codes(largest: int, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, largest + 1, shape, generator=generator, dtype=torch.uint8)


def trellis_tensor(
    scheme: TrellisScheme, out: int, inner: int, generator: torch.Generator
) -> TrellisTensor:
    """Random words, every one of which is a path; 128 divides both widths."""
    words = inner // 16, out // 16, 16 * scheme.bits
    trellis = torch.randint(-(2**15), 2**15, words, generator=generator).to(torch.int16)
    into, out_of = (torch.randn(width, generator=generator).half() for width in (inner, out))
    return TrellisTensor(trellis, into, out_of, scheme)


def _lookup(scheme: LookupScheme, out: int, inner: int, generator: torch.Generator) -> LookupTensor:
    codes = _codes(2**scheme.bits - 1, (out, inner), generator)
    table = torch.randn(out, 2**scheme.bits, generator=generator).sort(dim=1).values.half()
    if not scheme.sparse_fraction:
        return LookupTensor(codes, table, scheme)
    held = torch.rand(out, inner, generator=generator) < 0.05
    rows = torch.cat([torch.zeros(1), held.sum(dim=1).cumsum(0)]).to(torch.int32)
    columns = held.nonzero()[:, 1].to(torch.int32)
    values = torch.randn(columns.numel(), generator=generator).half()
    return LookupTensor(codes, table, scheme, rows, columns, values)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equality of bytes, which float8 has and its numbers have not."""
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
    )


def assert_same(left: QuantizedTensor, right: QuantizedTensor) -> None:
    assert left.scheme == right.scheme
    assert left.parts().keys() == right.parts().keys()
    for name, part in left.parts().items():
        assert same_bits(part, right.parts()[name]), name
        assert right.parts()[name].is_contiguous(), name
    assert torch.equal(left.dequantize(), right.dequantize())


def stored(name: str, tensor: QuantizedTensor) -> tuple[Tensors, dict[str, Any]]:
    """Tensors and `quantization_config` of a model that has this one module."""
    weight_format = FORMATS[name]
    weight_format.check_scheme(tensor.scheme)
    weight_format.check(MODULE, *tensor.shape, tensor.scheme)
    tensors = Tensors(weight_format.pack(MODULE, tensor))
    assert all(part.is_contiguous() for part in tensors.values())
    return tensors, weight_format.config({MODULE: tensor.scheme}, ["lm_head"])


def write_checkpoint(
    folder: Path, tensors: Mapping[str, torch.Tensor], quantization: dict[str, Any]
) -> Checkpoint:
    """A checkpoint folder of these tensors and a head."""
    folder.mkdir(exist_ok=True)
    head = {"lm_head.weight": torch.ones(16, 64)}
    save_file(dict(tensors) | head, folder / "model.safetensors", {"format": "pt"})
    config = {"model_type": "single_linear", "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return Checkpoint(folder)

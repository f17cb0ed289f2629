"""Scales packed without loss: the bytes held beside those of the file, and the bits of the wider scales."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from llmopt.base.processor import VARIABLE
from llmopt.engine.kernels.linear import native_pack
from llmopt.engine.kernels.linear.grid import TABLE_BLOCKS, CodeGrid, grid_of
from llmopt.engine.kernels.linear.native_linear import PackedLinear, native_linear
from llmopt.engine.kernels.linear.native_pack import (
    SCALE_KINDS,
    PackedScales,
    pack_codes,
    packed_scales,
)
from llmopt.engine.kernels.linear.quantized_linear import prepare_quantized_linear
from llmopt.quant.base.scheme import Scheme
from llmopt.quant.formats.registry import FORMATS
from llmopt.quant.kinds.base.tensor import QuantizedTensor
from llmopt.quant.kinds.codebook.scheme import CodebookScheme
from llmopt.quant.kinds.fp4.scheme import Fp4Scheme
from llmopt.quant.kinds.fp8.scheme import FloatScheme
from llmopt.quant.kinds.ggml.lattice import LATTICES
from llmopt.quant.kinds.ggml.scheme import GgufScheme
from llmopt.quant.kinds.ggml.tensor import LAYOUTS, GgufTensor, block_codes_torch, quantize_blocks
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.quant.kinds.vectorwise.scheme import VectorwiseScheme

from ...support.native_paths import native_paths
from ...support.packed_codes import pack_codes_torch
from ...support.quantized_world import quantized

HERE = native_paths()
NARROWED = [Fp4Scheme("nvfp4"), Fp4Scheme("mxfp4"), GgufScheme("MXFP4"), GgufScheme("Q2_K")]
OFFSET_KINDS = [None, torch.uint8, torch.float16, torch.int8]
OUT, INPUTS = 256, 768
FORMAT_SCHEMES: list[tuple[str, Scheme]] = [
    ("gptq", IntScheme(4, 32, False)),
    ("gptq", IntScheme(3, 32, True)),
    ("gptq", IntScheme(8, 32, True)),
    ("awq", IntScheme(4, 32, False)),
    ("compressed-tensors", IntScheme(8, -1, True)),
    ("compressed-tensors", FloatScheme("channel")),
    ("fp8", FloatScheme("block")),
    ("compressed-tensors", Fp4Scheme("nvfp4")),
    ("compressed-tensors", Fp4Scheme("mxfp4")),
    ("bitsandbytes", CodebookScheme("nf4")),
    ("bitsandbytes", CodebookScheme("fp4", 64, double_quant=True)),
    ("bitsandbytes", VectorwiseScheme()),
    *(
        ("gguf", GgufScheme(kind))
        for kind in ("Q2_K", "Q3_K", "Q4_0", "Q4_1", "Q4_K", "Q5_1", "Q5_K", "Q6_K", "Q8_0")
    ),
    *(("gguf", GgufScheme(kind)) for kind in (*TABLE_BLOCKS, *LATTICES)),
]


@pytest.fixture(params=HERE or ["off"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every path, forced."""
    monkeypatch.setenv(VARIABLE, request.param)
    if (reason := native_linear().reason) is not None:
        pytest.skip(reason)
    yield request.param


def weight_of(scheme: Scheme) -> QuantizedTensor:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(OUT, INPUTS, generator=generator) / INPUTS**0.5
    if isinstance(scheme, GgufScheme):
        return GgufTensor(quantize_blocks(weight, scheme.type), scheme)
    return quantized(weight, scheme, torch.float16)


@pytest.mark.sweep(10)
@pytest.mark.parametrize(
    ("format_name", "scheme"), FORMAT_SCHEMES, ids=lambda value: getattr(value, "label", value)
)
def test_a_weight_takes_little_more_in_memory_than_in_its_file(
    format_name: str, scheme: Scheme
) -> None:
    weight = weight_of(scheme)
    stored = FORMATS[format_name].pack("model.layers.0.mlp.up_proj", weight)
    file_bytes = sum(tensor.nbytes for tensor in stored.values())
    for input_bits in (8, 16):
        kernel = prepare_quantized_linear(weight, torch.bfloat16, input_bits)
        assert kernel.weight_bytes <= 1.15 * file_bytes


def wide(grid: CodeGrid) -> PackedScales:
    """The scales as the grid has them."""
    kind = None if grid.offsets is None else grid.offsets.dtype
    scale_kind = SCALE_KINDS.index(grid.scales.dtype)
    return PackedScales(grid.scales, grid.offsets, scale_kind, OFFSET_KINDS.index(kind))


@pytest.mark.parametrize("scheme", NARROWED, ids=lambda scheme: scheme.label)
def test_narrowed_scales_change_no_bit(
    path: str, scheme: Scheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = grid_of(weight_of(scheme))
    assert grid is not None
    x = torch.randn(5, INPUTS, generator=torch.Generator().manual_seed(1))
    narrow = [PackedLinear(grid, kind) for kind in ("int8", "float32")]
    monkeypatch.setattr(native_pack, "packed_scales", wide)
    whole = [PackedLinear(grid, kind) for kind in ("int8", "float32")]
    for one, other in zip(narrow, whole, strict=True):
        assert one.weight_bytes < other.weight_bytes
        assert torch.equal(one(x), other(x))
        ids = torch.tensor([0, 31, 32, OUT - 1])
        assert torch.equal(one.lookup(ids, torch.float32), other.lookup(ids, torch.float32))


def test_scales_of_many_values_stay_as_they_are() -> None:
    scales = torch.rand(OUT, 48)
    grid = CodeGrid(torch.zeros(OUT, INPUTS, dtype=torch.uint8), 4, 16, scales)
    assert packed_scales(grid).scales is scales
    last = torch.ones(OUT, 48)  # alike at first, too many in the end
    last[-10:] = torch.rand(10, 48)
    assert packed_scales(CodeGrid(grid.codes, 4, 16, last)).scales is last


@pytest.mark.parametrize("count", [256, 257])
def test_halves_of_256_values_are_bytes(path: str, count: int) -> None:
    values = torch.arange(count).to(torch.int16).view(torch.float16)
    order = torch.randperm(OUT * 48, generator=torch.Generator().manual_seed(0)) % count
    scales = values[order].view(OUT, 48)
    apart = torch.stack([scales, scales], dim=-1)[..., 0]  # as in blocks, at a stride
    packed = packed_scales(CodeGrid(torch.zeros(OUT, INPUTS, dtype=torch.uint8), 4, 16, apart))
    if count > 256:
        assert packed.scales is apart
    else:
        assert packed.table is not None
        assert torch.equal(packed.table[packed.scales.long()], scales.float())


@pytest.mark.parametrize("kind", LAYOUTS)
def test_blocks_are_packed_as_their_codes(path: str, kind: str) -> None:
    g = torch.Generator().manual_seed(0)
    scheme = GgufScheme(kind)
    width, size = scheme.block
    for out, blocks in ((1, 1), (33, 3), (64, 11)):
        data = torch.randint(0, 256, (out, blocks * size), dtype=torch.uint8, generator=g)
        weight, bits = GgufTensor(data, scheme), 4 if kind in TABLE_BLOCKS else scheme.bits
        codes = block_codes_torch(data.view(-1, size), kind).view(out, blocks * width)
        assert torch.equal(pack_codes(weight, bits), pack_codes_torch(codes, bits))

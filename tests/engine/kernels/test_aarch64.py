"""The C kernels on aarch64: features of the processor, and the bits of every path beside those of AVX2.

The whole tests of the kernels run there by `make test-arm`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from llmopt.base import processor
from llmopt.base.processor import (
    PROFILE_VARIABLE,
    VARIABLE,
    choose_path,
    machine_flags,
    processor_flags,
)
from llmopt.engine.kernels.attention.batch import AttentionRule
from llmopt.engine.kernels.attention.dispatch import attend_native
from llmopt.engine.kernels.elementwise.native_rows import ACTIVATIONS, NativeGate, NativeNorm
from llmopt.engine.kernels.elementwise.reference import ActivationQuant
from llmopt.engine.kernels.linear.grid import grid_of, lattice_grid
from llmopt.engine.kernels.linear.native_linear import InputDtype, PackedLinear, native_linear
from llmopt.quant.base.scheme import Activations, Scheme
from llmopt.quant.kinds.codebook.scheme import CodebookScheme
from llmopt.quant.kinds.fp4.scheme import Fp4Scheme
from llmopt.quant.kinds.ggml.scheme import GgufScheme
from llmopt.quant.kinds.integer.scheme import IntScheme

from ...support.attention_world import World
from ...support.emulated_kernels import emulated_paths, missing, pretend_aarch64
from .test_native_experts import COUNT, expert, routing, selected
from .test_native_linear import inputs_of, random_lattice, weight_of

Compute = Callable[[], list[torch.Tensor]]


@pytest.mark.parametrize(
    ("features", "name", "option"),
    [
        ("fp asimd evtstrm", "neon", "-march=armv8-a"),
        ("fp asimd asimddp", "dotprod", "-march=armv8.2-a+dotprod"),
        ("fp asimd asimddp i8mm", "i8mm", "-march=armv8.2-a+dotprod+i8mm"),
        ("fp asimd asimddp i8mm bf16", "i8mm", "-march=armv8.2-a+dotprod+i8mm+bf16"),
    ],
)
def test_the_path_follows_the_features(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, features: str, name: str, option: str
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nFeatures\t: {features}\n")
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(processor.platform, "machine", lambda: "aarch64")
    monkeypatch.setenv(VARIABLE, "auto")
    monkeypatch.delenv(PROFILE_VARIABLE, raising=False)
    machine_flags.cache_clear()
    try:
        path = choose_path()
        assert not isinstance(path, str) and path.name == name
        assert path.compiler_options(processor_flags())[-1] == option
    finally:
        machine_flags.cache_clear()


def test_macos_is_asked_by_sysctl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor.sys, "platform", "darwin")
    monkeypatch.setattr(processor, "_sysctl", lambda feature: feature != "FEAT_I8MM")
    assert processor.arm_features() == {"asimd", "asimddp", "bf16"}


def _linear(scheme: Scheme, dtype: InputDtype) -> Compute:
    def compute() -> list[torch.Tensor]:
        grid = grid_of(weight_of(scheme, 70, 512))
        assert grid is not None
        return [PackedLinear(grid, dtype)(inputs_of(11, 512))]

    return compute


def _blocks(scheme: Scheme) -> Compute:
    """8-bit inputs with a scale for every 32, in tiles of one row, two, and three to eight."""

    def compute() -> list[torch.Tensor]:
        grid = grid_of(weight_of(scheme, 70, 512))
        assert grid is not None
        linear, x = PackedLinear(grid, "int8", input_block=32, levels=127.0), inputs_of(19, 512)
        return [linear(x[:rows]) for rows in (1, 2, 3, 8, 19)]

    return compute


def _norm_in_blocks() -> list[torch.Tensor]:
    """A norm that quantizes in blocks of 32, and the GEMM of its codes."""
    grid = grid_of(weight_of(GgufScheme("Q4_K"), 70, 512))
    assert grid is not None
    norm = NativeNorm(torch.linspace(0.5, 2.0, 512), 1e-6)
    as_q8 = ActivationQuant(Activations("int8"), int8_levels=127.0, block=32)
    codes = norm.quantized(inputs_of(11, 512), None, as_q8)[1]
    linear = PackedLinear(grid, "int8", input_block=32, levels=127.0)
    return [codes.codes, codes.scales, linear.of_quantized(codes, torch.float32)]


def _lattice(kind: str) -> Compute:
    def compute() -> list[torch.Tensor]:
        pytest.importorskip("gguf")
        grid, x = lattice_grid(random_lattice(kind, 70, 512)), inputs_of(11, 512)
        linear = PackedLinear(grid, "int8", input_block=32, levels=127.0)
        rows = linear.lookup(torch.tensor([0, 69, 31]), torch.float32)
        return [linear(x), linear(x[:2]), rows, PackedLinear(grid, "float32")(x)]

    return compute


def _experts() -> list[torch.Tensor]:
    results = []
    for scheme, bits in ((GgufScheme("Q4_1"), 8), (IntScheme(4, 32, True), 16)):
        experts = [expert(number, scheme, torch.float32, bits) for number in range(COUNT)]
        results.append(selected(experts, torch.float32)(*routing(20, 2, torch.float32)))
    return results


def _attention() -> list[torch.Tensor]:
    """8-bit keys: dequantized under float32 queries, multiplied as codes under bfloat16."""
    lengths, news, rule = [300, 40, 9], [1, 40, 1], AttentionRule(0.2)
    results = []
    for stored in (torch.int8, torch.float8_e4m3fn):
        results.append(World(lengths, news, stored=stored).attend(attend_native, rule))
    world = World(lengths, news, stored=torch.int8, dtype=torch.bfloat16)
    world.values = World(lengths, news).values  # in pairs of bfloat16, others would have other bits
    return [*results, world.attend(attend_native, rule)]


def _rows() -> list[torch.Tensor]:
    grid = grid_of(weight_of(GgufScheme("Q6_K"), 70, 512))
    assert grid is not None
    ids = torch.tensor([0, 69, 31, 32])
    return [
        PackedLinear(grid, "float32").lookup(ids, dtype)
        for dtype in (torch.float32, torch.bfloat16)
    ]


def _layer() -> list[torch.Tensor]:
    x, added = inputs_of(3, 208), inputs_of(3, 208, 2)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        a, b = x.to(dtype), added.to(dtype)
        norm = NativeNorm(torch.linspace(0.5, 2.0, 208).to(dtype), 1e-6)
        results += [*norm(a, b), *(NativeGate(name)(a, b) for name in ACTIVATIONS)]
        codes = norm.quantized(a, b, ActivationQuant(Activations("int8"), int8_levels=127.0))[1]
        results += [codes.codes, codes.scales]
    return results


CASES = {
    **{
        f"{scheme.label}-{dtype}": _linear(scheme, dtype)
        for scheme in (IntScheme(4, 32, False), IntScheme(8, -1, True), GgufScheme("Q5_K"))
        for dtype in ("int8", "float32")
    },
    "nf4-float32": _linear(CodebookScheme("nf4"), "float32"),
    **{
        f"{scheme.label}-blocks": _blocks(scheme)
        for scheme in (
            *(GgufScheme(kind) for kind in ("Q4_K", "Q6_K", "Q8_0", "IQ4_XS")),
            *(Fp4Scheme("nvfp4"), Fp4Scheme("mxfp4")),
        )
    },
    **{kind: _lattice(kind) for kind in ("IQ3_S", "IQ2_XS", "IQ1_S")},
    "norm-in-blocks": _norm_in_blocks,
    "experts": _experts,
    "attention": _attention,
    "lookup": _rows,
    "elementwise": _layer,
}


LONG_TO_COMPILE = ("experts",)
"""Compared on the first path alone; `make test-arm` runs them on all."""


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("case", CASES)
def test_every_path_gives_the_bits_of_avx2(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    if not {"avx2", "fma", "f16c"} <= processor_flags():
        pytest.skip("the reference is an x86 processor with AVX2")
    monkeypatch.setenv(VARIABLE, "avx2")
    if native_linear().library is None:
        pytest.skip(str(native_linear().reason))
    expected = CASES[case]()
    pretend_aarch64(monkeypatch)
    paths = list(emulated_paths())
    assert paths == ["i8mm", "dotprod", "neon"]
    for name in paths[:1] if case in LONG_TO_COMPILE else paths:
        monkeypatch.setenv(VARIABLE, name)
        results = CASES[case]()
        for got, wanted in zip(results, expected, strict=True):
            assert torch.equal(got, wanted), name

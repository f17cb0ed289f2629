"""Launches of a decode step, a layer, with Triton's kernels: what no later change may raise."""

from __future__ import annotations

import ctypes
import dis
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt import engine
from llmopt.engine.kernels.common import devices
from llmopt.engine.kernels.common.devices import HOPPER, VARIABLE, dependent_launch
from llmopt.engine.kernels.elementwise.reference import ActivationQuant
from llmopt.quant.base.scheme import Activations, Scheme
from llmopt.quant.kinds.fp8.scheme import FloatScheme
from llmopt.quant.kinds.integer.scheme import IntScheme

from ...support.launches import launches_per_layer
from ...support.model_families import FAMILIES
from ...support.pretended_cuda.card import Card
from ...support.pretended_cuda.runtime import pretended_cuda
from ...support.quantized_world import quantized
from ...support.triton_world import DEVICE

MOST = {"llama-3.1": 9, "gemma-3": 11, "qwen3-moe": 13, "gpt-oss": 14, "deepseek-v3": 18}
MOST |= {"granite-4": 20, "qwen3.5-moe": 19, "lfm-2-moe": 12}
"""Their last layers are Mamba 2, a gated delta net and a short convolution."""
LAST = {"gated attention": ("qwen3.5", ["linear_attention", "linear_attention", "full_attention"])}
"""Families whose layers are in another order."""
MOST |= {"gated attention": 12}


@pytest.mark.sweep(1)
@pytest.mark.skipif(DEVICE != "cpu", reason="the interpreter's launches are counted")
@pytest.mark.parametrize("family", MOST)
def test_launches_a_layer(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "interpret")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    name, kinds = LAST.get(family, (family, None))
    config, overrides = FAMILIES[name]
    layers = {} if kinds is None else {"layer_types": kinds}
    counts = launches_per_layer(config, overrides | layers, tmp_path)
    assert 0 < counts.total() <= MOST[family], counts


@pytest.mark.parametrize(
    ("capability", "driver", "dtype", "is_dependent"),
    [
        ((9, 0), 12030, torch.bfloat16, True),
        ((9, 0), 12020, torch.bfloat16, False),
        ((8, 9), 12080, torch.bfloat16, False),
        ((9, 0), 12030, torch.int8, False),
        ((9, 0), 12030, torch.float32, False),
    ],
)
def test_kernels_of_16_bit_steps_start_before_their_predecessor_ends(
    capability: tuple[int, int],
    driver: int,
    dtype: torch.dtype,
    is_dependent: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a graph can keep the dependency; the interpreter, which knows none, is never asked for it."""
    assert dependent_launch(torch.zeros(1, dtype=dtype)) == {"PDL": False}

    class Driver:
        """The driver's library as `ctypes` loads it."""

        @staticmethod
        def cuDriverGetVersion(version: Any) -> int:
            version._obj.value = driver
            return 0

    libraries = {"libcuda.so.1": Driver}
    load = ctypes.CDLL  # which loads the pretended card's device guard, once a process
    monkeypatch.setattr(ctypes, "CDLL", lambda name: libraries.get(name) or load(name))
    with pretended_cuda(Card(capability=capability)):
        given = dependent_launch(torch.zeros(1, dtype=dtype, device="cuda"))
    assert given == ({"PDL": True, "launch_pdl": True} if is_dependent else {"PDL": False})
    monkeypatch.setenv("LLMOPT_PDL", "off")
    with pretended_cuda(Card(capability=capability)):
        assert dependent_launch(torch.zeros(1, dtype=dtype, device="cuda")) == {"PDL": False}


INT4, FP8 = IntScheme(4, 128, True), FloatScheme("channel", Activations("fp8"))


@pytest.mark.skipif(DEVICE != "cpu", reason="the interpreter's launches are watched")
@pytest.mark.parametrize("scheme", [INT4, FP8], ids=["int4", "fp8"])
def test_kernels_of_quantized_steps_start_before_their_predecessor_ends(
    scheme: Scheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmopt.engine.kernels.elementwise.triton_rows import TritonGate, TritonNorm
    from llmopt.engine.kernels.linear.triton_gemm import gemm
    from llmopt.engine.kernels.linear.triton_packed_weight import pack_weight
    from triton.runtime.interpreter import InterpretedFunction

    dependent: dict[str, bool] = {}

    def run(kernel: Any, *_: Any, **named: Any) -> None:
        dependent[kernel.fn.__name__] = named["PDL"] and named["launch_pdl"]

    monkeypatch.setattr(InterpretedFunction, "run", run)
    monkeypatch.setattr(devices, "PRETENDED", replace(HOPPER, has_dependent_launch=True))
    x, weight = (
        torch.zeros(2, 256, dtype=torch.bfloat16),
        quantized(torch.ones(64, 256), scheme, torch.bfloat16),
    )
    packed = pack_weight(weight, [torch.float8_e4m3fn, torch.int8])
    assert packed is not None
    if scheme.activations is None:
        gemm(x, packed.with_table_in(torch.bfloat16), torch.bfloat16)
    else:
        rounded = ActivationQuant(scheme.activations)
        rows = TritonGate("silu").quantized(x, x, rounded)
        TritonNorm(x[0], 1e-6).quantized(x, None, rounded)
        gemm(rows.codes, packed, torch.bfloat16, rows.scales)
    names = {"_gemm"} if scheme is INT4 else {"_gemm", "_norm", "_quantized_gate"}
    assert dependent == dict.fromkeys(names, True)


ENGINE = Path(engine.__path__[0])
KERNELS = [path for path in ENGINE.rglob("*.py") if "@triton.jit" in path.read_text()]


def test_the_modules_of_kernels_are_found() -> None:
    assert len(KERNELS) > 10


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_kernels_read_no_plain_number_of_their_module(path: Path) -> None:
    """Triton compiles none that does, though its interpreter runs it."""
    place = path.relative_to(ENGINE).with_suffix("").parts
    module = import_module(".".join(("llmopt", "engine", *place)))
    plain: list[str] = []
    for name, kernel in vars(module).items():
        function: Any = getattr(kernel, "fn", None)
        for instruction in () if function is None else dis.get_instructions(function):
            held = getattr(module, str(instruction.argval), None)
            if instruction.opname == "LOAD_GLOBAL" and isinstance(held, int | float | str):
                plain.append(f"{name}: {instruction.argval}")
    assert not plain

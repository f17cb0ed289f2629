"""Unquantized weights of 16 bits beside float32 inputs: in C on every path, in torch, and as one model holds them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from llmopt.base.processor import VARIABLE
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.kernels.linear.linear import HALVES, LinearKernel, TorchLinear, prepare_linear
from llmopt.engine.kernels.linear.native_linear import HalfLinear, LooksUpRows
from llmopt.engine.model.layers.projection import Projection
from llmopt.recipes import MODELS

from ...support.native_paths import native_paths

SHAPES = [(512, 256), (70, 100), (33, 31), (1, 7), (96, 640)]


@pytest.fixture(params=[*native_paths(), "off"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every path, forced, and torch without one."""
    monkeypatch.setenv(VARIABLE, request.param)
    yield request.param


def weight_of(out: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(out, inputs, generator=torch.Generator().manual_seed(0)).to(dtype)


def kernel_of(path: str, weight: torch.Tensor) -> LinearKernel:
    kernel = prepare_linear(weight, torch.float32)
    assert isinstance(kernel, TorchLinear if path == "off" else HalfLinear)
    return kernel


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_multiplies_as_float64_does(
    path: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    weight = weight_of(*shape, dtype)
    kernel = kernel_of(path, weight)
    for rows in (1, 2, 3, 4, 7, 40, 130):
        x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows))
        exact = x.double() @ weight.double().T
        got = kernel(x)
        assert got.dtype is torch.float32
        assert (got.double() - exact).norm() <= 1e-6 * exact.norm()


@pytest.mark.parametrize("path", native_paths(), indirect=True)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_never_depends_on_the_others(
    path: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    kernel = kernel_of(path, weight_of(*shape, dtype))
    x = torch.randn(133, shape[1])
    together = kernel(x)
    assert all(torch.equal(kernel(x[row : row + 1])[0], together[row]) for row in (0, 1, 5, 132))
    assert torch.equal(kernel(x[:5]), together[:5])
    assert kernel(x[:0]).shape == (0, shape[0])


@pytest.mark.parametrize("path", native_paths(), indirect=True)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_looked_up_exactly(path: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight = weight_of(*shape, dtype)
    # Numbers below the normal ones are widened, too.
    weight.flatten()[:4] = torch.tensor([1e-7, -3e-7, float("inf"), 0.0]).to(dtype)
    kernel, ids = kernel_of(path, weight), torch.randint(0, shape[0], (70,))
    assert isinstance(kernel, LooksUpRows)
    assert torch.equal(kernel.lookup(ids, torch.float32), weight[ids].float())
    assert torch.equal(kernel.lookup(ids, torch.bfloat16), weight[ids].bfloat16())


def test_a_projection_adds_its_bias_and_stacks_both_kinds(path: str) -> None:
    weights = [weight_of(70, 100, torch.bfloat16), weight_of(33, 100, torch.float16)]
    bias, x = torch.randn(103), torch.randn(3, 100)
    got = Projection(weights, bias, torch.float32)(x)
    torch.testing.assert_close(got, x @ torch.cat(weights).T + bias, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("model", ["stories3M", "stories260K"])
def test_a_model_holds_what_its_file_does_and_changes_no_logit(
    path: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A float32 engine with the file's 16 bits, beside one that widens the weights at loading."""

    def logits() -> tuple[int, torch.Tensor]:
        folder = Path(MODELS / model)
        engine = Engine(EngineConfig(folder, device="cpu", dtype="float32", num_blocks=20))
        return engine.memory.weight_bytes, engine.prompt_logits([1, 300, 17, 17, 511])

    held, got = logits()
    monkeypatch.setattr("llmopt.engine.model.decoder.reader.keeps_halves", lambda *_: False)
    held_wide, expected = logits()
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert 0.5 * held_wide <= held < 0.53 * held_wide

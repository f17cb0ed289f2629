"""oneDNN's prepacked weights: rows looked up are the table's, few rows are multiplied in its layout, and both are
given up where the layout is unknown."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.kernels.linear import linear as module
from llmopt.engine.kernels.linear.linear import (
    LINEAR,
    LinearKernelQuery,
    OneDnnLinear,
    prepare_linear,
)
from llmopt.recipes import MODELS


def weight_of(out: int, inputs: int) -> torch.Tensor:
    return torch.randn(out, inputs, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.mark.parametrize(("out", "inputs"), [(512, 256), (70, 100), (33, 640), (1, 32), (5000, 64)])
def test_rows_are_those_of_the_weight(out: int, inputs: int) -> None:
    weight = weight_of(out, inputs)
    linear = prepare_linear(weight, torch.bfloat16)
    if not isinstance(linear, OneDnnLinear):
        pytest.skip("oneDNN has no bfloat16 here")
    rows = linear.rows()
    if rows is None:
        pytest.skip("this processor has another layout")
    ids = torch.randint(0, out, (40,), generator=torch.Generator().manual_seed(1))
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(rows.lookup(ids, dtype), weight[ids].to(dtype))
    assert rows.lookup(ids[:0], torch.bfloat16).shape == (0, inputs)
    assert linear._found(weight + 1) is None


SHAPES = [(512, 256), (70, 100), (33, 640), (1, 32), (5000, 64), (576, 1536), (100, 64)]


@pytest.mark.parametrize(("out", "inputs"), SHAPES)
def test_few_rows_are_multiplied_each_by_itself(out: int, inputs: int) -> None:
    weight = weight_of(out, inputs)
    linear = prepare_linear(weight, torch.bfloat16)
    if not isinstance(linear, OneDnnLinear) or linear.words is None:
        pytest.skip("no bfloat16 of oneDNN, no compiler, or another layout")
    wide = torch.randn(module.FEW_ROWS + 2, inputs + 3).bfloat16()
    every = wide[:, :inputs]  # its rows are apart
    alone = torch.cat([linear(row[None]) for row in every])
    exact = every.double() @ weight.double().T
    scale = every.double().abs() @ weight.double().abs().T
    assert ((alone.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6 * scale).all()
    for rows in range(1, module.FEW_ROWS + 1):
        assert torch.equal(linear(every[:rows]), alone[:rows])
    assert linear(every[:0]).shape == (0, out)
    assert torch.allclose(
        linear(every[None, :2])[0].float(), alone[:2].float(), rtol=2**-7, atol=1e-3
    )
    assert torch.allclose(linear(every).float(), alone.float(), rtol=2**-7, atol=1e-3)


def test_a_tied_head_of_floats_is_in_memory_once_and_changes_no_logit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def logits() -> tuple[int, torch.Tensor]:
        folder = Path(MODELS / "stories3M")
        engine = Engine(EngineConfig(folder, device="cpu", dtype="bfloat16", num_blocks=20))
        return engine.memory.weight_bytes, engine.prompt_logits([1, 300, 17, 17, 511])

    held, got = logits()
    monkeypatch.setattr(module, "ONEDNN_BLOCKS", ())
    held_apart, expected = logits()
    assert torch.equal(got, expected)
    if not isinstance(prepare_linear(weight_of(512, 256), torch.bfloat16), OneDnnLinear):
        pytest.skip("oneDNN has no bfloat16 here")
    monkeypatch.undo()
    if OneDnnLinear(weight_of(512, 256)).words is not None:
        assert held == held_apart - 512 * 256 * 2 == 3_083_008 * 2


def test_a_torch_without_an_operator_of_onednn_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(module, "ONEDNN_OPERATORS", ("_is_gone",))
    query = LinearKernelQuery("cpu", torch.bfloat16, 16, 32, torch.bfloat16)
    assert LINEAR.select(query).name == "torch"
    assert module._refuses_onednn(query) == "this torch has no operator mkldnn._is_gone"

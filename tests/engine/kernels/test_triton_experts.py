"""Grouped GEMMs of experts in Triton, against a loop over experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.engine import LLM, SamplingParams
from llmopt.engine.kernels.common.devices import VARIABLE
from llmopt.engine.kernels.elementwise.dispatch import RowKernelQuery
from llmopt.engine.kernels.moe.dispatch import EXPERTS, ExpertsKernelQuery, LoopedExperts
from llmopt.engine.model.layers.mlp import ACTIVATIONS, GatedMlp, PlainMlp, gating
from llmopt.engine.model.layers.projection import Projection
from llmopt.quant.base.scheme import Activations, Scheme
from llmopt.quant.families.spec_parts import CLAMPED_SWIGLU
from llmopt.quant.kinds.codebook.scheme import CodebookScheme
from llmopt.quant.kinds.fp8.scheme import FloatScheme
from llmopt.quant.kinds.integer.scheme import IntScheme

from ...support.model_families import FAMILIES, save_model
from ...support.quantized_world import quantized
from ...support.triton_world import DEVICE

HIDDEN, INNER, COUNT = 128, 64, 5
SCHEMES: list[Scheme | None] = [
    None,
    IntScheme(4, 32, False),
    CodebookScheme("nf4", 32),
    FloatScheme("block"),
    IntScheme(8, -1, True, Activations("int8")),
    FloatScheme("channel", Activations("fp8")),
]


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "interpret" if DEVICE == "cpu" else "auto")


def expert(number: int, scheme: Scheme | None, bias: bool, activation: str) -> GatedMlp:
    g = torch.Generator().manual_seed(number)

    def projection(out: int, inputs: int) -> Projection:
        weight = torch.randn(out, inputs, generator=g) * inputs**-0.5
        held = weight if scheme is None else quantized(weight, scheme, torch.float32)
        add = torch.randn(out, generator=g).to(DEVICE) if bias else None
        return Projection([held.to(DEVICE)], add, torch.float32)

    combine = gating(activation, RowKernelQuery(DEVICE, torch.float32, INNER))
    return GatedMlp(projection(2 * INNER, HIDDEN), projection(HIDDEN, INNER), combine)


def routing(tokens: int, per_token: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, top-k weights, and expert ids; no token is routed to the last expert."""
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=g)
    chosen = torch.rand(tokens, COUNT - 1, generator=g).topk(per_token, dim=1)
    return x.to(DEVICE), chosen.values.to(DEVICE), chosen.indices.to(DEVICE)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_they_are_the_sum_of_the_experts(scheme: Scheme | None) -> None:
    experts = [expert(number, scheme, False, "silu") for number in range(COUNT)]
    kernel_query = ExpertsKernelQuery(DEVICE, torch.float32)
    kernel = EXPERTS.select(kernel_query).run(experts, range(COUNT), COUNT, False)
    assert type(kernel).__name__ == "GroupedExperts"
    reference = LoopedExperts(experts, range(COUNT), COUNT, False)
    many = [(170, 3)] if scheme is None else []
    for tokens, per_token in ((1, 1), (3, 3), (20, 2), *many):
        given = routing(tokens, per_token)
        torch.testing.assert_close(kernel(*given), reference(*given), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("on_inputs", [False, True])
@pytest.mark.parametrize("activation", ["gelu", CLAMPED_SWIGLU])
def test_biases_and_weights_on_the_inputs(activation: str, on_inputs: bool) -> None:
    experts = [expert(number, None, True, activation) for number in range(COUNT)]
    kernel_query = ExpertsKernelQuery(DEVICE, torch.float32)
    kernel = EXPERTS.select(kernel_query).run(experts, range(COUNT), COUNT, on_inputs)
    reference = LoopedExperts(experts, range(COUNT), COUNT, on_inputs)
    assert type(kernel) is not type(reference)
    given = routing(9, 3)
    torch.testing.assert_close(kernel(*given), reference(*given), atol=2e-5, rtol=1e-4)


def test_experts_of_different_kinds_are_run_one_by_one() -> None:
    kinds: list[Scheme | None] = [None, IntScheme(4, 32, False), None]
    experts = [expert(number, scheme, False, "silu") for number, scheme in enumerate(kinds)]
    kernel_query = ExpertsKernelQuery(DEVICE, torch.float32)
    kernel = EXPERTS.select(kernel_query).run(experts, range(3), 3, False)
    assert isinstance(kernel, LoopedExperts)


def without_gate(number: int, bias: bool) -> PlainMlp:
    """An expert of Nemotron-H: squared ReLU, no gate."""
    gated = expert(number, None, bias, "silu")
    return PlainMlp(gated.gate_up, wide_down(number, bias), ACTIVATIONS["relu2"])


def wide_down(number: int, bias: bool) -> Projection:
    g = torch.Generator().manual_seed(100 + number)
    weight = torch.randn(HIDDEN, 2 * INNER, generator=g) * (2 * INNER) ** -0.5
    add = torch.randn(HIDDEN, generator=g).to(DEVICE) if bias else None
    return Projection([weight.to(DEVICE)], add, torch.float32)


@pytest.mark.parametrize("bias", [False, True])
def test_experts_without_gates_are_grouped(bias: bool) -> None:
    experts = [without_gate(number, bias) for number in range(COUNT)]
    query = ExpertsKernelQuery(DEVICE, torch.float32, is_gated=False)
    kernel = EXPERTS.select(query).run(experts, range(COUNT), COUNT, False)
    assert type(kernel).__name__ == "GroupedExperts" and kernel.is_capturable
    reference = LoopedExperts(experts, range(COUNT), COUNT, False)
    given = routing(9, 3)
    torch.testing.assert_close(kernel(*given), reference(*given), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("ids", [range(2), range(2, 5), range(1, 3)], ids=str)
@pytest.mark.parametrize("kind", ["gated", "with biases", "without gates", "one by one"])
def test_the_experts_of_a_rank_are_grouped_and_add_up(kind: str, ids: range) -> None:
    """Each rank sums what its own experts do; rows of all others are neither computed nor read."""
    if kind == "without gates":
        experts: list[Any] = [without_gate(number, True) for number in range(COUNT)]
    else:
        experts = [expert(number, None, kind == "with biases", "silu") for number in range(COUNT)]
    on_inputs = kind == "one by one"
    query = ExpertsKernelQuery(DEVICE, torch.float32, is_gated=kind != "without gates")
    kernel = EXPERTS.select(query).run(experts[ids.start : ids.stop], ids, COUNT, on_inputs)
    reference = LoopedExperts(experts[ids.start : ids.stop], ids, COUNT, on_inputs)
    assert type(kernel).__name__ == "GroupedExperts" and kernel.is_capturable
    for given in (routing(1, 1), routing(9, 3)):
        torch.testing.assert_close(kernel(*given), reference(*given), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("total", [40, 1500])
def test_rows_of_other_ranks_experts_are_in_no_tile(total: int) -> None:
    from llmopt.engine.kernels.moe.triton_token_permutation import MAX_COUNTED, permute_tokens

    assert 40 < MAX_COUNTED < 1500
    count = 16  # a power of two, which leaves no lane for the others
    experts = torch.randint(0, count + 1, (total,), generator=torch.Generator().manual_seed(1))
    parts = permute_tokens(experts.to(DEVICE), count, 1, has_others=True)
    order = parts.order.tolist()
    assert order == experts.argsort(stable=True).tolist()
    met = [place for _, begin, end in parts.tiles.tolist() for place in range(begin, end)]
    assert sorted(met) == list(range(int((experts < count).sum())))


@pytest.mark.skipif(DEVICE != "cpu", reason="the interpreter's launches are looked at")
@pytest.mark.parametrize(
    ("outputs", "inputs", "each"), [(1536, 2048, 16), (2048, 768, 6)], ids=["gate and up", "down"]
)
def test_splits_count_the_experts_that_a_token_meets(
    outputs: int, inputs: int, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Divide Qwen3-30B's, whose tokens meet 8 experts: rounds of programs cost 18 runs in place of 24, and 8 in
    place of 12; the same for any batch of up to 64 tokens, since a token's sums follow the split."""
    from llmopt.engine.kernels.common.devices import HOPPER, SPLIT_RUNS, split_runs
    from llmopt.engine.kernels.linear.triton_gemm import OUTPUTS, gemm
    from llmopt.engine.kernels.linear.triton_packed_weight import (
        pack_float_weight,
        stack_packed_weights,
    )
    from llmopt.engine.kernels.moe.triton_token_permutation import permute_tokens
    from triton.runtime.interpreter import GridExecutor

    grids: list[tuple[int, ...]] = []

    def record(self: Any, *_: Any, **__: Any) -> None:
        grids.append(self.grid)

    packed = pack_float_weight(torch.zeros(outputs, inputs, dtype=torch.bfloat16))
    assert packed is not None
    weight = stack_packed_weights([packed] * 8)
    assert weight is not None
    for tokens in (1, 3, 64):
        routed = permute_tokens(torch.arange(8).repeat(tokens), 8, 8, (16, 64))
        with monkeypatch.context() as patch:
            patch.setattr(GridExecutor, "__call__", record)
            gemm(
                torch.zeros(tokens, inputs, dtype=torch.bfloat16),
                weight,
                torch.bfloat16,
                parts=routed,
            )
    tiles, runs, slots = outputs // OUTPUTS, weight.num_runs, 4 * HOPPER.multiprocessors
    assert {grid[:2] for grid in grids} == {(tiles, runs // each)} and len(grids) == 3

    def cost(runs_per_split: int) -> int:
        rounds = -(-8 * tiles * -(-runs // runs_per_split) // slots)
        return rounds * (runs_per_split + SPLIT_RUNS)

    alone = split_runs(tiles, runs, slots)
    assert (cost(alone), cost(each)) == {1536: (24, 18), 2048: (12, 8)}[outputs]


@pytest.mark.sweep(5)
@pytest.mark.parametrize("total", [1, 16, 40, 333, 5000])
@pytest.mark.parametrize("spread", ["even", "one", "first and last"])
def test_every_routed_token_is_in_a_tile_of_its_expert(total: int, spread: str) -> None:
    from llmopt.engine.kernels.moe.triton_token_permutation import MAX_COUNTED, permute_tokens

    assert MAX_COUNTED < 5000
    g, count = torch.Generator().manual_seed(total), 7
    experts = torch.randint(0, count, (total,), generator=g)
    if spread != "even":
        experts = torch.full((total,), 3) if spread == "one" else experts.remainder(2) * (count - 1)
    parts = permute_tokens(experts.to(DEVICE), count, 1)
    order = parts.order.tolist()
    assert order == experts.argsort(stable=True).tolist()
    met: list[int] = []
    for part, begin, end in parts.tiles.tolist():
        assert end - begin <= parts.rows
        assert {int(experts[order[place]]) for place in range(begin, end)} <= {part}
        met += range(begin, end)
    assert sorted(met) == list(range(total))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss", "deepseek-v3", "gemma-3"])
def test_greedy_tokens(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, overrides = FAMILIES[family]
    num_layers = len(overrides.get("layer_types", (0, 1)))
    save_model(tmp_path, kind, {**overrides, "num_hidden_layers": num_layers})
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)

    def tokens() -> list[tuple[int, ...]]:
        built = LLM(tmp_path, device=DEVICE, dtype="float32")
        prompts = [[1, 5, 9], [7 + 3 * i for i in range(6)]]
        return [tuple(result.token_ids) for result in built.generate(prompts, params)]

    got = tokens()
    monkeypatch.setenv(VARIABLE, "off")
    assert got == tokens()

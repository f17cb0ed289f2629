"""Replayed steps are bit-identical to eager ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from llmopt.engine import LLM, SamplingParams
from llmopt.engine.execution import decode_graphs
from llmopt.engine.execution.graph_setting import EagerGraph, Graph
from llmopt.engine.kernels.attention.dispatch import AttentionKernels, native_attention
from llmopt.engine.kernels.common.graphs import CpuGraph, GraphMemoryPool, NotCapturable
from llmopt.quant.kinds.vectorwise.scheme import VectorwiseScheme

from ...support.quantized_world import random_model, write_checkpoint

PROMPTS = [[1] + [5 + (7 * i + 3 * j) % 400 for i in range(3 + j)] for j in range(9)]
RECORDS = native_attention().reason is None
needs_captures = pytest.mark.skipif(
    not RECORDS, reason="a CPU captures steps of C kernels, which need a compiler"
)


def decoded(**options: Any) -> tuple[list[list[int]], list[list[float]], set[int]]:
    """Greedy tokens and their logprobs, and the sizes of the graphs that gave them."""
    used: set[int] = set()
    graph_of = decode_graphs.StepGraphs.captured

    def captured(self: Any, kind: Any) -> Graph | None:
        used.add(kind.size)
        return graph_of(self, kind)

    llm = LLM("stories3M", device="cpu", max_model_len=64, **options)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
    with patch.object(decode_graphs.StepGraphs, "captured", captured):
        results = llm.generate(PROMPTS, params)
    scored = [[one.logprob for one in result.logprobs or () if one] for result in results]
    return [list(r.token_ids) for r in results], scored, used


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16", "kv_cache_dtype": "int8", "block_size": 16},
        {"dtype": "float32", "num_blocks": 9, "block_size": 8, "max_num_seqs": 9},
        {"dtype": "float32", "window": 8, "attention_sinks": 2, "block_size": 4},
        {"dtype": "float32", "async_scheduling": True, "prefill_chunk_size": 5},
    ],
    ids=str,
)
def test_graphs_change_no_bit(options: dict[str, Any]) -> None:
    tokens, scored, used = decoded(**options)
    assert bool(used) == RECORDS, "the steps went past the graphs"
    assert (tokens, scored) == decoded(enforce_eager=True, **options)[:2]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("sizes", [(4, 12), (1, 2, 4, 8), (1, 3, 5, 7, 8), (16,)], ids=str)
@pytest.mark.parametrize("capture", ["recorded", "called again"])
def test_rows_up_to_the_next_size_change_nothing(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], capture: str
) -> None:
    options: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 7}
    expected, near, _ = decoded(enforce_eager=True, **options)
    monkeypatch.setattr(decode_graphs, "CPU_SIZES", sizes)
    if capture == "called again":
        monkeypatch.setattr("llmopt.engine.core.build.capture_on", lambda _: EagerGraph)
    tokens, scored, used = decoded(**options)
    assert tokens == expected
    # torch's own GEMMs sum in another order where there are more rows.
    torch.testing.assert_close(torch.tensor(scored), torch.tensor(near), atol=1e-4, rtol=0)
    assert used <= set(sizes) and bool(used) == RECORDS


def test_what_was_captured_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest size, then the smallest, from rows of padding."""
    monkeypatch.setattr(decode_graphs, "CPU_SIZES", (2, 8, 16, 32))
    options: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 7}
    expected, _, used = decoded(**options)
    llm = LLM("stories3M", device="cpu", max_model_len=64, **options)
    captured = dict(llm.engine.runner._graphs._graphs)
    if RECORDS:
        assert [kind.size for kind in captured] == [8, 2]
        assert used <= {2, 8}
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    assert [list(one.token_ids) for one in llm.generate(PROMPTS, params)] == expected
    assert llm.engine.runner._graphs._graphs == captured


@needs_captures
@pytest.mark.parametrize("logprobs", [None, 0], ids=["rows alone", "inputs"])
def test_a_later_capture_that_fails_leaves_every_step_eager(
    logprobs: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Sizes 5 and 1 are captured at the start, 3 within a step, with inputs made of any kind."""
    made: list[int] = []

    def capture(call: Any) -> Graph:
        made.append(len(made))
        if len(made) > 2:
            raise MemoryError("no memory for this graph")
        return EagerGraph(call)

    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=logprobs)

    def tokens(**options: Any) -> list[tuple[int, ...]]:
        llm = LLM("stories3M", device="cpu", dtype="float32", max_num_seqs=5, **options)
        if logprobs is not None:
            monkeypatch.setattr(llm.engine.runner, "_decode_rows", lambda *_: None)
        return [
            tuple(result.token_ids) for _ in "ab" for result in llm.generate(PROMPTS[:3], params)
        ]

    expected = tokens(enforce_eager=True)
    monkeypatch.setattr("llmopt.engine.core.build.capture_on", lambda _: capture)
    assert tokens() == expected
    assert len(made) == 3
    (line,) = [r.getMessage() for r in caplog.records if "graphs" in r.getMessage()]
    assert "MemoryError: no memory for this graph" in line


@needs_captures
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "int8"])
def test_the_null_block_holds_numbers_once_all_is_captured(kv_cache_dtype: str) -> None:
    """Block tables are padded with it, and zero times NaN is NaN."""
    llm = LLM("stories3M", device="cpu", max_model_len=64, kv_cache_dtype=kv_cache_dtype)
    graphs = llm.engine.runner._graphs
    for cache in llm.engine.runner.cache.layers:
        for part in cache.parts:
            part[0].fill_(127 if part.dtype is torch.uint8 else float("nan"))
    graphs.capture_all()
    parts = [part for cache in llm.engine.runner.cache.layers for part in cache.parts]
    assert not any(part[0].any() for part in parts)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_number_of_rows_has_a_size(device: str) -> None:
    for most in (1, 3, 16, 30):
        sizes = decode_graphs.graph_sizes(torch.device(device), most)
        assert list(sizes) == sorted(set(sizes))
        assert sizes[-1] >= most and (len(sizes) == 1 or sizes[-2] < most)
    assert max(decode_graphs.graph_sizes(torch.device(device), 10**6)) >= 32


def test_a_model_whose_steps_differ_is_left_alone() -> None:
    """A kernel that reads the whole width of a table would read more in a graph than in a step."""
    unplaced: Any = print
    llm = LLM("stories3M", device="cpu", max_model_len=64)
    decoder: Any = llm.engine.runner.decoder
    ((layout, kernels),) = decoder._kernels.items()
    decoder._kernels[layout] = kernels._replace(attend=AttentionKernels(*[unplaced] * 3))
    assert not decoder.is_capturable


def test_steps_that_look_at_values_are_computed(tmp_path: Path) -> None:
    """Outliers of LLM.int8() are data-dependent, which the first capture detects."""
    write_checkpoint(tmp_path, random_model(), "bitsandbytes", VectorwiseScheme(1.0))
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)

    def tokens(**options: Any) -> list[tuple[int, ...]]:
        llm = LLM(tmp_path, device="cpu", dtype="float32", **options)
        found = [tuple(result.token_ids) for result in llm.generate(PROMPTS[:3], params)]
        assert not llm.engine.runner._graphs._sizes
        return found

    assert tokens() == tokens(enforce_eager=True)


def test_a_recording_reads_new_values_where_the_old_ones_were() -> None:
    x, total = torch.arange(6.0), torch.zeros(6)

    def call() -> torch.Tensor:
        made = torch.empty(2, 3)
        made.copy_(x.view(2, 3))
        total.add_(made.flatten())
        return (made * 2).t()

    recording = CpuGraph(call, GraphMemoryPool())
    total.zero_()
    assert torch.equal(recording.replay(), torch.arange(6.0).view(2, 3).t() * 2)
    x.fill_(5.0)
    assert torch.equal(recording.replay(), torch.full((3, 2), 10.0))
    assert torch.equal(total, torch.arange(6.0) + 5.0)


def test_dropped_tensors_free_graph_memory() -> None:
    def call() -> torch.Tensor:
        x = torch.zeros(64)
        for _ in range(10):
            made = torch.empty(64)
            made.copy_(x).add_(1.0)
            x.copy_(made)
            del made
        return x

    pool = GraphMemoryPool()
    result = CpuGraph(call, pool)
    assert torch.equal(result.replay(), torch.full((64,), 10.0))
    # Inputs and outputs of torch operations belong to their graph for good; none is shared here.
    assert pool.num_bytes == 10 * 64 * 4


def test_all_results_of_an_operation_are_replayed() -> None:
    x = torch.zeros(4)
    graph = CpuGraph(lambda: torch.cat(x.topk(2)), GraphMemoryPool())
    x.copy_(torch.tensor([1.0, 7.0, 3.0, 5.0]))
    assert graph.replay().tolist() == [7.0, 5.0, 1.0, 3.0]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.nonzero(),
        lambda x: x * float(x.sum().item()),
        lambda x: x[x > 1.0],
    ],
)
def test_a_function_that_looks_at_values_is_refused(call: Any) -> None:
    with pytest.raises(NotCapturable):
        CpuGraph(lambda: call(torch.arange(4.0)), GraphMemoryPool())

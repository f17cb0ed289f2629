"""The whole engine on Triton's kernels gives the tokens of the torch path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llmopt.engine import LLM, SamplingParams
from llmopt.engine.execution import decode_graphs, graph_setting
from llmopt.engine.kernels.common.devices import VARIABLE
from llmopt.engine.kernels.elementwise.reference import QuantizedActivations
from llmopt.engine.model.layers.projection import Projection
from llmopt.quant.base.scheme import Activations
from llmopt.quant.kinds.fp8.scheme import FloatScheme
from llmopt.quant.kinds.integer.scheme import IntScheme

from ...support.model_families import save_model
from ...support.quantized_world import random_model, write_checkpoint
from ...support.triton_world import DEVICE

# Interpreted programs take milliseconds each: as few as show every kernel.
NARROW = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
PROMPTS = [[1, 403, 407], [1] + [5 + 7 * i for i in range(11)]]


def tokens(model: Path, **options: Any) -> list[tuple[int, ...]]:
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 64} | options
    built = LLM(model, device=DEVICE, dtype="float32", **options)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    return [tuple(result.token_ids) for result in built.generate(PROMPTS, params)]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "options", [{}, {"kv_cache_dtype": "int8", "prefill_chunk_size": 9, "block_size": 16}], ids=str
)
def test_greedy_tokens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any]
) -> None:
    save_model(tmp_path, "LlamaConfig", {"num_hidden_layers": 2})
    monkeypatch.setenv(VARIABLE, "off")
    expected = tokens(tmp_path, **options)
    monkeypatch.setenv(VARIABLE, "interpret" if DEVICE == "cpu" else "auto")
    assert tokens(tmp_path, **options) == expected


def test_rows_that_fill_a_graph_change_no_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save_model(tmp_path, "LlamaConfig", {"num_hidden_layers": 1})
    monkeypatch.setenv(VARIABLE, "interpret" if DEVICE == "cpu" else "auto")
    expected = tokens(tmp_path, enforce_eager=True)
    monkeypatch.setattr(decode_graphs, "CPU_SIZES", (5,))
    monkeypatch.setattr(decode_graphs, "CUDA_SIZES", (5,))
    assert tokens(tmp_path) == expected


@pytest.mark.whole
def test_steps_with_experts_are_replayed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Routing changes from step to step, the launches do not."""
    save_model(tmp_path, "MixtralConfig", {"num_local_experts": 4, "num_hidden_layers": 1})
    monkeypatch.setenv(VARIABLE, "interpret" if DEVICE == "cpu" else "auto")
    expected = tokens(tmp_path, enforce_eager=True)
    monkeypatch.setattr(decode_graphs, "CPU_SIZES", (3,))
    calls: list[int] = []
    replay = graph_setting.EagerGraph.replay
    monkeypatch.setattr(
        graph_setting.EagerGraph, "replay", lambda self: calls.append(1) or replay(self)
    )
    assert tokens(tmp_path) == expected
    assert calls or DEVICE == "cuda"


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("scheme", "rounded"),
    [
        (IntScheme(4, 32, False), 0),
        (IntScheme(8, -1, True, Activations("int8")), 6),
        (FloatScheme("channel", Activations("fp8")), 6),
    ],
    ids=str,
)
def test_greedy_tokens_of_a_quantized_model(
    scheme: IntScheme | FloatScheme,
    rounded: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """With 8-bit activations two norms and a gate of each layer write quantized activations."""
    write_checkpoint(tmp_path, random_model(**NARROW), "compressed-tensors", scheme)
    monkeypatch.setenv(VARIABLE, "off")
    expected = tokens(tmp_path)
    monkeypatch.setenv(VARIABLE, "interpret" if DEVICE == "cpu" else "auto")
    seen: list[bool] = []
    call = Projection.__call__

    def watched(self: Projection, x: Any, *adapters: Any) -> Any:
        seen.append(isinstance(x, QuantizedActivations))
        return call(self, x, *adapters)

    monkeypatch.setattr(Projection, "__call__", watched)
    assert tokens(tmp_path) == expected
    # Four linears a layer and the head, in two layers.
    assert sum(seen) * 9 == len(seen) * rounded

"""Tensor parallelism of models that transformers' modules run, by transformers' own plan."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.engine import SamplingParams
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.model.adapter.adapter import TransformersModel
from llmopt.engine.model.adapter.linears import ProjectedLinear
from llmopt.engine.model.layers.parallel import Group, Shard
from llmopt.engine.model.layers.spec import LoadingOptions
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest

from ...support.lora_world import write_adapter
from ...support.model_families import VOCAB, save_model
from ...support.survey.case import Case, spread_weights, surveyed_types

CPU = torch.device("cpu")
ON_CPU = LoadingOptions(CPU, torch.float32)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [
    torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (5, 23, 70)
]
OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_threads": 1}


def saved(model_type: str, folder: Path, **changes: Any) -> Path:
    built = Case(model_type, {**surveyed_types()[model_type], **changes}, folder)
    spread_weights(built.model).save_pretrained(folder)
    return folder


def shards(folder: Path, size: int = 2) -> list[TransformersModel]:
    return [
        TransformersModel(Checkpoint(folder), ON_CPU, Shard(rank, size, Group(rank, size, CPU)))
        for rank in range(size)
    ]


def on_all_ranks(
    ranks: list[TransformersModel], call: Callable[[TransformersModel], object]
) -> list[BaseException]:
    """Call it for every rank at once, each in a thread; what they raise."""
    raised: list[BaseException] = []

    def guarded(rank: TransformersModel) -> None:
        try:
            call(rank)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def connect(ranks: list[TransformersModel], folder: Path) -> None:
    groups: Any = [rank._shard._shard.group for rank in ranks if rank._shard is not None]
    joined = dict(zip(map(id, ranks), groups, strict=True))
    assert on_all_ranks(ranks, lambda rank: joined[id(rank)].connect(folder / "meet")) == []


def projected(model: TransformersModel) -> dict[str, ProjectedLinear]:
    return {n: m for n, m in model._model.named_modules() if isinstance(m, ProjectedLinear)}


def run(engine: Engine, lora: str | None = None) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, GREEDY, lora=lora if number % 2 else None)
    while engine.has_unfinished():
        for output in engine.step():
            tokens[int(output.request_id)].extend(output.new_token_ids)
        engine.scheduler.check_integrity()
    return tokens


@pytest.mark.whole
def test_two_processes_generate_the_tokens_of_one(tmp_path: Path) -> None:
    """Chunks, preemption, biases, a sliding window, and an adapter on row- and column-parallel linears."""
    model = save_model(tmp_path / "model", "Starcoder2Config", {"sliding_window": 9})
    write_adapter(tmp_path / "adapter", model, ("q_proj", "o_proj"))
    options = {
        **OPTIONS,
        "loras": {"a": tmp_path / "adapter"},
        "block_size": 4,
        "max_num_batched_tokens": 17,
        "num_blocks": 28,
    }
    alone = Engine(EngineConfig(tmp_path / "model", **options))
    expected = run(alone), run(alone, "a")
    assert expected[0] != expected[1]
    engine = Engine(EngineConfig(tmp_path / "model", tensor_parallel_size=2, **options))
    try:
        assert isinstance(engine.runner.decoder, TransformersModel)
        assert (run(engine), run(engine, "a")) == expected
        assert engine.stats.num_preemptions > 0, "the pool was meant to be too small"
        assert engine.runner.cache.num_bytes * 2 == alone.runner.cache.num_bytes
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("model_type", "kv_heads"),
    [
        ("gpt_neox", 2),  # queries, keys and values in one linear, stacked by head
        ("phi3", 2),  # gathered again: both ranks cache all heads
        ("granite_swa", 1),  # attention sinks
        ("olmoe", 2),  # norms over all heads; experts split inside
        ("qwen2_5_vl", 1),  # wrapped
    ],
)
def test_ranks_have_the_logits_of_the_whole(model_type: str, kv_heads: int, tmp_path: Path) -> None:
    folder = saved(model_type, tmp_path / "model")
    whole = TransformersModel(Checkpoint(folder), ON_CPU)
    ranks = shards(folder)
    assert all(rank.bytes_held < 0.65 * whole.bytes_held for rank in ranks)
    assert {layout.num_heads for rank in ranks for layout in rank.kv_layouts} == {kv_heads}
    connect(ranks, tmp_path)
    assert on_all_ranks(ranks, TransformersModel.check_shards) == []


def test_a_rank_with_other_weights_is_refused(tmp_path: Path) -> None:
    ranks = shards(saved("arcee", tmp_path / "model"))
    changed = ranks[1]._model.get_submodule("model.layers.0.input_layernorm")
    with torch.no_grad():
        changed.weight.mul_(2)
    connect(ranks, tmp_path)
    raised = on_all_ranks(ranks, TransformersModel.check_shards)
    assert raised and all("its results differ" in str(error) for error in raised)


def test_quantized_linears_stay_quantized(tmp_path: Path) -> None:
    folder, quantized = tmp_path / "model", tmp_path / "quantized"
    # The C kernels pad to 32 channels.
    save_model(folder, "ArceeConfig", {"hidden_size": 128, "intermediate_size": 256})
    quantize(
        QuantizeRequest(folder, quantized, method="rtn", group_size=16, num_samples=2, seq_len=32)
    )
    whole = TransformersModel(Checkpoint(quantized), ON_CPU)
    ranks = shards(quantized)
    part = projected(ranks[1])
    for name, linear in projected(whole).items():
        assert part[name].site.projection.weight_bytes <= 0.6 * linear.site.projection.weight_bytes
    connect(ranks, tmp_path)
    assert on_all_ranks(ranks, TransformersModel.check_shards) == []


@pytest.mark.parametrize(
    ("model_type", "size", "reason"),
    [
        ("gptj", 2, "those with plain attention alone are divided"),
        ("xglm", 2, "those with plain attention alone|no plan"),
        ("opt", 2, "transformers has no plan to divide a OPTForCausalLM"),
        ("arcee", 3, "4 heads do not divide into that many"),
        ("arcee", 4, "2 KV heads do not divide into that many"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(
    model_type: str, size: int, reason: str, tmp_path: Path
) -> None:
    folder = saved(model_type, tmp_path)
    with pytest.raises(BadInput, match=reason) as refused:
        shards(folder, size)
    assert f"tensor_parallel_size = {size}" in str(refused.value)
    assert "\n" not in str(refused.value)

"""Tensor-parallel shards, run by threads that all-reduce, give the model's logits: families and formats."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.engine.cache.kv_cache import KvCache
from llmopt.engine.cache.step_inputs import Run, step_inputs
from llmopt.engine.execution.worker import Channel, pack
from llmopt.engine.model.adapter.open import CausalModel, open_model
from llmopt.engine.model.layers.lora import rows_by_adapter
from llmopt.engine.model.layers.parallel import Shard, take
from llmopt.engine.model.layers.spec import LoadingOptions
from llmopt.quant.base.scheme import Activations
from llmopt.quant.kinds.codebook.scheme import CodebookScheme
from llmopt.quant.kinds.fp4.scheme import Fp4Scheme
from llmopt.quant.kinds.fp8.scheme import FloatScheme
from llmopt.quant.kinds.ggml.scheme import GgufScheme
from llmopt.quant.kinds.ggml.tensor import GgufTensor
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.quant.kinds.lookup.scheme import LookupScheme
from llmopt.quant.kinds.vectorwise.scheme import VectorwiseScheme
from llmopt.quant.model.checkpoint import Checkpoint

from ...support.lora_world import LINEARS, write_adapter
from ...support.model_families import ADAPTED, FAMILIES, VOCAB, save_model
from ...support.quantized_world import quantized, random_model, write_checkpoint

CPU = torch.device("cpu")
TOKENS = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(1)).tolist()


class ThreadGroup:
    """The process group's collectives, between threads: `of(rank)` is one rank's view."""

    def __init__(self, size: int) -> None:
        self._parts: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=120)

    def of(self, rank: int) -> Any:
        view = _Member()
        view.rank, view.group = rank, self
        return view

    def exchange(self, rank: int, part: torch.Tensor) -> list[torch.Tensor]:
        self._parts[rank] = part
        self._barrier.wait()
        parts = list(self._parts)
        self._barrier.wait()
        return parts


class _Member:
    rank: int
    group: ThreadGroup

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.group.exchange(self.rank, part)).sum(dim=0)

    def all_gather_columns(self, part: torch.Tensor, width: int) -> torch.Tensor:
        whole = torch.cat(self.group.exchange(self.rank, part), dim=1)
        assert whole.shape[1] == width
        return whole


def logits_of(model: CausalModel, lora: str | None = None) -> torch.Tensor:
    """Of `TOKENS`, in two steps through a cache of the model's own; the first rows have no adapter."""
    cache = KvCache(model.kv_layouts, 12, 4, CPU, torch.float32)
    blocks, rows = list(range(1, 12)), []
    for begin, end in ((0, 23), (23, 40)):
        inputs = step_inputs([Run(begin, TOKENS[begin:end], blocks)], 4, CPU, torch.float32)
        runs = [(None, 5), (lora, end - begin - 5)]
        inputs = replace(inputs, adapters=rows_by_adapter(runs, CPU))
        rows.append(model.logits(model.forward(inputs, cache.layers)))
    return torch.cat(rows)


def load(folder: Path, shard: Shard | None = None, adapter: Path | None = None) -> CausalModel:
    loras = {} if adapter is None else {"a": adapter}
    options = LoadingOptions(CPU, torch.float32, 64, loras=loras)
    return open_model(Checkpoint(folder), options, shard)[0]


def assert_parts_are_the_whole(
    folder: Path, size: int, adapter: Path | None = None
) -> list[CausalModel]:
    group, lora = ThreadGroup(size), None if adapter is None else "a"
    parts = [load(folder, Shard(rank, size, group.of(rank)), adapter) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        got = list(pool.map(lambda part: logits_of(part, lora), parts))
    expected = logits_of(load(folder, adapter=adapter), lora)
    for one in got:
        torch.testing.assert_close(one, expected, atol=1e-4, rtol=1e-4)
    return parts


DIVIDED = [
    "llama-3.1", "llama-biases-tied-wide-heads", "mistral-sliding", "qwen2", "qwen3", "gemma-2",
    "gemma-3", "phi-3", "gpt-2", "falcon-7b", "falcon-40b", "falcon-11b",
    "falcon-sequential-heads-biases", "mixtral", "qwen3-moe", "llama-4", "gpt-oss",
    "deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "qwen2-moe", "glm-4-moe", "glm-4", "granite",
    "granite-moe", "hunyuan-moe", "minimax-m2", "olmo-3", "cohere-2", "exaone-4",
]  # fmt: skip


@pytest.mark.sweep(10)
@pytest.mark.parametrize("family", DIVIDED)
def test_two_parts_of_a_family_are_the_whole(tmp_path, family):
    save_model(tmp_path / "model", *FAMILIES[family][:2])
    assert_parts_are_the_whole(tmp_path / "model", 2)


@pytest.mark.parametrize(("family", "size"), [("mixtral", 4), ("deepseek-v3", 4), ("gpt-oss", 4)])
def test_experts_and_heads_are_sharded_one_by_one(tmp_path, family, size):
    save_model(tmp_path / "model", *FAMILIES[family][:2])
    parts = assert_parts_are_the_whole(tmp_path / "model", size)
    held = sorted(part.bytes_held for part in parts)  # one of them has the biases of sums
    assert held[-1] < 1.01 * held[0]


@pytest.mark.parametrize(
    ("family", "size"), [("llama-3.1", 8), ("phi-3", 8), ("llama-2", 4), ("olmo-2", 8)]
)
def test_fewer_kv_heads_than_parts_are_held_by_several(tmp_path, family, size):
    save_model(tmp_path / "model", *FAMILIES[family][:2])
    parts = assert_parts_are_the_whole(tmp_path / "model", size)
    assert {layout.num_heads for part in parts for layout in part.kv_layouts} <= {1, 2}


@pytest.mark.parametrize("family", ["phi-3", "gpt-2", "falcon-7b", "qwen3"])
def test_two_parts_of_adapters_are_the_whole(tmp_path, family):
    model = save_model(tmp_path / "model", *FAMILIES[family][:2])
    adapter = write_adapter(tmp_path / "adapter", model, STACKED.get(family, LINEARS))
    assert_parts_are_the_whole(tmp_path / "model", 2, adapter)
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(
            logits_of(load(tmp_path / "model", adapter=adapter), "a"),
            logits_of(load(tmp_path / "model")),
        )


def test_two_parts_of_packed_weights_are_the_whole(tmp_path):
    scheme = IntScheme(4, 32, symmetric=False)
    write_checkpoint(tmp_path / "model", random_model(), "compressed-tensors", scheme, head=True)
    assert_parts_are_the_whole(tmp_path / "model", 2)


STACKED = {
    "phi-3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "gpt-2": ("c_attn", "c_proj", "c_fc"),
    "falcon-7b": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
}
WEIGHT = torch.randn(384, 512, generator=torch.Generator().manual_seed(3))
ROWS, COLUMNS = (slice(0, 128), slice(256, 384)), slice(256, 512)
SCHEMES = [
    IntScheme(4, 32, symmetric=False),
    IntScheme(8, -1, symmetric=True),
    FloatScheme("tensor"),
    FloatScheme("channel"),
    FloatScheme("block", Activations("fp8", "group128")),
    CodebookScheme("nf4"),
    Fp4Scheme("nvfp4"),
    Fp4Scheme("mxfp4"),
    LookupScheme(4),
    VectorwiseScheme(6.0),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.label)
def test_a_part_of_packed_weights_stands_for_that_part(scheme):
    whole = quantized(WEIGHT, scheme, torch.float32)
    floats = whole.dequantize()
    for rows in (ROWS, ROWS[1:], ()):
        part = take("a", whole, rows, COLUMNS)
        chosen = torch.cat([floats[run] for run in rows]) if rows else floats
        assert not isinstance(part, torch.Tensor)
        assert torch.equal(part.dequantize(), chosen[:, COLUMNS])


def test_a_part_of_ggml_blocks_stands_for_that_part():
    scheme = GgufScheme("Q8_0")
    data = torch.randint(0, 60, (384, 512 // 32 * 34), generator=torch.Generator().manual_seed(4))
    whole = GgufTensor(data.to(torch.uint8), scheme)
    part = take("a", whole, ROWS, COLUMNS)
    assert isinstance(part, GgufTensor)
    chosen = torch.cat([whole.dequantize()[run] for run in ROWS])
    assert torch.equal(part.dequantize(), chosen[:, COLUMNS])


@pytest.mark.parametrize(
    ("scheme", "rows", "columns"),
    [
        (IntScheme(4, 128, symmetric=True), (), slice(0, 64)),
        (IntScheme(4, 64, symmetric=True, permuted=True), (), COLUMNS),
        (CodebookScheme("nf4", double_quant=True), (), COLUMNS),
        (CodebookScheme("nf4"), (slice(0, 64),), None),
        (LookupScheme(4, 0.0045), (), COLUMNS),
        (FloatScheme("block", Activations("fp8", "group128")), (slice(64, 128),), None),
    ],
    ids=lambda value: getattr(value, "label", ""),
)
def test_codes_that_cannot_be_divided_there_are_refused(scheme, rows, columns):
    with pytest.raises(BadInput, match=r"layers\.0\.down: .* cannot be divided"):
        take("layers.0.down", quantized(WEIGHT, scheme, torch.float32), rows, columns)


@pytest.mark.parametrize(
    ("family", "size", "words"),
    [
        ("mixtral", 8, "4 experts are too few for that many"),
        ("llama-3.1", 3, "4 KV heads do not divide"),
        ("llama-3.1", 16, "num_heads = 8 does not divide"),
        ("gemma-4-shared-kv", 2, "layers of different sizes (gemma4_text) are not split"),
        (
            "lfm-2",
            2,
            "tensor parallelism and a model with constant state do not go together",
        ),
    ],
)
def test_models_that_cannot_be_divided_are_refused(tmp_path, family, size, words):
    save_model(tmp_path / "model", *{**FAMILIES, **ADAPTED}[family][:2])
    with pytest.raises(BadInput) as refusal:
        load(tmp_path / "model", Shard(0, size, ThreadGroup(size).of(0)))
    assert words in str(refusal.value)


def test_messages_bring_tensors_of_every_kind():
    ours, theirs = Pipe()
    sender, receiver = Channel(ours, CPU), Channel(theirs, CPU)
    tensors = [
        torch.arange(6).view(2, 3).T,
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.empty(0, 4),
        torch.tensor([True, False]),
        torch.randn(5).to(torch.float8_e4m3fn),
    ]
    sender.send(pack(("forward", tensors)))
    call, received = receiver.receive()
    assert call == "forward"
    for sent, got in zip(tensors, received, strict=True):
        assert (sent.dtype, sent.shape) == (got.dtype, got.shape)
        assert torch.equal(
            sent.contiguous().view(-1).view(torch.uint8), got.view(-1).view(torch.uint8)
        )
    sender.close()
    with pytest.raises(EOFError):
        receiver.receive()

"""Whole decode steps in one call of C: the tokens of eager steps, whatever comes between two of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.execution.decode_inputs import DecodeInputs
from llmopt.engine.kernels.common.graphs import GraphMemoryPool
from llmopt.quant.kinds.integer.scheme import IntScheme

from ...support.lora_world import write_adapter
from ...support.native_paths import needs_compiler
from ...support.quantized_world import random_model, write_checkpoint

SAMPLED = {16: 0.8}
"""Temperature of the requests that are not greedy."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint with 4-bit linears and head, which run in C, and an adapter for it."""
    root, model = tmp_path_factory.mktemp("decode-step"), random_model()
    scheme = IntScheme(4, 32, True)
    write_checkpoint(root / "model", model, "compressed-tensors", scheme, head=True)
    return root / "model", write_adapter(root / "adapter", model, seed=1)


def generate(folders: tuple[Path, Path], **options: Any) -> dict[str, list[int]]:
    """Tokens of 19 requests: 16 end one by one; a sampled one, another and one with an adapter come later."""
    model, adapter = folders
    config = EngineConfig(
        model, device="cpu", num_threads=1, block_size=4, max_num_seqs=16, loras={"a": adapter},
        enable_prefix_caching=False, **options,
    )  # fmt: skip
    engine = Engine(config)

    def add(index: int, length: int, lora: str | None = None) -> None:
        prompt = [3 + (7 * index + place) % 400 for place in range(1 + index % 5)]
        params = SamplingParams(
            temperature=SAMPLED.get(index, 0.0), max_tokens=length, ignore_eos=True, seed=index
        )
        engine.add_request(str(index), prompt, params, lora=lora)

    for index in range(16):
        add(index, 4 + 4 * index)
    later = {2: (16, 5, None), 5: (17, 5, "a"), 58: (18, 16, None)}
    tokens: dict[str, list[int]] = {str(index): [] for index in range(19)}
    step = 0
    while engine.has_unfinished() or step <= max(later):
        if step in later:
            add(*later[step])
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
        step += 1
    engine.close()
    return tokens


@needs_compiler
@pytest.mark.parametrize(
    "options",
    [{}, {"async_scheduling": True}, {"num_blocks": 40}, {"kv_cache_dtype": "int8"}],
    ids=str,
)
def test_steps_in_one_call_sample_what_eager_ones_do(
    folders: tuple[Path, Path], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every batch from 16 to 1, with blocks taken in all of them and, of few blocks, preemption."""
    advanced: Counter[int] = Counter()
    fill_host = DecodeInputs.fill_host

    def watched(self: DecodeInputs, rows: Any, size: int, *rest: Any, **options: Any) -> bool:
        advances = fill_host(self, rows, size, *rest, **options)
        advanced[size] += advances
        return advances

    monkeypatch.setattr(DecodeInputs, "fill_host", watched)
    tokens = generate(folders, **options)
    if "num_blocks" not in options:  # else fewer run together
        assert {size for size, count in advanced.items() if count} >= {*range(1, 13), 16}
    assert sum(advanced.values()) > 20
    assert tokens == generate(folders, enforce_eager=True, **options)
    assert len({*map(tuple, tokens.values())}) == len(tokens), "the requests differ"


@needs_compiler
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_logits_of_all_captured_sizes_share_their_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """The graphs' memory grows with the vocabulary by the largest step's logits, whatever sizes were served."""
    pools: list[GraphMemoryPool] = []
    begin = GraphMemoryPool.__init__

    def watched(self: GraphMemoryPool) -> None:
        begin(self)
        pools.append(self)

    monkeypatch.setattr(GraphMemoryPool, "__init__", watched)
    held = []
    # Wider than the layers' widest result, of 2 x 320 columns: in float32, narrower logits fit into its buffer.
    for vocab in (1024, 1536):
        folder = tmp_path / str(vocab)
        model = random_model(vocab_size=vocab)
        write_checkpoint(folder, model, "compressed-tensors", IntScheme(4, 32, True), head=True)
        config: Any = {"device": "cpu", "num_threads": 1, "block_size": 4, "max_num_seqs": MOST}
        engine = Engine(EngineConfig(folder, dtype=dtype, **config))
        tokens = {name: ramp(engine, name, 0.0) for name in ("first", "again")}
        ramp(engine, "sampled", 0.8)
        assert tokens["first"] == tokens["again"]
        engine.close()
        held.append(sum(pool.num_bytes for pool in pools))
        pools.clear()
    assert held[1] - held[0] == 4 * MOST * 512


MOST = 8
"""Sequences of the largest step."""


def ramp(engine: Engine, name: str, temperature: float) -> list[list[int]]:
    """Tokens of requests that come one by one, and end so: steps of 1 to `MOST` rows and back."""
    tokens: list[list[int]] = [[] for _ in range(MOST)]

    def step() -> None:
        for output in engine.step():
            tokens[int(output.request_id.partition(" ")[2])] += output.new_token_ids

    for index in range(MOST):
        params = SamplingParams(
            temperature=temperature, max_tokens=3 * MOST, ignore_eos=True, seed=index
        )
        engine.add_request(f"{name} {index}", [3 + index, 7], params)
        step()
        step()
    while engine.has_unfinished():
        step()
    return tokens

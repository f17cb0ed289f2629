"""Pooled prompts in the engine: equal in any chunk size and batch, through preemption, and leaking nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.engine.base.sampling_params import POOLING_MODES, PoolingParams, SamplingParams
from llmopt.engine.config.config import EngineConfig, SpeculationConfig
from llmopt.engine.core.engine import Engine

PROMPTS = [list(range(1, 1 + length)) for length in (3, 17, 40)]
REDUCED = {
    "last": lambda states: states[-1],
    "mean": lambda states: states.mean(0),
    "cls": lambda states: states[0],
    "max": lambda states: states.amax(0),
}
GENERATED = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)


def make(**options: Any) -> Engine:
    return Engine(EngineConfig("stories260K", dtype="float32", num_threads=1, **options))


def drain(engine: Engine) -> tuple[dict[str, torch.Tensor], dict[str, list[int]]]:
    """The vectors and the generated tokens of all requests."""
    vectors: dict[str, torch.Tensor] = {}
    tokens: dict[str, list[int]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            if output.pooled is None:
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            else:
                assert output.finish_reason == "stop" and output.request_id not in vectors
                vectors[output.request_id] = torch.tensor(output.pooled)
        engine.scheduler.check_integrity()
    assert engine.stats.kv_blocks_used == 0
    return vectors, tokens


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefill_chunk_size": 5},
        {"async_scheduling": True, "prefill_chunk_size": 7, "max_num_batched_tokens": 24},
        {"num_blocks": 17, "block_size": 8, "max_model_len": 96, "prefill_chunk_size": 4},
        {"swap_space_bytes": 1 << 20, "num_blocks": 17, "block_size": 8, "max_model_len": 96},
        {"speculation": SpeculationConfig(method="ngram", num_tokens=3)},
    ],
    ids=["plain", "chunks", "async", "preempted", "swapped", "ngram"],
)
def test_a_pooled_prompt_is_its_hidden_states_reduced(options: dict[str, Any]) -> None:
    engine, plain = make(**options), make()
    for name in ("a", "b"):
        engine.add_request(name, [1, 2, 3], GENERATED)
        plain.add_request(name, [1, 2, 3], GENERATED)
    for index, prompt in enumerate(PROMPTS):
        for mode in POOLING_MODES:
            engine.add_request(
                f"{mode}{index}", prompt, SamplingParams(), pooling=PoolingParams(mode)
            )
    vectors, tokens = drain(engine)
    assert tokens == drain(plain)[1]
    for index, prompt in enumerate(PROMPTS):
        states = plain.hidden_states(prompt)
        for mode, reduce in REDUCED.items():
            torch.testing.assert_close(
                vectors[f"{mode}{index}"], reduce(states), atol=2e-5, rtol=1e-4
            )


def test_a_preempted_prompt_is_pooled_from_its_start() -> None:
    engine = make(num_blocks=11, block_size=8, max_model_len=80, prefill_chunk_size=3,
                  swap_space_bytes=1 << 20, scheduling_policy="priority")  # fmt: skip
    engine.add_request(
        "pooled", PROMPTS[2], SamplingParams(), pooling=PoolingParams("mean"), priority=1
    )
    for _ in range(4):
        engine.step()
    for name in ("a", "b"):
        engine.add_request(name, list(range(1, 25)), GENERATED)
    vectors, _ = drain(engine)
    assert engine.stats.num_preemptions > 0
    expected = make().hidden_states(PROMPTS[2]).mean(0)
    torch.testing.assert_close(vectors["pooled"], expected, atol=2e-5, rtol=1e-4)


def test_only_the_last_state_goes_on_from_a_cached_prefix() -> None:
    engine = make(block_size=8)
    for mode in ("last", "mean"):
        for turn in range(2):
            engine.add_request(
                f"{mode}{turn}", PROMPTS[2], SamplingParams(), pooling=PoolingParams(mode)
            )
            vectors, _ = drain(engine)
            expected = REDUCED[mode](make().hidden_states(PROMPTS[2]))
            torch.testing.assert_close(vectors[f"{mode}{turn}"], expected, atol=2e-5, rtol=1e-4)
    assert engine.stats.prefix_cache_hits == 32


def test_logits_of_named_tokens() -> None:
    engine = make(prefill_chunk_size=5)
    pooling = PoolingParams("last", (7, 300))
    engine.add_request("a", PROMPTS[1], SamplingParams(), pooling=pooling)
    (vector,) = drain(engine)[0].values()
    expected = make().prompt_logits(PROMPTS[1])[-1, [7, 300]]
    torch.testing.assert_close(vector, expected, atol=2e-5, rtol=1e-4)


def test_an_aborted_prompt_leaves_nothing() -> None:
    engine = make(prefill_chunk_size=5)
    engine.add_request("a", PROMPTS[2], SamplingParams(), pooling=PoolingParams("mean"))
    engine.step()
    assert engine.abort("a") and engine.stats.kv_blocks_used == 0
    assert drain(engine) == ({}, {})


def test_a_prompt_may_fill_the_context_and_no_more() -> None:
    engine = make(max_model_len=32, block_size=8)
    engine.add_request("a", [1] * 32, SamplingParams(), pooling=PoolingParams("mean"))
    assert len(drain(engine)[0]) == 1
    with pytest.raises(BadInput, match="33 prompt tokens exceed the context length of 32"):
        engine.add_request("b", [1] * 33, SamplingParams(), pooling=PoolingParams("mean"))
    small = make(num_blocks=2, block_size=8, max_model_len=17)
    with pytest.raises(BadInput, match="17 prompt tokens can never fit in the KV cache of 16"):
        small.add_request("c", [1] * 17, SamplingParams(), pooling=PoolingParams("mean"))
    with pytest.raises(BadInput, match="outside the vocabulary"):
        engine.add_request("d", [1], SamplingParams(), pooling=PoolingParams("last", (10**6,)))
    with pytest.raises(BadInput, match="known are last, mean"):
        PoolingParams("median")

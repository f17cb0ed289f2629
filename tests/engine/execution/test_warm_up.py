"""After the warm-up no step compiles a kernel, whatever it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.engine import SamplingParams
from llmopt.engine.config.config import EngineConfig, SpeculationConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.execution.start_up import warm_up
from llmopt.engine.kernels.common.devices import VARIABLE

from ...support.compilations import recording_compilations
from ...support.model_families import FAMILIES, save_model
from ...support.triton_world import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="the interpreter's launches are recorded")


class EvenTokens:
    def allowed(self, prompt: Any, output: Any) -> torch.Tensor:
        return torch.arange(512) % 2 == 0


# Long enough that keys are split: into one part, into some, and into a multiple of 16.
LENGTHS = (3, 9, 40, 300, 4090)
PARAMS = (
    SamplingParams(max_tokens=4, ignore_eos=True),
    SamplingParams(max_tokens=4, temperature=0.0, logprobs=3),
    SamplingParams(max_tokens=3, repetition_penalty=1.2, top_k=3),
    SamplingParams(max_tokens=3, token_mask=EvenTokens(), stop_token_ids=(5, 6, 7)),
    SamplingParams(max_tokens=2, prompt_logprobs=2, n=2),
)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama-3.1", {}),
        ("llama-3.1", {"kv_cache_dtype": "int8", "prefill_chunk_size": 48}),
        ("llama-3.1", {"speculation": SpeculationConfig("ngram", ngram_min=1)}),
        ("gpt-oss", {}),
        ("deepseek-v3", {}),
    ],
    ids=str,
)
def test_nothing_is_compiled_while_serving(
    family: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_class, overrides = FAMILIES[family]
    save_model(tmp_path, config_class, {**overrides, "max_position_embeddings": 8192})
    monkeypatch.setenv(VARIABLE, "interpret")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    limits: dict[str, Any] = {"max_num_seqs": 9, "max_num_batched_tokens": 300, "block_size": 16}
    config = EngineConfig(
        tmp_path,
        device="cpu",
        dtype="bfloat16",
        max_model_len=5000,
        num_blocks=700,
        **limits,
        **options,
    )
    with recording_compilations(monkeypatch) as keys:
        engine = Engine(config)
        warm_up(engine.runner, engine.scheduler.config)
        warm = set(keys)
        for index, (length, params) in enumerate(zip(LENGTHS, PARAMS, strict=True)):
            prompt = [3 + (7 * i + index) % 50 for i in range(length)]
            engine.add_request(str(index), prompt, params)
        steps = 0
        while engine.has_unfinished():
            engine.step()
            steps += 1
    engine.close()
    assert {name.strip("_") for name, _ in warm} >= {
        "attend",
        "norm",
        "draw",
        "constrain",
    }
    assert not {name for name, _ in keys - warm}
    assert 12 < steps < 200

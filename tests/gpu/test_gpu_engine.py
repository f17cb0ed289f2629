"""The whole engine on the GPU, in every mode and weight format. Where there is no GPU it runs on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.bench.machine.kernel_table import SCHEMES
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import EngineConfig, SpeculationConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.kernels.elementwise.reference import fake_quantize_inputs
from llmopt.quant.base.scheme import Scheme
from llmopt.quant.formats.registry import FORMATS
from llmopt.quant.kinds.ggml.scheme import GgufScheme
from llmopt.quant.kinds.trellis.scheme import TrellisScheme
from llmopt.recipes import MODELS
from transformers import AutoModelForCausalLM

from ..support.quantized_world import random_model, write_checkpoint

NUM_TOKENS = 40
PROMPTS = [[1, 403, 407, 261, 378], [1] + [5 + 7 * i for i in range(70)], [1, 300], [9] * 33]
MODES: dict[str, dict[str, Any]] = {
    "serial": {},
    "overlapped": {"async_scheduling": True},
    "one by one": {"max_num_seqs": 1},
    "chunks": {"prefill_chunk_size": 7, "block_size": 8, "async_scheduling": True},
    "no prefix cache": {"enable_prefix_caching": False},
    "no graphs": {"enforce_eager": True},
    "no graphs, overlapped": {"enforce_eager": True, "async_scheduling": True},
    "preempted": {"num_blocks": 36, "block_size": 4},
    "preempted, overlapped": {"num_blocks": 36, "block_size": 4, "async_scheduling": True},
    "preempted, swapped": {"num_blocks": 36, "block_size": 4, "swap_space_bytes": 2**22},
    "preempted, swapped, overlapped": {
        "num_blocks": 36,
        "block_size": 4,
        "swap_space_bytes": 2**22,
        "async_scheduling": True,
    },
    "prompt lookup": {"speculation": SpeculationConfig("ngram", ngram_min=1)},
    "draft model": {"speculation": SpeculationConfig("draft", "stories260K")},
}


def engine(model: str | Path, dtype: str, **options: Any) -> Engine:
    return Engine(EngineConfig(model, dtype=dtype, **options))


def answers(built: Engine) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens of every prompt, and their logprobs."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    logprobs: list[list[float]] = [[] for _ in PROMPTS]
    for index, prompt in enumerate(PROMPTS):
        built.add_request(str(index), prompt, params)
    while built.has_unfinished():
        for piece in built.step():
            tokens[int(piece.request_id)] += piece.new_token_ids
            logprobs[int(piece.request_id)] += [one.logprob for one in piece.logprobs or ()]
        built.scheduler.check_integrity()
    built.close()
    return tokens, logprobs


@pytest.fixture(scope="module")
def expected() -> tuple[list[list[int]], list[list[float]]]:
    """transformers' output on the CPU."""
    model: Any = AutoModelForCausalLM.from_pretrained(MODELS / "stories3M", dtype=torch.float32)
    tokens, logprobs = [], []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            eos_token_id=None,
            max_new_tokens=NUM_TOKENS,
        )
        new = whole[0, len(prompt) :]
        with torch.no_grad():
            scores = model(whole).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        tokens.append(new.tolist())
        logprobs.append(scores.gather(1, new[:, None])[:, 0].tolist())
    return tokens, logprobs


@pytest.mark.parametrize("mode", MODES)
def test_tokens_and_logprobs_are_those_of_transformers(mode, expected):
    built = engine("stories3M", "float32", **MODES[mode])
    tokens, logprobs = answers(built)
    assert tokens == expected[0]
    for ours, theirs in zip(logprobs, expected[1], strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=1e-3, rtol=1e-3)
    assert (built.stats.num_preemptions > 0) == mode.startswith("preempted")
    assert (built.stats.num_swaps > 0) == ("swapped" in mode)
    assert (built.stats.num_draft_tokens > 0) == ("speculation" in MODES[mode])


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "int8"])
def test_16_bits_stay_near_32(kv_cache_dtype):
    text = PROMPTS[1]
    exact = engine("stories3M", "float32").prompt_logits(text)
    short = engine("stories3M", "bfloat16", kv_cache_dtype=kv_cache_dtype).prompt_logits(text)
    assert divergence(exact, short) < 2e-2


def holders(schemes: Sequence[Scheme]) -> list[tuple[str, Scheme]]:
    """Every format for every scheme of the kernels' table that it holds."""
    found: list[tuple[str, Scheme]] = []
    for scheme in schemes:
        if isinstance(scheme, GgufScheme):
            continue  # tests/engine/model/test_gguf_models.py: they need the package that writes them
        for name in FORMATS:
            try:
                FORMATS[name].check_scheme(scheme)
            except BadInput:
                continue
            found.append((name, scheme))
    return found


@pytest.mark.parametrize(
    "case",
    # Trellis codes are searched for, not rounded to, in blocks of 128 channels.
    holders([scheme for scheme, _ in SCHEMES if not isinstance(scheme, TrellisScheme)]),
    ids=lambda case: f"{case[0]} {case[1].label}",
)
def test_every_format_stays_near_what_its_codes_mean(case, tmp_path):
    model = random_model(hidden_size=256, intermediate_size=512, num_attention_heads=8)
    weights = write_checkpoint(tmp_path, model, *case)
    for name, weight in weights.items():
        linear = model.get_submodule(name)
        linear.weight.data = weight.dequantize()
        linear.register_forward_pre_hook(lambda _, inputs: fake_quantize_inputs(inputs[0], case[1]))
    with torch.no_grad():
        exact = model(torch.tensor([PROMPTS[1]])).logits[0]
    for count in (1, 20, len(PROMPTS[1])):  # GEMV, fused GEMM, and dequantize + cuBLAS
        got = engine(tmp_path, "bfloat16").prompt_logits(PROMPTS[1][:count])
        assert divergence(exact[:count], got) < 3e-2


def divergence(exact: torch.Tensor, got: torch.Tensor) -> float:
    """Mean over the tokens, in nats."""
    exact, got = exact.cpu().log_softmax(-1), got.cpu().log_softmax(-1)
    return float((exact.exp() * (exact - got)).sum(-1).mean())

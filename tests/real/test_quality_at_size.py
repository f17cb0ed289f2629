"""Quality of the real model at size: bounded memory, and perplexity as transformers computes it."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from llmopt.base.memory import peak_memory_bytes, restart_peak_memory
from llmopt.bench.quality.passage import Passage, ProtocolOptions, read_passage
from llmopt.bench.quality.scoring import score_passage
from llmopt.bench.quality.summary import summarize
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest

MAX_BYTES_ABOVE_WEIGHTS = 1.5e9
CHECKED_WINDOWS = 4


def opened(model: Path, dtype: str = "auto") -> Engine:
    return Engine(EngineConfig(model, num_blocks=96, dtype=dtype))


def transformers_perplexity(model: Path, passage: Passage) -> float:
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    total, count = 0.0, 0
    for window in passage.windows:
        ids = torch.tensor([window.token_ids])
        with torch.inference_mode():
            total += float(oracle(ids, labels=ids).loss) * (len(window.token_ids) - 1)
        count += len(window.token_ids) - 1
    return math.exp(total / count)


def test_wikitext_in_bounded_memory(real_model: Path, tmp_path: Path) -> None:
    text = os.environ.get("LLMOPT_WIKITEXT")
    if not text:
        pytest.skip("needs WikiText-2: name wiki.test.raw in LLMOPT_WIKITEXT")
    quantize(QuantizeRequest(real_model, tmp_path / "int8", method="rtn", bits=8))
    model, reference = opened(tmp_path / "int8"), opened(real_model)
    passage = read_passage(
        model.tokenizer,
        max_model_len=model.max_model_len,
        num_tokens=8192,
        path=Path(text),
        options=ProtocolOptions("gptq", 512),
    )
    weights = model.memory.weight_bytes + reference.memory.weight_bytes
    restart_peak_memory()
    series, _ = score_passage(passage, model.prompt_pass, reference.prompt_pass)
    assert peak_memory_bytes() - weights <= MAX_BYTES_ABOVE_WEIGHTS
    assert summarize(passage, series, reference=str(real_model)).perplexity > 1
    first = replace(passage, windows=passage.windows[:CHECKED_WINDOWS])
    plain = opened(real_model, "float32")
    ours = summarize(first, score_passage(first, plain.prompt_pass)[0]).perplexity
    assert ours == pytest.approx(transformers_perplexity(real_model, first), rel=1e-3)

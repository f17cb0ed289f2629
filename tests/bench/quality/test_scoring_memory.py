"""Memory of scoring: bounded by a constant, whatever the vocabulary and the number of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.bench.quality.passage import Passage, PassageWindow
from llmopt.bench.quality.scoring import SCORING_BYTES, score_passage
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.sampling.sampler import SLICE_BYTES
from torch.profiler import ProfilerActivity, profile

from ...support.model_families import save_model

VOCAB = 152_064  # Qwen's


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a wide vocabulary."""
    folder = tmp_path_factory.mktemp("wide")
    size = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    save_model(folder, "LlamaConfig", {**size, **heads, "tie_word_embeddings": True})
    return folder


def engine(folder: Path, **options: Any) -> Engine:
    return Engine(
        EngineConfig(
            folder, dtype="float32", num_blocks=32, max_model_len=256, num_threads=1, **options
        )
    )


def peak_bytes(work: Any) -> int:
    """The largest sum of live allocations of torch during `work`, beyond those before it."""
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as recorded:
        work()
    results = recorded.profiler.kineto_results  # pyright: ignore[reportOptionalMemberAccess]
    events = [event for event in results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]
        peak = max(peak, live)
    return peak


def passage(num_windows: int) -> Passage:
    torch.manual_seed(0)
    windows = torch.randint(VOCAB, (num_windows, 150)).tolist()
    return Passage(tuple(PassageWindow(tuple(ids)) for ids in windows), "text", "p", "words")


def test_scoring_holds_a_constant_of_logits(wide: Path) -> None:
    model, reference = engine(wide).prompt_pass, engine(wide).prompt_pass
    peaks = []
    for num_windows in (2, 4):
        text = passage(num_windows)
        all_logits = 4 * VOCAB * text.num_scored
        peaks.append(peak_bytes(lambda text=text: score_passage(text, model, reference)))
        assert SLICE_BYTES < peaks[-1] < SCORING_BYTES < 2 * all_logits  # of both models
    # Twice the tokens in the same memory; their scores are 0.1 MB.
    assert peaks[1] < peaks[0] + 4e6


def test_prompt_logprobs_hold_a_slice_of_logits(wide: Path) -> None:
    model = engine(wide, max_num_batched_tokens=512)

    def work() -> None:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
        for number, window in enumerate(passage(3).windows):
            model.add_request(str(number), window.token_ids, params)
        scored = []
        while model.has_unfinished():
            scored += [out.prompt_logprobs for out in model.step() if out.prompt_logprobs]
        assert [len(each) for each in scored] == [150] * 3

    # Logits of a slice, and the log-softmax of two blocks of its rows.
    assert peak_bytes(work) < 3 * SLICE_BYTES < 4 * VOCAB * 447

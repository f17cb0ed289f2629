"""This project's engine, driven step by step."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.engine import Engine

PROFILED_STEPS = 8


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def prompts_of(lengths: Sequence[int], vocab: int, seed: int = 0) -> list[list[int]]:
    """Random prompts: no two share a prefix, so that no block is shared."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab) for _ in range(length)] for length in lengths]


def _busy_seconds(step: Callable[[], float]) -> float:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(PROFILED_STEPS):
            step()
        torch.cuda.synchronize()
    return (
        sum(event.self_device_time_total for event in found.key_averages()) / 1e6 / PROFILED_STEPS
    )


class Ours:
    """An engine without prefix cache; its measurements leave it idle."""

    WARM_STEPS = 3

    def __init__(self, folder: Path, device: str, max_model_len: int, max_num_seqs: int) -> None:
        options: dict[str, Any] = {"device": device, "dtype": "bfloat16", "async_scheduling": True}
        options |= {"max_model_len": max_model_len, "max_num_seqs": max_num_seqs}
        self.engine = Engine(EngineConfig(folder, enable_prefix_caching=False, **options))
        self._longest = max_model_len

    def decode(self, batch: int, context: int, steps: int) -> tuple[list[float], float | None]:
        """Seconds of decode steps of `batch` sequences, at `context` tokens in the middle; and,
        with CUDA, in how many seconds of a step the device computes or copies, from a few steps more.
        """
        with self.decoding(batch, context, steps) as step:
            seconds = [step() for _ in range(steps)]
            return seconds, _busy_seconds(step) if torch.cuda.is_available() else None

    def prefill(self, length: int, repeats: int) -> list[float]:
        """Seconds from a prompt to its first token, after one that does not count."""
        prompts = prompts_of([length] * (repeats + 1), self.engine.vocab_size)
        return [self.answer([prompt], [1]) for prompt in prompts][1:]

    def answer(self, prompts: Sequence[list[int]], num_tokens: Sequence[int]) -> float:
        """Seconds to generate every prompt's number of tokens."""
        begin = time.perf_counter()
        for index, (prompt, count) in enumerate(zip(prompts, num_tokens, strict=True)):
            self.engine.add_request(str(index), prompt, greedy(count))
        while self.engine.has_unfinished():
            self.engine.step()
        return time.perf_counter() - begin

    def close(self) -> None:
        """Free the device's memory."""
        self.engine.close()
        del self.engine
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @contextmanager
    def decoding(self, batch: int, context: int, steps: int) -> Iterator[Callable[[], float]]:
        """A call that makes one step and returns its seconds, once every prompt has been computed."""
        engine = self.engine
        start = max(1, context - steps // 2 - self.WARM_STEPS)
        for index, prompt in enumerate(prompts_of([start] * batch, engine.vocab_size)):
            engine.add_request(str(index), prompt, greedy(self._longest - start))
        begun: set[str] = set()

        def step() -> float:
            begin = time.perf_counter()
            begun.update(piece.request_id for piece in engine.step())
            return time.perf_counter() - begin

        try:
            while len(begun) < batch:
                step()
            for _ in range(self.WARM_STEPS):
                step()
            if waiting := engine.stats.num_waiting:  # preempted; a short answer may have ended
                raise RuntimeError(f"{waiting} of {batch} sequences do not fit into the KV cache")
            yield step
        finally:
            for index in range(batch):
                engine.abort(str(index))
            engine.step()

"""Closed loop of a server in its steady state: TTFT, TPOT and throughput from the step model alone.

Each of `concurrency` clients sends its next request when the last one ends. While a request decodes, the
others are prefilled once each, which its decode steps wait for; a prompt waits for the step in flight and
for the prompts before it. `llmopt.engine.planner.load` simulates the scheduler where this is too coarse.
"""

from __future__ import annotations

from dataclasses import dataclass

from .step_model import StepModel, StepWork

CHUNK_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class SteadyState:
    """Mean TTFT and TPOT in seconds, and output tokens per second of the whole deployment."""

    ttft_seconds: float
    tpot_seconds: float
    throughput: float


def prefill_seconds(
    model: StepModel, prompt: int, sequences: int, context: float, chunk_tokens: int = CHUNK_TOKENS
) -> float:
    """Seconds that the chunks of a prompt add to the steps of `sequences` that decode."""
    alone = model.seconds(StepWork.of(sequences, context)) if sequences else 0.0
    starts = range(0, prompt, chunk_tokens)
    mixed = (
        model.seconds(StepWork.of(sequences, context, min(chunk_tokens, prompt - start), start))
        for start in starts
    )
    return sum(mixed) - len(starts) * alone


def steady_state(
    model: StepModel,
    prompt: int,
    output: int,
    concurrency: int,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
) -> SteadyState:
    """Means of `concurrency` clients with prompts of `prompt` and answers of `output` tokens."""
    context = prompt + output / 2
    decode = model.seconds(StepWork.of(concurrency, context))
    added = prefill_seconds(model, prompt, concurrency - 1, context, chunk_tokens)
    tpot = decode + (concurrency - 1) * added / output
    busy = concurrency * added / (concurrency * added + output * decode)
    ttft = added + (decode + busy * (concurrency - 1) * added) / 2
    throughput = concurrency * output / (ttft + (output - 1) * tpot)
    return SteadyState(ttft, tpot, throughput)

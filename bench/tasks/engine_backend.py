"""Task requests on an idle engine in this process, batched."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...engine.base.sampling_params import SamplingParams
from ...quant.base.progress import Progress, Silent
from .backend import GenerationRequest, TargetScore, decode
from .windows import Window

if TYPE_CHECKING:
    from ...engine.engine import Engine
    from ...engine.scheduling.outputs import TokenLogprobs

# Requests queued in the engine at once: enough for full batches, few enough to poll cheaply.
QUEUED = 256


class EngineBackend:
    """A `TaskBackend` on an engine."""

    sends_messages = False

    def __init__(self, engine: Engine, progress: Progress | None = None) -> None:
        self._engine = engine
        self._progress = progress or Silent()
        self.tokenizer = engine.tokenizer
        self.longest = engine.scheduler.longest_sequence
        slots = engine.stats.kv_blocks_total * engine.scheduler.config.block_size
        self.max_inputs = min(engine.max_model_len, slots)

    def score(self, windows: Sequence[Window], what: str) -> list[list[TargetScore]]:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        # A request holds the last target and one generated token beyond the inputs of a window.
        fits = [len(window.inputs) + 2 <= self.longest for window in windows]
        prompts = [
            ([*window.inputs, window.targets[-1]], params)
            for window, is_short in zip(windows, fits, strict=True)
            if is_short
        ]
        answers = iter(self._complete(prompts, what))
        return [
            _scores(
                next(answers)[1][-len(window.targets) :] if is_short else self._score_full(window)
            )
            for window, is_short in zip(windows, fits, strict=True)
        ]

    def generate(self, requests: Sequence[GenerationRequest], what: str) -> list[str]:
        answers = self._complete([(each.token_ids, each.params) for each in requests], what)
        return [
            decode(self.tokenizer, tokens, request.params.stop)
            for (tokens, _), request in zip(answers, requests, strict=True)
        ]

    def _score_full(self, window: Window) -> list[TokenLogprobs]:
        """Score a window that fills the context and leaves no position to generate."""
        from ...engine.sampling.logprobs import rows_per_slice, sliced_logprobs

        engine = self._engine
        hidden = engine.hidden_states(window.inputs)[-len(window.targets) :]
        logits, num_rows = engine.runner.decoder.logits, rows_per_slice(engine.vocab_size)
        return sliced_logprobs(logits, hidden, window.targets, 0, num_rows)

    def _complete(
        self, prompts: Sequence[tuple[list[int], SamplingParams]], what: str
    ) -> list[tuple[list[int], tuple[TokenLogprobs | None, ...]]]:
        """New tokens and prompt logprobs of each prompt, batched by the engine."""
        written: list[list[int]] = [[] for _ in prompts]
        scores: list[tuple[TokenLogprobs | None, ...]] = [()] * len(prompts)
        left, active = deque(enumerate(prompts)), set[str]()
        self._progress.start(what, len(prompts), "requests")
        try:
            while left or active:
                while left and len(active) < QUEUED:
                    number, (tokens, params) = left.popleft()
                    self._engine.add_request(str(number), tokens, params)
                    active.add(str(number))
                for output in self._engine.step():
                    written[int(output.request_id)].extend(output.new_token_ids)
                    if output.prompt_logprobs is not None:
                        scores[int(output.request_id)] = output.prompt_logprobs
                    if output.finish_reason is not None:
                        active.remove(output.request_id)
                        self._progress.advance()
        finally:
            for request_id in active:
                self._engine.abort(request_id)
            self._progress.finish()
        return list(zip(written, scores, strict=True))


def _scores(scored: Sequence[TokenLogprobs | None]) -> list[TargetScore]:
    return [TargetScore(token.logprob, token.rank == 1) for token in scored if token is not None]

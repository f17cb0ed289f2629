"""The output processor: from the tokens of a step to `RequestOutput` deltas (as in vLLM), best_of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import Any

from ..base.sampling_params import SamplingParams
from ..scheduling.outputs import CompletionText, RequestOutput, TokenLogprobs, text_decoder
from ..scheduling.request import Request, Token
from ..scheduling.scheduler import Scheduler
from ..scheduling.step_plan import StepPlan
from .pooling import PooledPrompts
from .step import StepResult


class OutputProcessor:
    """Per-sequence output state: emitted text, prompt logprobs, and the best_of candidates of requests."""

    def __init__(self, scheduler: Scheduler, tokenizer: Any) -> None:
        self._scheduler = scheduler
        self._decoder = text_decoder(tokenizer)
        self._texts: dict[str, CompletionText] = {}
        self._prompt_logprobs: dict[str, dict[int, TokenLogprobs]] = {}
        self.best_of: dict[str, BestOf] = {}
        """Requests with best_of, by id: they have no outputs until all candidates are finished."""
        self._pooled: PooledPrompts | None = None

    def add_pooled(self) -> None:
        if self._pooled is None:
            self._pooled = PooledPrompts(self._scheduler)

    def forget(self, request_id: str, members: list[Request]) -> None:
        self.best_of.pop(request_id, None)
        for request in members:
            self._texts.pop(request.sequence_id, None)
            self._prompt_logprobs.pop(request.sequence_id, None)
            if self._pooled is not None:
                self._pooled.forget(request.sequence_id)

    def keep(self, plan: StepPlan, result: StepResult) -> None:
        """Collect prompt logprobs and pooled shares, before the scheduler ends their requests."""
        if self._pooled is not None:
            self._pooled.keep(plan, result)
        if not result.prompt_logprobs:
            return
        for row in plan.rows:
            scored = result.prompt_logprobs.get(row.sequence_id)
            if scored and self._scheduler.request_of(row) is not None:
                self._prompt_logprobs.setdefault(row.sequence_id, {}).update(scored)

    def outputs(
        self, plan: StepPlan, result: StepResult, tokens: list[Token]
    ) -> list[RequestOutput]:
        """Deltas of the tokens of a step, one per sequence, and the prompts that it pooled."""
        runs = [list(run) for _, run in groupby(tokens, attrgetter("request"))]
        names, logprobs = plan.sequence_ids, result.logprobs
        outputs = [self._output(run, logprobs.get(names[run[0].row])) for run in runs]
        return outputs if self._pooled is None else outputs + self._pooled.outputs(plan)

    def shown(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Deltas to emit; a request with best_of has only its best completions, at its end."""
        if not self.best_of:
            return outputs
        shown: list[RequestOutput] = []
        for output in outputs:
            best_of = self.best_of.get(output.request_id)
            if best_of is None:
                shown.append(output)
            elif winners := best_of.take(output):
                del self.best_of[output.request_id]
                shown += winners
        return shown

    def _output(
        self, run: list[Token], scored: Sequence[TokenLogprobs | None] | None
    ) -> RequestOutput:
        """The delta of a sequence's tokens, in order; a stop string may drop the last of them."""
        request = run[0].request
        text, token_ids = self._advance_text(request, [token.token_id for token in run])
        logprobs: list[TokenLogprobs] = []
        if scored is not None:
            shown = run[: len(token_ids)]
            logprobs = [entry for token in shown if (entry := scored[token.sample]) is not None]
        prompt_logprobs = None
        num_output_tokens = len(request.token_ids) - request.num_prompt_tokens
        is_first = request.index == 0 and num_output_tokens == len(token_ids)
        if is_first and request.params.prompt_logprobs is not None:
            scores = self._prompt_logprobs.pop(request.sequence_id, {})
            prompt_logprobs = tuple(scores.get(i) for i in range(request.num_prompt_tokens))
        if request.finish_reason is not None:
            self._texts.pop(request.sequence_id, None)
        return RequestOutput(
            *(request.request_id, request.index, tuple(token_ids), text, tuple(logprobs) or None),
            *(prompt_logprobs, request.finish_reason, request.stop_reason),
            *(request.num_prompt_tokens, request.num_cached_tokens, num_output_tokens),
            request.times,
        )

    def _advance_text(
        self, request: Request, token_ids: list[int]
    ) -> tuple[str | CompletionText, list[int]]:
        """The text to emit and its tokens; a stop string ends the request and drops the rest."""
        text = self._texts.get(request.sequence_id)
        if text is None:
            prompt = request.token_ids[: request.num_prompt_tokens]
            text = CompletionText(self._decoder, prompt, request.params)
            self._texts[request.sequence_id] = text
        num_tokens = len(request.token_ids) - request.num_prompt_tokens
        is_finished = request.finish_reason is not None
        includes_end = request.params.include_stop_str_in_output
        text.hides_last = request.finish_reason == "stop" and not includes_end
        if text.is_deferred:
            text.add(token_ids, num_tokens, is_last=is_finished)
            return text, token_ids
        shown = ""
        for count, token_id in enumerate(token_ids, 1):
            is_last = count == len(token_ids) and is_finished
            output, met = text.feed(token_id, is_last=is_last)
            shown += output
            if met is not None:
                kept = request.num_known_tokens - len(token_ids) + count
                self._scheduler.stop_at(request, kept, met)
                return shown, token_ids[:count]
        return shown, token_ids


class BestOf:
    """Collects the outputs of a request with `best_of` > `n`, until all of its completions are finished. They
    are ranked as in vLLM, by cumulative logprob, without length normalization. The logprobs are the model's
    own, before penalties and temperature."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._outputs: dict[int, list[RequestOutput]] = {}
        self._num_finished = 0

    @staticmethod
    def scored(params: SamplingParams) -> SamplingParams:
        return params if params.logprobs is not None else replace(params, logprobs=0)

    def take(self, output: RequestOutput) -> list[RequestOutput]:
        """Add a delta; the last one returns the n best completions, best first, as index 0 to n - 1."""
        self._outputs.setdefault(output.index, []).append(output)
        self._num_finished += output.finish_reason is not None
        if self._num_finished < self._params.num_sequences:
            return []
        ranked = sorted(
            self._outputs.values(),
            key=lambda outputs: sum(e.logprob for output in outputs for e in output.logprobs or ()),
            reverse=True,
        )
        return [self._whole(rank, outputs) for rank, outputs in enumerate(ranked[: self._params.n])]

    def _whole(self, rank: int, outputs: Sequence[RequestOutput]) -> RequestOutput:
        logprobs = tuple(entry for output in outputs for entry in output.logprobs or ())
        return replace(
            outputs[-1],
            index=rank,
            new_token_ids=tuple(token for output in outputs for token in output.new_token_ids),
            text="".join(output.new_text for output in outputs),
            logprobs=logprobs if self._params.logprobs is not None else None,
            # The prompt was scored once, with the first completion.
            prompt_logprobs=self._outputs[0][0].prompt_logprobs if rank == 0 else None,
        )

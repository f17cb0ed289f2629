"""From the tokens of a step to what those who asked are told."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from ..execution.step_result import StepResult
from ..scheduling.outputs import RequestOutput, TokenLogprobs
from ..scheduling.request import Request, Token
from ..scheduling.scheduler import Scheduler
from ..scheduling.step_plan import StepPlan
from .best_of import BestOf
from .completion_text import CompletionText
from .detokenizer import text_decoder


class OutputProcessor:
    """What has been said of each sequence: its text, its prompt's scores, and its request's contest."""

    def __init__(self, scheduler: Scheduler, tokenizer: Any) -> None:
        self._scheduler = scheduler
        self._decoder = text_decoder(tokenizer)
        self._texts: dict[str, CompletionText] = {}
        self._prompt_logprobs: dict[str, dict[int, TokenLogprobs]] = {}
        self._best_of: dict[str, BestOf] = {}

    def add_best_of(self, request_id: str, best_of: BestOf) -> None:
        """A request whose completions compete; nothing is said before they have."""
        self._best_of[request_id] = best_of

    def forget(self, request_id: str, members: list[Request]) -> None:
        """Drop what was kept of a request and its sequences."""
        self._best_of.pop(request_id, None)
        for request in members:
            self._texts.pop(request.sequence_id, None)
            self._prompt_logprobs.pop(request.sequence_id, None)

    def keep_prompt_logprobs(self, plan: StepPlan, result: StepResult) -> None:
        """Collect the scores of prompts; a prompt may take several steps."""
        for row in plan.rows:
            scored = result.prompt_logprobs.get(row.sequence_id)
            if scored and self._scheduler.request_of(row) is not None:
                self._prompt_logprobs.setdefault(row.sequence_id, {}).update(scored)

    def outputs(
        self, plan: StepPlan, result: StepResult, tokens: list[Token]
    ) -> list[RequestOutput]:
        """What the tokens of a step come to, sequence by sequence."""
        runs = [list(run) for _, run in groupby(tokens, key=lambda token: token.request)]
        return [self._output(plan, result, run) for run in runs]

    def shown(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Pieces, but of a contest nothing before its end, and then the winners."""
        return [shown for output in outputs for shown in self._shown(output)]

    def _output(self, plan: StepPlan, result: StepResult, run: list[Token]) -> RequestOutput:
        """What the tokens of one sequence, in order, come to; its text may end before them."""
        request = run[0].request
        text, shown_tokens = self._advance_text(request, run)
        scored = result.logprobs[plan.rows[run[0].row].sequence_id]
        logprobs = [one for token in shown_tokens if (one := scored[token.sample]) is not None]
        prompt_logprobs = None
        is_first = request.index == 0 and request.num_output_tokens == len(shown_tokens)
        if is_first and request.params.prompt_logprobs is not None:
            scores = self._prompt_logprobs.pop(request.sequence_id, {})
            prompt_logprobs = tuple(scores.get(i) for i in range(request.num_prompt_tokens))
        if request.finish_reason is not None:
            self._texts.pop(request.sequence_id, None)
        return RequestOutput(
            request_id=request.request_id,
            index=request.index,
            new_token_ids=tuple(token.token_id for token in shown_tokens),
            new_text=text,
            logprobs=tuple(logprobs) or None,
            prompt_logprobs=prompt_logprobs,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_output_tokens=request.num_output_tokens,
            times=request.times,
        )

    def _shown(self, output: RequestOutput) -> list[RequestOutput]:
        best_of = self._best_of.get(output.request_id)
        if best_of is None:
            return [output]
        winners = best_of.take(output)
        if winners:
            del self._best_of[output.request_id]
        return winners

    def _advance_text(self, request: Request, run: list[Token]) -> tuple[str, list[Token]]:
        """Text that tokens complete; ends the request where it meets a stop string, and drops the rest."""
        text = self._texts.get(request.sequence_id)
        if text is None:
            prompt = request.token_ids[: request.num_prompt_tokens]
            text = CompletionText(self._decoder, prompt, request.params)
            self._texts[request.sequence_id] = text
        shown = ""
        for count, token in enumerate(run, 1):
            is_last = count == len(run) and request.finish_reason is not None
            output, met = text.feed(token.token_id, is_last=is_last)
            shown += output
            if met is not None:
                num_tokens = request.num_known_tokens - len(run) + count
                self._scheduler.stop_at(request, num_tokens, met)
                return shown, run[:count]
        return shown, run

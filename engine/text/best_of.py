"""best_of: of `best_of` sampled completions, the `n` of the highest cumulative logprob are returned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..base.sampling_params import SamplingParams
from ..scheduling.outputs import RequestOutput


class BestOf:
    """Collects the outputs of a request with `best_of` > `n`, until all of its completions are finished.

    They are ranked as in vLLM, by cumulative logprob, without length normalization. The logprobs are the
    model's own, before penalties and temperature.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._outputs: dict[int, list[RequestOutput]] = {}
        self._num_finished = 0

    @staticmethod
    def scored(params: SamplingParams) -> SamplingParams:
        """The same params, with the logprobs that completions are ranked by."""
        return params if params.logprobs is not None else replace(params, logprobs=0)

    def take(self, output: RequestOutput) -> list[RequestOutput]:
        """Add a delta; the last one returns the n best completions, best first, as index 0 to n - 1."""
        self._outputs.setdefault(output.index, []).append(output)
        self._num_finished += output.finish_reason is not None
        if self._num_finished < self._params.num_sequences:
            return []
        ranked = sorted(self._outputs.values(), key=_cumulative_logprob, reverse=True)
        return [self._whole(rank, outputs) for rank, outputs in enumerate(ranked[: self._params.n])]

    def _whole(self, rank: int, outputs: Sequence[RequestOutput]) -> RequestOutput:
        wants_logprobs = self._params.logprobs is not None
        return replace(
            outputs[-1],
            index=rank,
            new_token_ids=tuple(token for output in outputs for token in output.new_token_ids),
            text="".join(output.new_text for output in outputs),
            logprobs=tuple(entry for output in outputs for entry in output.logprobs or ())
            if wants_logprobs
            else None,
            # The prompt was scored once, beside the first completion.
            prompt_logprobs=self._outputs[0][0].prompt_logprobs if rank == 0 else None,
        )


def _cumulative_logprob(outputs: Sequence[RequestOutput]) -> float:
    return sum(entry.logprob for output in outputs for entry in output.logprobs or ())

"""Text of a completion: incremental detokenization with stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from ..base.sampling_params import SamplingParams
from ..scheduling.stop import StopStrings
from .detokenizer import Decoder, IncrementalDetokenizer


class CompletionText:
    """Detokenizes one completion, up to a stop string."""

    def __init__(self, decoder: Decoder, prompt: Sequence[int], params: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(
            decoder, prompt, skip_special_tokens=params.skip_special_tokens
        )
        self._stop = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0

    def feed(self, token_id: int, *, is_last: bool) -> tuple[str, str | None]:
        """The text to emit after a token, and the stop string that it completes, if any."""
        self._num_tokens += 1
        delta = self._detokenizer.feed([token_id])
        if self._num_tokens < self._min_tokens:
            return delta, None
        if is_last:
            delta += self._detokenizer.flush()
        shown, met = self._stop.feed(delta)
        if met is None and is_last:
            shown += self._stop.flush()
        return shown, met

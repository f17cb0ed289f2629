"""The text side of a completion: what has been decoded, and what is held back."""

from __future__ import annotations

from collections.abc import Sequence

from ..base.sampling_params import SamplingParams
from ..scheduling.stop import StopStrings
from .detokenizer import Decoder, IncrementalDetokenizer


class CompletionText:
    """Turns the tokens of one completion into text, up to a stop string."""

    def __init__(self, decoder: Decoder, prompt: Sequence[int], params: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(
            decoder, prompt, skip_special_tokens=params.skip_special_tokens
        )
        self._stop = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0

    def feed(self, token_id: int, *, is_last: bool) -> tuple[str, str | None]:
        """Text that a token completes, and the stop string that it meets, if it does."""
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

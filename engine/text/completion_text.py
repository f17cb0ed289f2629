"""Text of a completion: incremental detokenization with stop strings."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from ..base.sampling_params import SamplingParams
from ..scheduling.stop import StopStrings
from .detokenizer import Decoder, IncrementalDetokenizer


class CompletionText:
    """Detokenizes one completion, up to a stop string.

    Its tokens are fed one by one; or, where no stop string can end it, added by the engine's thread and
    detokenized in the thread that reads the text.
    """

    def __init__(self, decoder: Decoder, prompt: Sequence[int], params: SamplingParams) -> None:
        self.is_deferred = not params.stop
        self._added: deque[tuple[int, Sequence[int], bool]] = deque()
        self._deltas: dict[int, str] = {}
        self._reading = threading.Lock()
        self._detokenizer = IncrementalDetokenizer(
            decoder, prompt, skip_special_tokens=params.skip_special_tokens
        )
        self._stop = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0

    def add(self, token_ids: Sequence[int], num_tokens: int, *, is_last: bool) -> None:
        """Add the tokens of an output, which are detokenized by `delta`; `num_tokens` it has with them."""
        self._added.append((num_tokens, token_ids, is_last))

    def delta(self, num_tokens: int) -> str:
        """The new text of the output that ended with that many tokens; they may be read in any order."""
        with self._reading:
            while num_tokens not in self._deltas:
                end, token_ids, is_last = self._added.popleft()
                last = len(token_ids) - 1
                shown = [
                    self.feed(token_id, is_last=is_last and place == last)[0]
                    for place, token_id in enumerate(token_ids)
                ]
                self._deltas[end] = "".join(shown)
            return self._deltas.pop(num_tokens)

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

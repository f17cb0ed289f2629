"""`usage` of a request: token counts, and queue, prefill and decode seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...scheduling.outputs import RequestOutput
from ..loop.stream import Job


class Usage:
    """Accumulates the usage of one HTTP request, which may have several prompts and choices."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.num_prompt_tokens = sum(len(job.token_ids) for job in jobs)
        self.num_output_tokens = 0
        self._last: dict[tuple[str, int], RequestOutput] = {}

    def take(self, output: RequestOutput) -> None:
        self.num_output_tokens += len(output.new_token_ids)
        self._last[output.request_id, output.index] = output

    @property
    def num_cached_tokens(self) -> int:
        by_job = {output.request_id: output.num_cached_tokens for output in self._last.values()}
        return sum(by_job.values())

    def so_far(self) -> dict[str, Any]:
        """Token counts so far, as in OpenAI's completions and chat completions."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }

    def whole(self) -> dict[str, Any]:
        """Final token counts, and `seconds`: from arrival to the first scheduled step (`queue`), to the first
        token of any choice (`prefill`), and to the last token of all choices (`decode`)."""
        times = [output.times for output in self._last.values()]
        arrival = min(t.arrival for t in times)
        begun = min(t.first_scheduled or arrival for t in times)
        first = min(t.first_token or begun for t in times)
        last = max(t.last_token or first for t in times)
        seconds = {"queue": begun - arrival, "prefill": first - begun, "decode": last - first}
        return {**self.so_far(), "seconds": {name: round(s, 6) for name, s in seconds.items()}}

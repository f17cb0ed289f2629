"""What a request took: tokens, and where its time went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...scheduling.outputs import RequestOutput
from ...scheduling.request import RequestTimes
from ..loop.stream import Job


class Usage:
    """Counts the output of one request, which may have several prompts and choices."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.num_prompt_tokens = sum(len(job.token_ids) for job in jobs)
        self.num_output_tokens = 0
        self._cached_tokens: dict[str, int] = {}
        self._times: dict[tuple[str, int], RequestTimes] = {}

    def take(self, output: RequestOutput) -> None:
        self.num_output_tokens += len(output.new_token_ids)
        self._cached_tokens[output.request_id] = output.num_cached_tokens
        self._times[output.request_id, output.index] = output.times

    @property
    def num_cached_tokens(self) -> int:
        return sum(self._cached_tokens.values())

    def so_far(self) -> dict[str, Any]:
        """The tokens, in the shape of OpenAI's completions and chats."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }

    def whole(self) -> dict[str, Any]:
        """The tokens, and `seconds`: until the first prompt was begun (`queue`), from there to the first
        token of any choice (`prefill`), and from there to the last of all (`decode`)."""
        times = self._times.values()
        arrival = min(one.arrival for one in times)
        begun = min(one.first_scheduled or arrival for one in times)
        first = min(one.first_token or begun for one in times)
        last = max(one.last_token or first for one in times)
        seconds = {"queue": begun - arrival, "prefill": first - begun, "decode": last - first}
        return {**self.so_far(), "seconds": {name: round(s, 6) for name, s in seconds.items()}}

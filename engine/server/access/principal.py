"""A client as its API key names it: limits and usage, kept while the process lives."""

from __future__ import annotations

from dataclasses import dataclass

from .concurrency import ConcurrencyLimiter
from .rate_limit import RateLimits


@dataclass(slots=True)
class KeyUsage:
    """What was done with a key: requests, and tokens that were computed and generated."""

    num_requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def record(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Count a request that has ended."""
        self.num_requests += 1
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens


@dataclass(slots=True, eq=False)
class Principal:
    """One client.

    Attributes:
        number: identifies it while the process lives; prefix cache and stored responses are by it.
        key_name: the name of its API key, never the key; None without keys.
        is_admin: whether it may see metrics and the engine's state.
    """

    number: int
    key_name: str | None
    is_admin: bool
    limits: RateLimits
    concurrency: ConcurrencyLimiter
    usage: KeyUsage

"""The model interface of task scoring: log-probabilities of targets, and generated text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from ...engine.base.sampling_params import SamplingParams
from .windows import Window


class TargetScore(NamedTuple):
    """Natural-log probability of a target token, and whether it is the likeliest."""

    logprob: float
    is_greedy: bool


class GenerationRequest(NamedTuple):
    """Token ids to continue; with `messages`, the conversation for a server that applies the template."""

    token_ids: list[int]
    params: SamplingParams
    messages: list[dict[str, str]] | None = None


class TaskBackend(Protocol):
    """Where tasks are scored: an idle engine, or a server.

    Attributes:
        max_inputs: most input tokens of a scored window.
        longest: most tokens of a prompt with its generation.
        sends_messages: whether conversations are sent as messages, because the server applies the template.
    """

    tokenizer: Any
    max_inputs: int
    longest: int
    sends_messages: bool

    def score(self, windows: Sequence[Window], what: str) -> list[list[TargetScore]]:
        """Scores of the targets of each window."""
        ...

    def generate(self, requests: Sequence[GenerationRequest], what: str) -> list[str]:
        """The text that follows each prompt, up to its first stop string."""
        ...


def summed(scores: Iterable[TargetScore]) -> tuple[float, bool]:
    """(sum of log-probabilities in nats, whether each token is the likeliest) of a continuation."""
    kept = list(scores)
    return math.fsum(score.logprob for score in kept), all(score.is_greedy for score in kept)


def decode(tokenizer: Any, token_ids: Sequence[int], stops: Sequence[str] = ()) -> str:
    """New tokens as text up to a stop string, decoded alone as in lm-eval: a leading space may go."""
    return before_stops(tokenizer.decode(list(token_ids), skip_special_tokens=True), stops)


def before_stops(text: str, stops: Sequence[str]) -> str:
    """The text before the first of the stop strings."""
    for stop in stops:
        text = text.split(stop)[0]
    return text

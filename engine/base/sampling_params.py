"""Parameters of a request, after vLLM's: sampling and stop conditions, or pooling of its prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...base.errors import BadInput

if TYPE_CHECKING:
    from .logits import LogitsProcessor, TokenMask


SMALLEST_TEMPERATURE = 1e-5
"""Below it, logits divided by the temperature overflow float32; sampling is greedy instead."""

MAX_LOGPROBS = 100
MAX_COMPLETIONS = 128


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request. Names and meanings follow vLLM's.

    `temperature` 0 is greedy. `top_k` 0 (or -1) and `top_p` 1 and `min_p` 0 are off. Penalties apply to
    output tokens only, but `repetition_penalty` to the prompt too. `logprobs` = k returns those of the
    sampled token and the k likeliest; they come from the model's own distribution, before penalties and
    temperature. `best_of` = b samples b completions and returns the n of them with the highest
    cumulative logprob, all at the end. `max_tokens` None runs to the model's context length; a `seed` of -1
    is none. `token_mask` is the mask of allowed tokens, `logits_processors` change logits in their order: see
    `engine/base/logits.py`.

    Raises:
        BadInput: a value outside its range.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    n: int = 1
    best_of: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    token_mask: TokenMask | None = None
    logits_processors: tuple[LogitsProcessor, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            raise BadInput(f"stop must be a tuple of strings, not the string {self.stop!r}")
        for name, holds, need in self._limits():
            if not holds:
                raise BadInput(f"{name} = {getattr(self, name)}: need {need}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise BadInput(f"min_tokens = {self.min_tokens} exceeds max_tokens = {self.max_tokens}")
        if not all(self.stop):
            raise BadInput("a stop string is empty")

    def _limits(self) -> list[tuple[str, bool, str]]:
        return [
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "1 or more"),
            ("min_tokens", self.min_tokens >= 0, "0 or more"),
            ("temperature", 0.0 <= self.temperature < math.inf, "0 or more"),
            ("top_k", self.top_k >= -1, "-1 or 0 (off), or 1 or more"),
            ("top_p", 0.0 < self.top_p <= 1.0, "a value above 0, up to 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "0 to 1"),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 100.0, "0.01 to 100"),
            ("presence_penalty", abs(self.presence_penalty) <= 2.0, "-2 to 2"),
            ("frequency_penalty", abs(self.frequency_penalty) <= 2.0, "-2 to 2"),
            ("n", 1 <= self.n <= MAX_COMPLETIONS, f"1 to {MAX_COMPLETIONS}"),
            (
                "best_of",
                self.best_of is None or self.n <= self.best_of <= MAX_COMPLETIONS,
                f"n = {self.n} to {MAX_COMPLETIONS}",
            ),
            (
                "logprobs",
                self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
                f"0 to {MAX_LOGPROBS}",
            ),
            (
                "prompt_logprobs",
                self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= MAX_LOGPROBS,
                f"0 to {MAX_LOGPROBS}",
            ),
        ]

    @property
    def num_sequences(self) -> int:
        return self.n if self.best_of is None else self.best_of

    @property
    def is_greedy(self) -> bool:
        return self.temperature < SMALLEST_TEMPERATURE

    @property
    def filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def changes_scores(self) -> bool:
        return bool(self.logit_bias) or self.reads_tokens

    @property
    def reads_tokens(self) -> bool:
        return bool(self.logits_processors) or self.token_mask is not None or self.penalizes

    @property
    def penalizes(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


POOLING_MODES = ("last", "mean", "cls", "max")


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """How the final hidden states of a prompt become one vector; BadInput: a mode unknown, or with ids.
    `mode`: last token, mean, first (cls) or max; with last, `token_ids` for their logits instead."""

    mode: str
    token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.mode not in POOLING_MODES:
            raise BadInput(f"pooling {self.mode!r}: known are {', '.join(POOLING_MODES)}")
        if self.token_ids and self.mode != "last":
            raise BadInput(f"logits of tokens come from the last state, not from {self.mode!r}")

    @property
    def reads_all(self) -> bool:
        return self.mode != "last"

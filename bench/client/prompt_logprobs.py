"""Log-probabilities of prompt tokens from `/v1/completions`: vLLM's `prompt_logprobs`, or OpenAI's `echo`.

A server is probed once with a short prompt for a form that it knows and for how many top tokens it gives.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...quant.base.errors import BadInput
from .json_http import JsonClient, RequestFailed

Form = Literal["prompt_logprobs", "echo"]
FORMS: tuple[Form, ...] = ("prompt_logprobs", "echo")
# vLLM's default of --max-logprobs, the limit of OpenAI's completions, and the likeliest token alone.
NUM_TOP = (20, 5, 1)
# A server says so of a number of top tokens beyond its limit.
BAD_VALUES = (400, 422)
TOKEN_ID = "token_id:"
PROBE_TEXT = "The quick brown fox jumps over the lazy dog."


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A prompt token in the distribution that predicts it.

    Attributes:
        logprob: natural-log probability of the token.
        rank: 1 is the likeliest; None where the server tells top tokens only and it is none of them.
        top: natural-log probabilities of the likeliest tokens by id, or by text where the server has no ids.
            Holds the token itself too.
    """

    logprob: float
    rank: int | None
    top: Mapping[int | str, float]

    @property
    def is_greedy(self) -> bool:
        """Whether no token is likelier."""
        return self.rank == 1

    @property
    def top_token(self) -> int | str:
        """The likeliest token."""
        return max(self.top, key=self.top.__getitem__)


class NoPromptLogprobs(Exception):
    """The server gives no log-probabilities of prompt tokens, or unusable ones."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Scoring of prompts by one model of a server.

    Attributes:
        form: how the server is asked.
        num_top: number of top tokens per position.
        concurrency: requests in flight.
    """

    client: JsonClient
    url: str
    model: str
    form: Form
    num_top: int
    concurrency: int

    @classmethod
    def probed(
        cls,
        client: JsonClient,
        url: str,
        model: str,
        prompt: Sequence[int],
        *,
        num_top: int = NUM_TOP[0],
        concurrency: int = 8,
    ) -> PromptLogprobs:
        """The form that the server knows, found with a short prompt of two tokens or more.

        Raises:
            NoPromptLogprobs: it knows none; with what it says to each.
        """
        reasons = {}
        for form in FORMS:
            for count in dict.fromkeys(min(num_top, each) for each in NUM_TOP):
                scoring = cls(client, url, model, form, count, concurrency)
                try:
                    scoring._parsed(prompt, client.post(url, scoring._body(list(prompt))))
                    return scoring
                except NoPromptLogprobs as error:
                    reasons[form] = str(error)
                    break
                except RequestFailed as error:
                    reasons[form] = str(error)
                    if error.status not in BAD_VALUES:
                        break
        words = "; ".join(f"{form}: {reason}" for form, reason in reasons.items())
        raise NoPromptLogprobs(f"the server gives no logprobs of prompts ({words})")

    def scores(self, prompts: Iterable[Sequence[int]]) -> Iterator[list[ScoredToken]]:
        """Per prompt, the scores of its tokens but the first, which nothing predicts.

        A prompt has two tokens or more, and leaves room for one more in the model's context.

        Raises:
            RequestFailed: a request failed.
            NoPromptLogprobs: an answer lacks scores.
        """
        kept = [list(prompt) for prompt in prompts]
        answers = self.client.post_each(self.url, map(self._body, kept), self.concurrency)
        for prompt, answer in zip(kept, answers, strict=True):
            yield self._parsed(prompt, answer)

    def _body(self, prompt: list[int]) -> dict[str, Any]:
        body = {"model": self.model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        if self.form == "prompt_logprobs":
            return {**body, "prompt_logprobs": self.num_top}
        # Names of tokens as ids tell apart tokens of the same text; a server without it ignores the field.
        return {**body, "echo": True, "logprobs": self.num_top, "return_tokens_as_token_ids": True}

    def _parsed(self, prompt: Sequence[int], answer: Mapping[str, Any]) -> list[ScoredToken]:
        parse = _by_id if self.form == "prompt_logprobs" else _echoed
        try:
            scored = parse(prompt, answer["choices"][0], self.num_top)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise NoPromptLogprobs("the answer has none") from error
        if not all(math.isfinite(token.logprob) for token in scored):
            raise NoPromptLogprobs("the answer has a log-probability that is no number")
        return scored


def _by_id(prompt: Sequence[int], choice: Mapping[str, Any], num_top: int) -> list[ScoredToken]:
    """Parse vLLM's `prompt_logprobs`: per position {token id: {logprob, rank}}."""
    positions = choice["prompt_logprobs"]
    _check_length(prompt, positions)
    scored = []
    for token, entry in zip(prompt[1:], positions[1:], strict=True):
        top: dict[int | str, float] = {
            int(key): float(value["logprob"]) for key, value in entry.items()
        }
        scored.append(ScoredToken(top[token], int(entry[str(token)]["rank"]), top))
    return scored


def _echoed(prompt: Sequence[int], choice: Mapping[str, Any], num_top: int) -> list[ScoredToken]:
    """Parse the log-probabilities of an echoed prompt; that of the generated token is dropped."""
    logprobs = choice["logprobs"]
    values, tops = logprobs["token_logprobs"], logprobs["top_logprobs"]
    if len(values) == len(prompt) + 1:
        values, tops = values[:-1], tops[:-1]
    _check_length(prompt, values)
    names = logprobs["tokens"]
    if names[0].startswith(TOKEN_ID) and [_key(name) for name in names[: len(prompt)]] != [*prompt]:
        raise NoPromptLogprobs("the server scores other tokens than those sent")
    scored = []
    for logprob, top in zip(values[1:], tops[1:], strict=True):
        logprob = float(logprob)
        likelier = sum(value > logprob for value in top.values())
        rank = likelier + 1 if likelier < num_top else None
        scored.append(ScoredToken(logprob, rank, {_key(key): float(v) for key, v in top.items()}))
    return scored


def _check_length(prompt: Sequence[int], positions: Sequence[Any]) -> None:
    if len(positions) != len(prompt):
        raise NoPromptLogprobs(f"{len(positions)} scores for a prompt of {len(prompt)} tokens")


def _key(name: str) -> int | str:
    return int(name.removeprefix(TOKEN_ID)) if name.startswith(TOKEN_ID) else name


def probe_prompt(tokenizer: Any) -> list[int]:
    """A short prompt for `probed`.

    Raises:
        BadInput: the tokenizer makes fewer than two tokens of a sentence.
    """
    tokens = list(tokenizer.encode(PROBE_TEXT, add_special_tokens=False))[:6]
    if len(tokens) < 2:
        raise BadInput("the tokenizer makes no two tokens of a sentence")
    return tokens

"""Untimed requests: JSON documents over HTTP, and log-probabilities of prompts.

A server is probed once with a short prompt for the form that it knows (vLLM's `prompt_logprobs`, or OpenAI's
`echo`) and for how many top tokens it gives.
"""

from __future__ import annotations

import http.client
import json
import math
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from ...base.errors import BadInput
from .exchange import tls_context
from .stream import refusal

RETRIED = (429, 502, 503)  # the server, or a proxy in front of it, is full for a moment
RETRY_SECONDS = (0.5, 2.0, 8.0)
Form = Literal["prompt_logprobs", "echo"]
FORMS: tuple[Form, ...] = ("prompt_logprobs", "echo")
# vLLM's default of --max-logprobs, the limit of OpenAI's completions, and the likeliest token alone.
NUM_TOP = (20, 5, 1)
BAD_VALUES = (400, 422)  # statuses for a number of top tokens beyond the server's limit
TOKEN_ID = "token_id:"
PROBE_TEXT = "The quick brown fox jumps over the lazy dog."


class RequestFailed(Exception):
    """A request without a usable response: refused (`status` is HTTP's), unreachable, or not JSON."""

    def __init__(
        self, message: str, status: int | None = None, *, is_unreachable: bool = False
    ) -> None:
        super().__init__(message)
        self.status, self.is_unreachable = status, is_unreachable


@dataclass(frozen=True, slots=True)
class JsonClient:
    """Requests to one server, with the headers of its address."""

    headers: Mapping[str, str]
    verify_tls: bool = True
    timeout: float = 600.0

    def get(self, url: str, data: bytes | None = None) -> Any:
        """The JSON at a URL; with `data` the answer to a POST. Raises RequestFailed: there is none."""
        try:
            return json.loads(self.read(url, data))
        except ValueError as error:
            raise RequestFailed(f"{url} answers no JSON") from error

    def post(self, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON object that answers `body`. Raises RequestFailed: no usable answer, or no object."""
        data = json.dumps(body, separators=(",", ":")).encode()
        answer = self.get(url, data)
        if not isinstance(answer, dict):
            raise RequestFailed(f"{url} answers no JSON object")
        return answer

    def post_again(self, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
        for wait in RETRY_SECONDS:
            try:
                return self.post(url, body)
            except RequestFailed as error:
                if error.status not in RETRIED:
                    raise
                time.sleep(wait)
        return self.post(url, body)

    def post_each(
        self, url: str, bodies: Iterable[Mapping[str, Any]], concurrency: int
    ) -> Iterator[dict[str, Any]]:
        """Answers in order, up to `concurrency` in flight; a failure drops what was not sent."""
        pool = ThreadPoolExecutor(concurrency, thread_name_prefix="llmopt-scores")
        sent: deque[Future[dict[str, Any]]] = deque()
        try:
            for body in bodies:
                # A slow request must not idle the others: twice as many are queued as run.
                if len(sent) >= 2 * concurrency:
                    yield sent.popleft().result()
                sent.append(pool.submit(self.post_again, url, body))
            while sent:
                yield sent.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def read(self, url: str, data: bytes | None = None) -> bytes:
        """The bytes at a URL. Raises RequestFailed: there are none."""
        # urllib writes the Host of the URL.
        headers = {name: value for name, value in self.headers.items() if name != "Host"}
        request = urllib.request.Request(url, data, headers)
        try:
            with _opener(self.verify_tls).open(request, timeout=self.timeout) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            message = refusal(error.code, [(0.0, error.read())])
            raise RequestFailed(message, error.code) from error
        except OSError as error:  # URLError has the socket's error as its reason
            reason = getattr(error, "reason", error)
            explanation = getattr(reason, "strerror", None) or str(reason)
            raise RequestFailed(explanation, is_unreachable=True) from error
        except http.client.HTTPException as error:
            raise RequestFailed(f"{url} answers no HTTP") from error


@cache
def _opener(verify_tls: bool) -> urllib.request.OpenerDirector:
    """A cached opener: reading the system's certificates takes 30 ms, and metrics are read every second."""
    # Ignore proxies of the environment: the measurement must reach the server directly.
    https = urllib.request.HTTPSHandler(context=tls_context(verify_tls))
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), https)


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A prompt token in the distribution that predicts it.

    Attributes:
        logprob: natural-log probability of the token.
        top: natural-log probabilities of the likeliest tokens by id, or by text where the server has no ids.
            Holds the token itself too.
    """

    logprob: float
    rank: int | None
    top: Mapping[int | str, float]

    @property
    def is_greedy(self) -> bool:
        return self.rank == 1

    @property
    def top_token(self) -> int | str:
        return max(self.top, key=self.top.__getitem__)


class NoPromptLogprobs(Exception):
    """The server gives no log-probabilities of prompt tokens, or unusable ones."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Scoring of prompts by one model of a server, with `num_top` tokens of each position."""

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
        """The form that the server knows, by a prompt of two tokens. NoPromptLogprobs: none, with replies."""
        reasons = {}
        for form in FORMS:
            for count in dict.fromkeys(min(num_top, limit) for limit in NUM_TOP):
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
        tried = "; ".join(f"{form}: {reason}" for form, reason in reasons.items())
        raise NoPromptLogprobs(f"the server gives no logprobs of prompts ({tried})")

    def scores(self, prompts: Iterable[Sequence[int]]) -> Iterator[list[ScoredToken]]:
        """Per prompt, the scores of its tokens but the first, which nothing predicts. A prompt has two tokens
        or more, and leaves room for one more in the model's context. Raises RequestFailed: a request failed;
        NoPromptLogprobs: an answer lacks scores."""
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
    """A short prompt for `probed`. Raises BadInput: the tokenizer makes under two tokens of a sentence."""
    tokens = list(tokenizer.encode(PROBE_TEXT, add_special_tokens=False))[:6]
    if len(tokens) < 2:
        raise BadInput("the tokenizer makes no two tokens of a sentence")
    return tokens

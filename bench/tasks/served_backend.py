"""Task requests on a server: loglikelihoods from prompt log-probabilities, generation from completions.

As lm-eval's `local-completions` and `local-chat-completions`, with the tokens and windows of its `hf` model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ...engine.base.sampling_params import SamplingParams
from ...quant.base.errors import BadInput
from ...quant.base.progress import Progress, Silent
from ..client.address import CHAT, Address
from ..client.json_http import JsonClient
from ..client.prompt_logprobs import TOKEN_ID, PromptLogprobs, probe_prompt
from ..client.served_model import ServedModel
from .backend import GenerationRequest, TargetScore, before_stops, decode
from .windows import Window

TOKEN_NAME = re.compile(rf"{TOKEN_ID}(\d+)")
# Fields beyond OpenAI's, sent only where a task sets them.
EXTRA = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "top_p": 1.0}


class ServedBackend:
    """A `TaskBackend` over HTTP. With the chat backend the server applies its template, and only generation
    tasks can be scored."""

    def __init__(
        self,
        client: JsonClient,
        address: Address,
        served: ServedModel,
        *,
        backend: str,
        concurrency: int,
        progress: Progress | None = None,
    ) -> None:
        self._client = client
        self._address = address
        self._served = served
        self._concurrency = concurrency
        self._progress = progress or Silent()
        self._scoring: PromptLogprobs | None = None
        self.sends_messages = backend == CHAT
        self.tokenizer: Any = served.tokenizer
        self.longest = served.max_model_len
        # A prompt holds the last target too, and servers want room for a generated token.
        self.max_inputs = served.max_model_len - 2

    def score(self, windows: Sequence[Window], what: str) -> list[list[TargetScore]]:
        """Raises `NoPromptLogprobs` where the server gives none, `RequestFailed` where a request fails."""
        if self.sends_messages:
            raise BadInput(
                "chats have no log-probabilities of a prompt: score the task with --backend openai"
            )
        if self._scoring is None:
            self._scoring = PromptLogprobs.probed(
                self._client,
                self._address.completions_url,
                self._served.model,
                probe_prompt(self.tokenizer),
                num_top=1,
                concurrency=self._concurrency,
            )
        prompts = [[*window.inputs, window.targets[-1]] for window in windows]
        scores = []
        with progressing(self._progress, what, len(windows)):
            for window, tokens in zip(windows, self._scoring.scores(prompts), strict=True):
                of_targets = tokens[-len(window.targets) :]
                scores.append([TargetScore(token.logprob, token.is_greedy) for token in of_targets])
                self._progress.advance()
        return scores

    def generate(self, requests: Sequence[GenerationRequest], what: str) -> list[str]:
        """Raises `RequestFailed` where a request fails."""
        url = self._address.request_url if self.sends_messages else self._address.completions_url
        bodies = [self._body(request) for request in requests]
        texts = []
        with progressing(self._progress, what, len(bodies)):
            answers = self._client.post_each(url, bodies, self._concurrency)
            for request, answer in zip(requests, answers, strict=True):
                texts.append(self._text(answer, request.params.stop))
                self._progress.advance()
        return texts

    def _body(self, request: GenerationRequest) -> dict[str, Any]:
        params = request.params
        body: dict[str, Any] = {
            "model": self._served.model,
            "temperature": params.temperature,
            "seed": params.seed,
            **_stops(params),
            **{
                name: getattr(params, name)
                for name in EXTRA
                if getattr(params, name) != EXTRA[name]
            },
        }
        if request.messages is not None:
            limit = {"max_tokens": params.max_tokens}
            return body | limit | {"messages": request.messages}
        # The ids of the new tokens are decoded here as in process; a server without them gives their text.
        ids = {"logprobs": 0, "return_tokens_as_token_ids": True}
        return body | ids | {"prompt": request.token_ids, "max_tokens": params.max_tokens}

    def _text(self, answer: dict[str, Any], stops: Sequence[str]) -> str:
        try:
            choice = answer["choices"][0]
            if "message" in choice:
                return before_stops(choice["message"].get("content") or "", stops)
            names = (choice.get("logprobs") or {}).get("tokens") or []
            ids = [TOKEN_NAME.fullmatch(name) for name in names]
            if ids and all(ids):
                return decode(self.tokenizer, [int(match[1]) for match in ids if match], stops)
            return before_stops(choice["text"], stops)
        except (LookupError, TypeError, AttributeError) as error:
            raise BadInput("an answer of the server is no completion") from error


def _stops(params: SamplingParams) -> dict[str, Any]:
    # OpenAI's limit is four; the text is cut at every one of them here.
    return {"stop": list(params.stop[:4])} if params.stop else {}


@contextmanager
def progressing(progress: Progress, what: str, count: int) -> Iterator[None]:
    """A progress bar over `count` requests, which ends with an error too."""
    progress.start(what, count, "requests")
    try:
        yield
    finally:
        progress.finish()

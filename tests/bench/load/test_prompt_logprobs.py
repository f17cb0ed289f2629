"""Scores of prompts from servers that know vLLM's form, OpenAI's, a part of them, or none."""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from llmopt.bench.load.json_http import (
    JsonClient,
    NoPromptLogprobs,
    PromptLogprobs,
    RequestFailed,
    ScoredToken,
)

PROMPT = [5, 6, 7, 8]
VOCABULARY = 9
Answer = Callable[[dict[str, Any]], tuple[int, Any]]


def distribution(token: int) -> list[float]:
    """Log-probabilities of all tokens after `token`: the likeliest is the next number."""
    weights = [1.0 / (1 + (other - token - 1) % VOCABULARY) for other in range(VOCABULARY)]
    return [math.log(weight / sum(weights)) for weight in weights]


def ranked(token: int) -> list[tuple[int, float]]:
    return sorted(enumerate(distribution(token)), key=lambda pair: -pair[1])


def by_id(body: dict[str, Any]) -> tuple[int, Any]:
    """vLLM's `prompt_logprobs`."""
    count = body.get("prompt_logprobs")
    positions: list[dict[str, Any] | None] = [None]
    if count is None:
        return 400, {"error": {"message": "only prompt_logprobs here"}}
    for before, token in zip(body["prompt"], body["prompt"][1:], strict=False):
        places = {other: rank for rank, (other, _) in enumerate(ranked(before), 1)}
        kept = [other for other, _ in ranked(before)[:count]]
        positions.append(
            {
                str(other): {"logprob": distribution(before)[other], "rank": places[other]}
                for other in dict.fromkeys([*kept, token])
            }
        )
    return 200, {"choices": [{"text": "x", "prompt_logprobs": positions}]}


def echo(body: dict[str, Any], *, name: Callable[[int], str], most: int = 20) -> tuple[int, Any]:
    """OpenAI's `echo` with `logprobs`, and one generated token."""
    if "prompt_logprobs" in body:
        return 200, {"choices": [{"text": "x"}]}  # an unknown field, ignored
    if body["logprobs"] > most:
        return 400, {"error": {"message": f"logprobs is at most {most}"}}
    assert body["echo"] and body["max_tokens"] == 1
    tokens = [*body["prompt"], 0]
    pairs = list(itertools.pairwise(tokens))
    tops = [
        {name(o): v for o, v in [*ranked(a)[: body["logprobs"]], (b, distribution(a)[b])]}
        for a, b in pairs
    ]
    logprobs = {
        "tokens": [name(token) for token in tokens],
        "token_logprobs": [None, *(distribution(a)[b] for a, b in pairs)],
        "top_logprobs": [None, *tops],
    }
    return 200, {"choices": [{"text": "x", "logprobs": logprobs}]}


def ids(token: int) -> str:
    return f"token_id:{token}"


def generated_only(body: dict[str, Any]) -> tuple[int, Any]:
    """A server that ignores `echo`."""
    logprobs = {"tokens": ["x"], "token_logprobs": [-1.0], "top_logprobs": [{"x": -1.0}]}
    return 200, {"choices": [{"text": "x", "logprobs": logprobs}]}


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, document = answer(body)
            data = document if isinstance(document, bytes) else json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/completions"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def probed(answer: Answer, **options: Any) -> tuple[PromptLogprobs, list[ScoredToken]]:
    with serving(answer) as url:
        scoring = PromptLogprobs.probed(JsonClient({}, timeout=120), url, "m", PROMPT, **options)
        scores = list(scoring.scores([PROMPT, [1, 3]]))
    assert [len(each) for each in scores] == [3, 1]
    return scoring, scores[0] + scores[1]


def test_scores_by_token_id() -> None:
    scoring, scores = probed(by_id, num_top=3)
    assert (scoring.form, scoring.num_top) == ("prompt_logprobs", 3)
    assert [score.rank for score in scores] == [1, 1, 1, 2]
    assert scores[3].logprob == pytest.approx(distribution(1)[3])
    assert scores[3].top == pytest.approx(dict(ranked(1)[:3]))
    assert scores[0].is_greedy and not scores[3].is_greedy and scores[3].top_token == 2


def test_scores_of_an_echo() -> None:
    scoring, scores = probed(lambda body: echo(body, name=ids))
    assert (scoring.form, scoring.num_top) == ("echo", 20)
    assert [score.rank for score in scores] == [1, 1, 1, 2] and scores[3].top_token == 2
    # A lower limit of the server, and texts in place of ids.
    scoring, scores = probed(lambda body: echo(body, name=chr, most=5))
    assert scoring.num_top == 5 and scores[3].top_token == chr(2)
    scoring, scores = probed(lambda body: echo(body, name=ids), num_top=1)
    assert [score.rank for score in scores] == [1, 1, 1, None] and not scores[3].is_greedy


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (generated_only, "1 scores for a prompt of 4 tokens"),
        (lambda _: (400, {"error": {"message": "Only no echo is supported"}}), "Only no echo"),
        (lambda _: (404, {"detail": "Not Found"}), "HTTP 404"),
        (lambda _: (501, {"error": {"message": "no logprobs"}}), "HTTP 501: no logprobs"),
        (lambda _: (200, {"choices": [{"text": "x", "logprobs": None}]}), "has none"),
        (lambda _: (200, b"<html>"), "answers no JSON"),
        (lambda _: (200, [1]), "no JSON object"),
        (lambda _: (200, {"choices": []}), "has none"),
        (
            lambda body: echo({**body, "prompt": body["prompt"][::-1]}, name=ids),
            "other tokens than those sent",
        ),
        (lambda body: echo({**body, "prompt": [1, *body["prompt"]]}, name=chr), "6 scores"),
    ],
)
def test_a_server_without_scores_says_why(answer: Answer, said: str) -> None:
    with pytest.raises(NoPromptLogprobs, match="gives no logprobs of prompts") as caught:
        probed(answer)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_infinite_scores_and_unreachable_servers() -> None:
    def broken(body: dict[str, Any]) -> tuple[int, Any]:
        status, document = by_id(body)
        if status == 200:
            document["choices"][0]["prompt_logprobs"][1]["6"]["logprob"] = math.nan
        return status, document

    with pytest.raises(NoPromptLogprobs, match="no number"):
        probed(broken)
    with pytest.raises(NoPromptLogprobs, match="refused"):
        PromptLogprobs.probed(
            JsonClient({}, timeout=120), "http://127.0.0.1:1/v1/completions", "m", PROMPT
        )


def test_a_full_server_is_asked_again_and_a_failure_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmopt.bench.load.json_http.RETRY_SECONDS", (0.01, 0.01))
    seen: list[int] = []

    def full_once(body: dict[str, Any]) -> tuple[int, Any]:
        seen.append(1)
        return (503, {"error": {"message": "full"}}) if len(seen) == 1 else by_id(body)

    bodies = [{"prompt": PROMPT, "prompt_logprobs": 1}] * 5
    with serving(full_once) as url:
        answers = list(JsonClient({}, timeout=120).post_each(url, bodies, 2))
    assert len(answers) == 5 and len(seen) == 6
    with serving(lambda _: (500, {"error": {"message": "boom"}})) as url:
        client = JsonClient({}, timeout=120)
        with pytest.raises(RequestFailed, match="HTTP 500: boom"):
            list(client.post_each(url, bodies, 2))

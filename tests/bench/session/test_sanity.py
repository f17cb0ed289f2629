"""The sanity check of a server: five planted faults are broken, sound servers of several dialects are sane."""

from __future__ import annotations

import json
import math
import random
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer
from llmopt.bench.load.address import Address
from llmopt.bench.quality.passage import EVALUATION_TEXT
from llmopt.bench.session.sanity import Outcome, SanityReport, check_sanity, repeats_from_start
from llmopt.cli.bench import bench
from llmopt.cli.main import run_guarded
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest
from llmopt.recipes import MODELS

from ...support.live_server import make_engine, running

WORDS = re.compile(r"\s*\S+")


class WordModel:
    """A language model of the bundled stories by the two words before; `shuffled` permutes its vocabulary,
    as logits in the wrong order do."""

    def __init__(self, shuffled: bool = False) -> None:
        tokens = WORDS.findall(EVALUATION_TEXT.read_text(encoding="utf-8"))
        self._after: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
        for index in range(2, len(tokens)):
            for length in (0, 1, 2):
                self._after[tuple(tokens[index - length : index])][tokens[index]] += 1
        vocabulary = sorted(self._after[()])
        other = random.Random(0).sample(vocabulary, len(vocabulary))
        self._shown = dict(zip(vocabulary, other if shuffled else vocabulary, strict=True))
        self._hidden = {shown: token for token, shown in self._shown.items()}

    def logprob(self, before: list[str], token: str) -> float:
        token = self._hidden.get(token, token)
        share = 1e-5
        for length in (0, 1, 2):
            counts = self._after.get(tuple(before[len(before) - length :]))
            if counts:
                share = 0.2 * share + 0.8 * counts[token] / counts.total()
        return math.log(share)

    def next(self, before: list[str], chooser: random.Random | None = None) -> str:
        keys = (tuple(before[-2:]), tuple(before[-1:]), ())
        counts = next(self._after[key] for key in keys if key in self._after)
        ranked = counts.most_common(8 if chooser else 1)
        return self._shown[chooser.choice(ranked)[0] if chooser else ranked[0][0]]


class Dialect:
    """Answers of a server: `vllm` echoes log-probabilities, `llama.cpp` has no echo and another form."""

    def __init__(self, name: str = "vllm", fault: str = "") -> None:
        self.name, self.fault = name, fault
        self.model = WordModel(shuffled=fault == "shuffled")
        self.chooser = random.Random(1) if fault == "random" else None
        self.is_over = threading.Event()

    def continued(self, prompt: str, count: int) -> list[str]:
        if self.fault == "exclamation":
            return ["!"] * count
        tokens = WORDS.findall(prompt)
        for _ in range(400 if self.fault == "endless" else count):
            tokens.append(self.model.next(tokens, self.chooser))
        return tokens[len(WORDS.findall(prompt)) :]

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.fault == "silent":
            self.is_over.wait()
        limit = body["max_tokens"]
        if path.endswith("/chat/completions"):
            return self._chat(body, limit)
        new = self.continued(body["prompt"], limit)
        prompt = WORDS.findall(body["prompt"])
        tokens, echoes = [*prompt, *new], body.get("echo") and self.name == "vllm"
        values: list[float | None] = [
            self.model.logprob(tokens[:at], token) for at, token in enumerate(tokens)
        ]
        if self.fault == "nan":
            values[5] = values[-1] = math.nan
            values[-2] = None
        first = 0 if echoes else len(prompt)
        logprobs: dict[str, Any] = {"token_logprobs": ([None, *values[1:]])[first:]}
        if self.name == "llama.cpp":
            content = zip(new, values[len(prompt) :], strict=True)
            logprobs = {"content": [{"token": t, "logprob": value} for t, value in content]}
        text = "".join(tokens if echoes else new)
        choice = {"text": text, "logprobs": logprobs, "finish_reason": "length"}
        return 200, {"choices": [choice], "usage": {"completion_tokens": len(new)}}

    def _chat(self, body: dict[str, Any], limit: int) -> tuple[int, dict[str, Any]]:
        asked = body["messages"][-1]["content"]
        message: dict[str, Any] = {"content": "".join(self.continued(asked, 8))}
        if body.get("response_format"):
            long = (
                ", ".join(f'"fact {n}": "so"' for n in range(100))
                if "verbose" in self.fault
                else '"x": 1'
            )
            message["content"] = '{"city": "Paris", ' + long + "}"
        elif body.get("tools") and self.name == "llama.cpp":
            return 500, {"error": {"message": "tools param requires --jinja flag"}}
        elif body.get("tools"):
            arguments = '{"city": "Paris", "unit": "celsius"}'
            function = {"name": "get_weather", "arguments": arguments}
            message = {"content": None, "tool_calls": [{"type": "function", "function": function}]}
        spoken = WORDS.findall(message["content"] or "")
        message["content"], usage = (
            "".join(spoken[:limit]),
            {"completion_tokens": min(len(spoken), limit)},
        )
        finish = (
            "length" if len(spoken) > limit and self.fault != "verbose without reason" else "stop"
        )
        return 200, {"choices": [{"message": message, "finish_reason": finish}], "usage": usage}


@contextmanager
def served(dialect: Dialect) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": "stand-in"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(*dialect.answer(self.path, body))

        def _send(self, status: int, value: dict[str, Any]) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        dialect.is_over.set()
        server.shutdown()
        server.server_close()


def outcomes(report: SanityReport) -> dict[str, Outcome]:
    return {check.name: check.outcome for check in report.checks}


def report_of(dialect: Dialect, timeout: float = 60.0) -> SanityReport:
    with served(dialect) as url:
        return check_sanity(Address.parse(url), timeout=timeout)


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("exclamation", "text"),
        ("nan", "log-probabilities"),
        ("shuffled", "perplexity"),
        ("random", "same at temperature 0"),
        ("endless", "length"),
        ("silent", "text"),
    ],
)
@pytest.mark.parametrize("dialect", ["vllm", "llama.cpp"])
def test_planted_faults_are_broken(fault: str, check: str, dialect: str) -> None:
    report = report_of(Dialect(dialect, fault), timeout=0.2 if fault == "silent" else 60.0)
    assert not report.is_sane
    # Without log-probabilities of prompts the text tells.
    other = {"perplexity": "text", "log-probabilities": "log-probabilities of new tokens"}
    name = check if dialect == "vllm" else other.get(check, check)
    assert outcomes(report)[name] is Outcome.BROKEN, report


@pytest.mark.parametrize("dialect", ["vllm", "llama.cpp"])
def test_sound_dialects_are_sane(dialect: str) -> None:
    report = report_of(Dialect(dialect))
    assert report.is_sane, report
    found = outcomes(report)
    for name in ("text", "length", "same at temperature 0", "JSON mode"):
        assert found[name] is Outcome.SANE, report
    is_asked = dialect == "vllm"
    assert (found["log-probabilities"] is Outcome.SANE) == is_asked
    assert (found["tool call"] is Outcome.SANE) == is_asked
    assert (found["tool call"] is Outcome.NOT_ASKED) != is_asked


@pytest.mark.parametrize("fault", ["verbose", "verbose without reason"])
def test_a_verbose_answer_is_given_the_tokens_that_it_needs(fault: str) -> None:
    report = report_of(Dialect(fault=fault))
    assert outcomes(report)["JSON mode"] is Outcome.SANE, report


@pytest.mark.parametrize("model", ["stories260K", "stories3M", "quantized"])
def test_our_server_is_sane_with_small_models(model: str, tmp_path: Path) -> None:
    if model == "quantized":
        model = str(tmp_path / "int8")
        quantize(QuantizeRequest(MODELS / "stories260K", Path(model), method="rtn", group_size=4))
    with running(make_engine(model)) as server:
        report = check_sanity(Address.parse(server.url))
    assert report.is_sane, report
    assert outcomes(report)["perplexity"] is Outcome.SANE


def test_units_that_repeat_from_the_start() -> None:
    assert repeats_from_start("!!!!!!!!") and repeats_from_start(" the the the the the")
    assert not repeats_from_start("She was so so so so so happy") and not repeats_from_start("!")


def llmopt(*words: str | Path) -> int:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(bench)
    return run_guarded(lambda: app(list(map(str, words)), standalone_mode=False), debug=False)


def test_the_command_ends_by_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    with served(Dialect()) as url:
        assert llmopt("--sanity", url, "--json") == 0
        record = json.loads(capsys.readouterr().out)
        assert record["sane"] and record["model"] == "stand-in" and record["url"] == url
        assert llmopt("--sanity", url, "--base-url", url) == 2
    assert llmopt("--sanity", url) == 2
    with served(Dialect(fault="exclamation")) as url:
        assert llmopt("--sanity", url) == 1
    assert "repeat one unit" in " ".join(capsys.readouterr().out.split())

"""A stand-in for an inference server, as a process: `python fake_server.py --port N [flags]`.

It streams the tokens that were asked for, counts them in vLLM's metrics, answers embeddings and rerank
requests, and fails in the ways that its flags say. `--max-num-seqs` slows every token down.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class State:
    """What the flags say, and what was served; `seen` holds the bodies of all requests."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.lock = threading.Lock()
        self.tokens = self.requests = 0
        self.seen: list[dict[str, Any]] = []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: State

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(200, b"")
        elif self.path == "/v1/models":
            self._json({"data": [{"id": "served", "max_model_len": 256}]})
        elif self.path == "/metrics" and not self.state.options.no_metrics:
            text = (
                "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 1\n"
                "# TYPE vllm:generation_tokens_total counter\n"
                f"vllm:generation_tokens_total {self.state.tokens}\n"
            )
            self._send(200, text.encode(), "text/plain")
        else:
            self._send(404, b"")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.state.lock:
            self.state.requests += 1
            self.state.seen.append(body)
        if self.state.requests > self.state.options.die_after:
            os._exit(9)
        if self.state.options.refuse:
            self._json({"error": {"message": "refused"}}, 400)
        elif self.path == "/v1/completions":
            self._generate(len(body["prompt"]), body["max_tokens"], {"text": " a"})
        elif self.path == "/v1/chat/completions":
            said = {"delta": {"content": " a"}}
            self._generate(len(body["messages"]), body["max_completion_tokens"], said)
        elif self.path == "/v1/embeddings":
            inputs = body["input"] if isinstance(body["input"][0], list) else [body["input"]]
            data = [{"index": n, "embedding": [0.5, 0.5]} for n, _ in enumerate(inputs)]
            self._json({"data": data, "usage": {"prompt_tokens": sum(map(len, inputs))}})
        elif self.path == "/v1/rerank":
            scores = [{"index": n, "relevance_score": 0.5} for n, _ in enumerate(body["documents"])]
            self._json({"results": scores, "usage": {"total_tokens": 10}})
        else:
            self._send(404, b"")

    def _generate(self, prompt_tokens: int, max_tokens: int, said: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number in range(1, max_tokens + 1):
            time.sleep(self.state.options.max_num_seqs / 1000)
            reason = "length" if number == max_tokens else None
            usage = {"prompt_tokens": prompt_tokens, "completion_tokens": number}
            event = {"choices": [{**said, "finish_reason": reason}], "usage": usage}
            self._chunk(f"data: {json.dumps(event)}\n\n".encode())
            with self.state.lock:
                self.state.tokens += 1
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def make_server(words: list[str]) -> ThreadingHTTPServer:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--max-num-seqs", type=int, default=1)
    parser.add_argument("--die-after", type=int, default=10**9)
    for flag in ("--crash", "--refuse", "--no-metrics"):
        parser.add_argument(flag, action="store_true")
    options = parser.parse_args(words)
    if options.crash:
        sys.exit("no such device")
    handler = type("Bound", (Handler,), {"state": State(options)})
    server = ThreadingHTTPServer(("127.0.0.1", options.port), handler)
    server.daemon_threads = True
    return server


if __name__ == "__main__":
    make_server(sys.argv[1:]).serve_forever()

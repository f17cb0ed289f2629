"""Processor time of a server for a streamed token: `python -m tools.front --streams 64 256`.

It makes a model that costs next to nothing (one layer of width 64), starts `llmopt serve-local` with it, and
reads so many streams at once from this process, whose time does not count. Counted is the user and system
time of all of the server's processes, from before the first request until after the last event, over the
number of tokens: so engine, detokenizing, HTTP and the requests themselves. The times between events
are those that the client sees. Before that one stream at a time is asked for, whose time to the first
token is compared with the engine's own, which the server says in its usage. Each model computes with one
thread: those of a pool would wait for each other in a loop, and that counts.

`--peer vllm=PYTHON` and `--peer llama.cpp=PYTHON` run their servers in the same way, with an interpreter that
has `vllm` or `xllamacpp`.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llmopt.bench.machine.environment import commit, machine_name

CONTEXT, PROMPT = 512, 16
MAX_SEQS = 256
KEPT = 8192
WIDTH, VOCAB, FIRST_TEXT = 64, 512, 259
START_SECONDS = 300.0
TICK = os.sysconf("SC_CLK_TCK")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
LLAMACPP = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
params.n_parallel, params.n_ctx, params.cpuparams.n_threads = count, count * int(sys.argv[4]), 1
params.kv_unified = False
server = xllamacpp.Server(params)
print("ready", flush=True)
time.sleep(1e6)
"""


def save_trivial_model(folder: Path) -> None:
    """A random model of one layer, with the tokenizer of a bundled one."""
    import torch
    from llmopt.recipes import MODELS
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    width = WIDTH
    names = [f"self_attn.{name}_proj" for name in "qkvo"]
    names += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    layer = "model.layers.0"
    shapes = {f"{layer}.{name}.weight": (width, width) for name in names}
    shapes["model.embed_tokens.weight"] = (VOCAB, width)
    tensors = {name: torch.randn(shape, generator=generator) / 8 for name, shape in shapes.items()}
    # With logits of zero no greedy choice falls on a control token or on a single byte: all are text.
    tensors["model.embed_tokens.weight"][:FIRST_TEXT] = 0.0
    for name in (f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm", "model.norm"):
        tensors[f"{name}.weight"] = torch.ones(width)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    for source in (MODELS / "stories3M").glob("*token*"):
        (folder / source.name).write_bytes(source.read_bytes())


@dataclass
class Stream:
    """One request over a connection of its own, when its events came, and the first of its bytes."""

    connection: socket.socket
    began: float = 0.0
    times: list[float] = field(default_factory=list)
    tail: bytes = b""
    head: bytes = b""

    def take(self, data: bytes, now: float) -> bool:
        """Note the events in the bytes that came; whether the last one is among them."""
        if len(self.head) < KEPT:
            self.head += data
        joined = self.tail + data
        count = joined.count(b"data: {")
        self.times += [now] * count
        is_last = b"data: [DONE]" in joined
        self.tail = joined if is_last else joined[joined.rfind(b"\n") + 1 :]
        return is_last


class Client:
    """Reads many streams at once, with one system call a read and no parsing."""

    def __init__(self, port: int) -> None:
        self._port = port

    def read(self, count: int, num_tokens: int, *, usage: bool = False) -> list[Stream]:
        """So many streams of that many tokens, all asked for at once."""
        body: dict[str, Any] = {
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        if usage:
            body["stream_options"] = {"include_usage": True}
        selector, streams = selectors.DefaultSelector(), []
        for index in range(count):
            connection = socket.create_connection(("127.0.0.1", self._port))
            streams.append(Stream(connection))
            selector.register(connection, selectors.EVENT_READ, streams[-1])
            streams[-1].tail = json.dumps(
                {
                    **body,
                    "prompt": [
                        FIRST_TEXT + (index * 7 + place) % (VOCAB - FIRST_TEXT)
                        for place in range(PROMPT)
                    ],
                }
            ).encode()
        for stream in streams:
            body_bytes, stream.tail = stream.tail, b""
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            head += f"Content-Length: {len(body_bytes)}\r\n\r\n"
            stream.began = time.perf_counter()
            stream.connection.sendall(head.encode() + body_bytes)
        left = count
        while left:
            for key, _ in selector.select(60):
                data = key.data.connection.recv(65536)
                now = time.perf_counter()
                if not data:
                    raise RuntimeError(f"a stream ended early: {key.data.tail!r}")
                if key.data.take(data, now):
                    selector.unregister(key.data.connection)
                    key.data.connection.close()
                    left -= 1
        selector.close()
        return streams


def processor_seconds(session: int) -> float:
    """User and system time of the processes of a session, threads and ended children included."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(words[3]) == session:
            total += sum(map(int, words[11:15]))
    return total / TICK


def percentile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def measure(pid: int, client: Client, count: int, num_tokens: int) -> dict[str, float]:
    """Processor time a token, and the times between events, of so many streams at once."""
    before, began = processor_seconds(pid), time.perf_counter()
    streams = client.read(count, num_tokens)
    seconds, used = time.perf_counter() - began, processor_seconds(pid) - before
    tokens = count * num_tokens
    gaps = [b - a for one in streams for a, b in zip(one.times, one.times[1:], strict=False)]
    return {
        "streams": count,
        "events": sum(len(stream.times) for stream in streams),
        "processor_us_per_token": 1e6 * used / tokens,
        "tokens_per_second": tokens / seconds,
        "itl_p50_ms": 1e3 * percentile(gaps, 0.5),
        "itl_p99_ms": 1e3 * percentile(gaps, 0.99),
    }


def first_tokens(client: Client, count: int) -> dict[str, float]:
    """The time to a first token on an idle server, less the engine's own, of one stream after another."""
    over: list[float] = []
    for _ in range(count):
        (stream,) = client.read(1, 2, usage=True)
        (line,) = (line for line in stream.head.split(b"\n") if b'"seconds":{' in line)
        seconds = json.loads(line.removeprefix(b"data: "))["usage"]["seconds"]
        over.append(stream.times[0] - stream.began - seconds["queue"] - seconds["prefill"])
    return {
        "first_token_over_engine_p50_ms": 1e3 * statistics.median(over),
        "first_token_over_engine_p90_ms": 1e3 * percentile(over, 0.9),
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def started(command: Sequence[str], port: int, **environment: str) -> Iterator[int]:
    """A server in a session of its own, once it answers; its process id."""
    process = subprocess.Popen(
        command, start_new_session=True, env={**os.environ, **environment},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + START_SECONDS
        while not is_healthy(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start: {' '.join(command)}")
            time.sleep(0.2)
        yield process.pid
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def is_healthy(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 2) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return b" 200 " in connection.recv(64)
    except OSError:
        return False


def own_server(folder: Path, port: int) -> list[str]:
    words = [sys.executable, "-m", "llmopt", "serve-local", str(folder), "--port", str(port)]
    return [*words, "--max-num-seqs", str(MAX_SEQS), "--kv-cache-memory-bytes", "256MiB"]


def vllm_server(folder: Path, port: int, python: str) -> list[str]:
    words = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    words += ["--port", str(port), "--max-model-len", str(CONTEXT), "--enforce-eager"]
    return [*words, "--max-num-seqs", str(MAX_SEQS), "--disable-uvicorn-access-log"]


def llamacpp_server(folder: Path, port: int, python: str) -> list[str]:
    words = [sys.executable, "-m", "llmopt", "quantize", str(folder), "--method", "rtn"]
    words += ["--gguf-type", "Q8_0", "--output", str(folder / "gguf")]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    (file,) = (folder / "gguf").glob("*.gguf")
    return [python, "-c", LLAMACPP, str(file), str(port), str(MAX_SEQS), str(CONTEXT)]


PEERS: dict[str, Callable[[Path, int, str], list[str]]] = {
    "vllm": vllm_server,
    "llama.cpp": llamacpp_server,
}


def measured(
    name: str, command: Sequence[str], folder: Path, port: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row for each number of streams; the median of the rounds."""
    rows: list[dict[str, Any]] = []
    with started(command, port, OMP_NUM_THREADS="1", VLLM_CPU_KVCACHE_SPACE="1") as pid:
        client = Client(port)
        client.read(8, 32)
        first = first_tokens(client, 50) if name == "llmopt" else {}
        for count in options.streams:
            rounds = [measure(pid, client, count, options.tokens) for _ in range(options.rounds)]
            row = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
            rows.append({"server": name, **row, **first})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--tokens", type=int, default=400, help="Of each stream.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        save_trivial_model(folder)
        rows = measured("llmopt", own_server(folder, port), folder, port, options)
        for peer in options.peer:
            kind, _, python = peer.partition("=")
            port = free_port()
            rows += measured(kind, PEERS[kind](folder, port, python), folder, port, options)
    record = {
        "machine": machine_name("cpu"),
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "tokens": options.tokens,
        "rows": rows,
    }
    if options.output is not None:
        options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Record what other servers send, as files for tests/strangers/test_streams.py.

    python -m tools.record_streams FOLDER [ENVIRONMENTS]

LiteLLM and llama.cpp are installed from the index, each into ENVIRONMENTS/NAME, and skipped by name if they
cannot be. LiteLLM stands in front of `llmopt serve-local` and of an upstream that fails.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmopt.recipes import MODELS

MODEL, KEY, START_SECONDS = "stories3M", f"sk-{secrets.token_hex(16)}", 120.0
HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
PACKAGES = {"litellm": "litellm[proxy]", "llama.cpp": "xllamacpp", "transformers": ""}
COMMON = {"model": MODEL, "max_tokens": 12, "temperature": 0}
STREAM = COMMON | {"stream": True, "stream_options": {"include_usage": True}}
DOCUMENT = COMMON | {"messages": [{"role": "user", "content": "Once upon a time"}]}
CHAT, TEXT = DOCUMENT | STREAM, STREAM | {"prompt": "Once upon a time"}
# Requests; LiteLLM's models are its upstreams.
RECORDINGS: dict[str, dict[str, Any]] = {
    "litellm-chat": CHAT,
    "litellm-chat-document": DOCUMENT,
    "litellm-completion": TEXT,
    "litellm-upstream-500": CHAT | {"model": "fails"},
    "litellm-upstream-breaks": CHAT | {"model": "breaks"},
    "llama.cpp-chat": CHAT,
    "llama.cpp-chat-document": DOCUMENT,
    "llama.cpp-chat-two-choices": CHAT | {"n": 2, "max_tokens": 8},
    "llama.cpp-completion": TEXT,
    "llama.cpp-long-prompt": TEXT | {"prompt": "Once upon a time " * 100},
    "transformers-chat": CHAT,
}
LLAMA = """import sys, time, xllamacpp
p = xllamacpp.CommonParams()
p.model.path, p.port, p.hostnames = sys.argv[1], int(sys.argv[2]), ["127.0.0.1"]
p.model_alias, p.n_ctx, p.n_parallel = ["stories3M"], 512, 2
server, _ = xllamacpp.Server(p), time.sleep(3600)
"""
FAILS = b'500 -\r\nContent-Type: application/json\r\n\r\n{"error": {"message": "out of memory"}}'
EVENT = b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "Once"}}]}\n\n'
BREAKS = b"200 -\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
BREAKS += b"%x\r\n%s\r\n" % (len(EVENT), EVENT)


def fail(listener: socket.socket) -> None:
    """Answer 500, or break the connection after a chunk of a stream."""
    while True:
        connection, _ = listener.accept()
        with connection:
            fails = connection.recv(1 << 16).startswith(b"POST /fails")
            connection.sendall(b"HTTP/1.1 " + (FAILS if fails else BREAKS))
            time.sleep(0.1)


@contextlib.contextmanager
def running(folder: Path, *command: str | Path) -> Iterator[str]:
    """Host and port of a server, from when it answers; its port ends the command."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    process = subprocess.Popen([*command, str(port)], cwd=folder)
    deadline = time.monotonic() + START_SECONDS
    try:
        while socket.socket().connect_ex(("127.0.0.1", port)):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} does not answer")
            time.sleep(0.2)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def serving(name: str, python: Path, folder: Path) -> Iterator[str]:
    """Host and port of the server called `name`, by its environment's Python; it runs in `folder`."""
    model = shutil.copytree(MODELS / MODEL, folder / MODEL)
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    ours, host = (sys.executable, "-m", "llmopt"), ("--host", "127.0.0.1", "--port")
    with contextlib.ExitStack() as stack:
        command = [python.parent / "transformers", "serve", "--device", "cpu", *host]
        if name == "llama.cpp":
            form = ("--format", "gguf", "--gguf-type", "Q8_0", "--output", folder / "gguf")
            subprocess.run([*ours, "quantize", model, *form], check=True)
            command = [python, "-c", LLAMA, *(folder / "gguf").glob("*.gguf")]
        if name == "litellm":
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            threading.Thread(target=fail, args=(listener,), daemon=True).start()
            bad = "127.0.0.1:{1}".format(*listener.getsockname())
            good = stack.enter_context(running(folder, *ours, "serve-local", model, "--port"))
            bases = {MODEL: f"{good}/v1", "fails": f"{bad}/fails", "breaks": bad}
            upstream = {"model": f"openai/{MODEL}", "api_key": "-"}
            config: dict[str, Any] = {"model_list": [], "general_settings": {"master_key": KEY}}
            for model_name, base in bases.items():
                parameters = upstream | {"api_base": f"http://{base}"}
                config["model_list"] += [{"model_name": model_name, "litellm_params": parameters}]
            (folder / "config.yaml").write_text(json.dumps(config))
            command = [python.parent / name, "--config", "config.yaml", *host]
        yield stack.enter_context(running(folder, *command))


def record(address: str, body: dict[str, Any]) -> dict[str, Any]:
    """The response to a request, with a read for each chunk of its body."""
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    connection, begun = http.client.HTTPConnection(address, timeout=60), time.perf_counter()
    connection.request("POST", path, json.dumps(body), HEADERS)
    response, reads = connection.getresponse(), []
    while data := response.read1(1 << 16):
        reads += [[time.perf_counter() - begun, data.decode(errors="surrogateescape")]]
    head = {"status": response.status, "headers": dict(response.getheaders())}
    return {"path": path, "request": body, **head, "reads": reads}


def main(folder: str, environments: str = "build/tools") -> None:
    """Record every response of the servers that can be had."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, package in PACKAGES.items():
        environment = Path(environments, name).resolve() if package else Path(sys.prefix)
        python = environment / "bin" / "python"
        try:
            if package:
                subprocess.run([sys.executable, "-m", "venv", environment], check=True)
                subprocess.run([python, "-m", "pip", "install", "-q", package], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"skipped {name}: {error}")
            continue
        with tempfile.TemporaryDirectory() as scratch, serving(name, python, Path(scratch)) as url:
            for file in [file for file in RECORDINGS if file.startswith(name)]:
                while (response := record(url, RECORDINGS[file]))["status"] == 503:
                    time.sleep(0.2)  # llama.cpp loads the model
                Path(folder, f"{file}.json").write_text(json.dumps(response, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Public clients against `serve-local`, streaming and not.

    python tools/clients/run.py --npm FOLDER --langchain ENV/bin/python --guidellm ENV/bin/guidellm

FOLDER is where `npm install openai` was run; LangChain and the load clients live in environments of their
own (`pip install langchain-openai`, `guidellm`, `aiperf`). The official Python client and curl are always
tried. A client whose path is not given is skipped with a message. Exit code 1 if one fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import external_clients  # noqa: E402  the load clients, as the script beside this folder runs them
from llmopt.recipes import DEFAULT_MODEL  # noqa: E402

Checks = list[dict[str, Any]]


def script(command: list[str]) -> Checks:
    """Output of a client's script, a JSON line for each check."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    checks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        checks.append({"check": "failed", "words": done.stderr[-2000:]})
    return checks


def curl(url: str) -> Checks:
    """curl, whole and as a stream that is not buffered."""
    body: dict[str, Any] = {"model": DEFAULT_MODEL, "prompt": "Once upon a time", "max_tokens": 8}
    body["temperature"] = 0

    def ask(path: str, sent: dict[str, Any]) -> str:
        command = ["curl", "--noproxy", "*", "-sSN", f"{url}{path}", "--json", json.dumps(sent)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=True
        ).stdout

    whole = json.loads(ask("/v1/completions", body))["choices"][0]["text"]
    lines = [line for line in ask("/v1/completions", {**body, "stream": True}).split("\n") if line]
    parts = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines[:-1]]
    if "".join(parts) != whole or lines[-1] != "data: [DONE]":
        return [{"check": "failed", "words": f"{whole!r} whole, {parts!r} streamed"}]
    tokens = json.loads(ask("/tokenize", {"prompt": body["prompt"]}))["tokens"]
    return [
        {"check": "completions, whole and streamed", "text": whole, "events": len(lines)},
        {"check": "tokenize", "tokens": tokens},
    ]


def load(client: Callable[..., external_clients.Row], program: str, url: str) -> Checks:
    """A load client, streaming: its counts."""
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        external_clients.write_prompts(prompts)
        row = client(program, url, Path(folder), prompts)
    return [{"check": f"{external_clients.PROMPTS} requests, streamed", **row}]


def version(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else "unknown"


def of_package(python: str, name: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    return version([python, "-c", code])


def clients(asked: argparse.Namespace, url: str) -> dict[str, tuple[str, Callable[[], Checks]]]:
    """Name → (version, function that runs it), of the clients whose paths were given."""
    told = [url, DEFAULT_MODEL]
    found: dict[str, tuple[str, Callable[[], Checks]]] = {
        "openai (Python)": (
            of_package(sys.executable, "openai"),
            lambda: script([sys.executable, str(HERE / "openai_python.py"), *told]),
        ),
        "curl": (version(["curl", "--version"]).split(" ")[1], lambda: curl(url)),
    }
    if asked.npm:
        package = json.loads((asked.npm / "node_modules/openai/package.json").read_text())
        command = ["node", str(HERE / "openai_npm.mjs"), *told, str(asked.npm)]
        found["openai (npm)"] = (package["version"], lambda: script(command))
    if asked.langchain:
        name = "langchain-openai"
        found[name] = (
            of_package(asked.langchain, name),
            lambda: script([asked.langchain, str(HERE / "langchain_chat.py"), *told]),
        )
    for name, run in (("guidellm", external_clients.guidellm), ("aiperf", external_clients.aiperf)):
        if program := getattr(asked, name):
            python = str(Path(program).with_name("python"))
            found[name] = (
                of_package(python, name),
                lambda run=run, program=program: load(run, program, url),
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--npm", type=Path, help="folder with node_modules/openai")
    parser.add_argument("--langchain", help="a Python that has langchain-openai")
    parser.add_argument("--guidellm", help="the guidellm program")
    parser.add_argument("--aiperf", help="the aiperf program")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    serve = [
        sys.executable, "-c", "from llmopt.cli.main import main; main()", "serve-local",
        "--port", "0", "--json", "--chat-template", str(HERE / "template.jinja"),
    ]  # fmt: skip
    environment = os.environ | external_clients.OFFLINE
    record: dict[str, Any] = {}
    with subprocess.Popen(
        serve, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as server:
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        try:
            for name, (its_version, run) in clients(asked, url).items():
                checks = run()
                record[name] = {"version": its_version, "checks": checks}
                for one in checks:
                    print(
                        f"{name} {its_version}: {json.dumps(one, ensure_ascii=False)}", flush=True
                    )
        finally:
            server.terminate()
    for name in ("npm", "langchain", "guidellm", "aiperf"):
        if not getattr(asked, name):
            print(f"not tried: {name}")
    if asked.json:
        asked.json.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    failed = [
        name for name, one in record.items() if any(c["check"] == "failed" for c in one["checks"])
    ]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()

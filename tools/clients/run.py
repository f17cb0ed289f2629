"""Public clients against `serve-local`, whole and streamed, with tools, in environments of their own.

    python tools/clients/run.py --environments FOLDER [--model MODEL …] [--clients NAME …] [--json FILE]

Makes a virtual environment (or an npm folder) in FOLDER for each client and installs it from its registry;
one that is there is used as it is. Then a server is started for each model, and every client's script is run
against it. The server's `--scripted-output` lets the model call a tool where it is asked to, and answer after
the result, because small models will not. aider is left out where the context is too short for its prompt.
Exit code 1 if a check fails. `agents.py` does the same for Claude Code and Codex CLI.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmopt.quant.models import resolve_model
from llmopt.recipes import DEFAULT_MODEL

HERE = Path(__file__).parent
LIMIT_SECONDS = 600
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "ANONYMIZED_TELEMETRY": "False",
}
SCRIPT = [
    {
        "after": "Use the weather tool.",
        "text": '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>',
    },
    {"after": "dry in Köln", "text": "It is dry in Köln."},
    {
        "after": "Write the agreed greeting",
        "text": "greeting.txt\n```\nHello from the server.\n```\n",
    },
]
Checks = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Client:
    """A client's script, and its environment with the packages in it; the first names the version.

    Attributes:
        context: tokens that its prompts need.
    """

    script: str
    environment: str
    packages: tuple[str, ...]
    context: int = 512

    @property
    def is_npm(self) -> bool:
        return self.environment == "npm"

    def prepare(self, environments: Path) -> Path:
        """The folder of its environment, which is made if it is not there."""
        folder = environments / f"clients-{self.environment}"
        if folder.is_dir():
            return folder
        if self.is_npm:
            every = [p for one in CLIENTS.values() if one.is_npm for p in one.packages]
            commands = [
                ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *every]
            ]
        else:
            commands = [
                [sys.executable, "-m", "venv", str(folder)],
                [str(folder / "bin" / "pip"), "install", "-q", *self.packages],
            ]
        for command in commands:
            subprocess.run(command, check=True, env=_environment())
        return folder

    def version(self, folder: Path) -> str:
        name = self.packages[0]
        if self.is_npm:
            path = folder / "node_modules" / name / "package.json"
            return str(json.loads(path.read_text())["version"])
        code = f"import importlib.metadata as m; print(m.version({name!r}))"
        command = [str(folder / "bin" / "python"), "-c", code]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def check(self, folder: Path, url: str, model: str) -> Checks:
        """What its script printed, a JSON line for each check."""
        command = [str(folder / "bin" / "python"), str(HERE / self.script), url, model]
        if self.is_npm:
            command = ["node", str(HERE / self.script), url, model, str(folder)]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=LIMIT_SECONDS,
                env=_environment() | OFFLINE,
            )
        except subprocess.TimeoutExpired:
            return [{"check": "failed", "words": f"no end after {LIMIT_SECONDS} s"}]
        checks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not checks:
            checks.append({"check": "failed", "words": done.stderr[-2000:]})
        return checks


SDK = ("openai", "anthropic", "httpx", "pydantic")
CLIENTS = {
    "openai": Client("openai_python.py", "sdk", SDK),
    "anthropic": Client("anthropic_python.py", "sdk", ("anthropic", *SDK)),
    "ollama": Client("ollama_python.py", "ollama", ("ollama",)),
    "openai-npm": Client("openai_npm.mjs", "npm", ("openai",)),
    "anthropic-npm": Client("anthropic_npm.mjs", "npm", ("@anthropic-ai/sdk",)),
    "langchain": Client(
        "langchain_chat.py",
        "langchain",
        ("langchain-openai", "langchain-anthropic", "langchain-ollama"),
    ),
    "llamaindex": Client(
        "llamaindex_chat.py",
        "llamaindex",
        ("llama-index-llms-openai-like", "llama-index-llms-ollama"),
    ),
    "litellm": Client("litellm_chat.py", "litellm", ("litellm", "mcp")),
    "aider": Client("aider_edit.py", "aider", ("aider-chat",), context=4096),
}


def _environment() -> dict[str, str]:
    """This one's variables without those that show a client the packages of this project."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@contextmanager
def serving(model: str) -> Iterator[tuple[str, str]]:
    """URL and served name of a server of the model."""
    folder = resolve_model(model)
    own = folder / "chat_template.jinja"
    is_chatml = own.is_file() and "<|im_start|>" in own.read_text()
    template = HERE / ("chatml.jinja" if is_chatml else "template.jinja")
    with tempfile.TemporaryDirectory() as work:
        script = Path(work) / "script.json"
        script.write_text(json.dumps(SCRIPT))
        command = [
            sys.executable, "-m", "llmopt.cli.main", "serve-local", model, "--port", "0", "--json",
            "--dtype", "float32", "--chat-template", str(template), "--tool-call-parser", "hermes",
            "--scripted-output", str(script),
        ]  # fmt: skip
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ | OFFLINE
        ) as server:
            assert server.stdout is not None
            ready = json.loads(server.stdout.readline())
            try:
                yield ready["url"], ready["model"]
            finally:
                server.terminate()


def context_of(url: str, model: str) -> int:
    """The context length of a served model."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{url}/v1/models/{model}") as answer:
        return int(json.load(answer)["max_model_len"])


def checked(name: str, environments: Path, url: str, model: str) -> dict[str, Any]:
    """One client against one server: its version and checks, which are printed."""
    client = CLIENTS[name]
    if context_of(url, model) < client.context:
        print(f"{model}, {name}: left out, its prompts need {client.context} tokens")
        return {}
    folder = client.prepare(environments)
    version = client.version(folder)
    checks = client.check(folder, url, model)
    for check in checks:
        print(f"{model}, {name} {version}: {json.dumps(check, ensure_ascii=False)}", flush=True)
    return {"version": version, "checks": checks}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--environments", type=Path, required=True, help="where clients are installed"
    )
    parser.add_argument("--model", action="append", help=f"repeatable; default: {DEFAULT_MODEL}")
    parser.add_argument("--clients", nargs="+", choices=CLIENTS, default=[*CLIENTS])
    parser.add_argument(
        "--json", type=Path, help="the record; models and clients not run now are kept"
    )
    asked = parser.parse_args()
    is_kept = asked.json is not None and asked.json.is_file()
    record: dict[str, Any] = json.loads(asked.json.read_text()) if is_kept else {}
    failed: list[str] = []
    for given in asked.model or [DEFAULT_MODEL]:
        with serving(given) as (url, model):
            for name in asked.clients:
                row = checked(name, asked.environments.resolve(), url, model)
                if any(check["check"] == "failed" for check in row.get("checks", ())):
                    failed.append(f"{name} on {model}")
                if row:
                    record.setdefault(model, {})[name] = row
    if asked.json is not None:
        asked.json.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()

"""The clients by name: how each is installed, pointed at the server and started, with its defaults else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .python_clients import CLIENTS as PYTHON_CLIENTS
from .python_clients import task

KINDS = ("tool", "image", "pdf", "search", "cut", "long")
CUT_NAME = "cut_off"
CUT_CALL = f'<tool_call>{{"name": "{CUT_NAME}", "arguments": {{"key": "a'
HERE = Path(__file__).parent
COMMAND = "echo RESULT-$((7000 + 731))"
PYTHON_PACKAGES = {
    "openai-responses": "openai",
    "pydantic-ai": "pydantic-ai-slim[openai]",
}
"""Where the package's name is not the client's."""

Call = tuple[str, Mapping[str, Any]]


def final(kind: str) -> str:
    """The last answer of a turn."""
    return f"FINAL-{kind}"


def filled(text: str, words: Mapping[str, str]) -> str:
    for name, value in words.items():
        text = text.replace(name, value)
    return text


@dataclass(frozen=True, slots=True)
class Client:
    """A client.

    Attributes:
        package: its name in the registry, of PyPI or of npm.
        command: the arguments of a turn, with {prompt}, {url}, {kind} and {home}; `{node}` is npm's folder.
        attached: further arguments of a kind, at {attached}.
        environment, files: that point it at the server, with {url}; paths are relative to its home.
        calls: the tool and arguments with which the script answers a kind first.
        more: further entries of the script.
        is_agent: an agent has tools of its own, and meets the cut-off call as its model's output.
        none: kinds that the client has no way to send, and why.
    """

    name: str
    package: str
    command: Sequence[str]
    attached: Mapping[str, Sequence[str]] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    calls: Mapping[str, Call] = field(default_factory=dict)
    more: Sequence[tuple[str, str]] = ()
    is_agent: bool = False
    is_npm: bool = True
    none: Mapping[str, str] = field(default_factory=dict)

    def arguments(self, kind: str, places: Mapping[str, str]) -> list[str]:
        """The command of a turn."""
        attached = self.attached.get(kind, ())
        words = {**places, "{kind}": kind, "{prompt}": task(self.name, kind)}
        words["{attached}"] = " ".join(attached)
        made: list[str] = []
        for part in self.command:
            if part == "{attached}":
                made += attached
            else:
                made.append(filled(part, words))
        return made


def _python_client(name: str) -> Client:
    none: dict[str, str] = {}
    if name == "ollama":
        none = {
            "pdf": "no field for it",
            "search": "a service of its vendor",
            "cut": "arguments are objects",
        }
    if name in ("pydantic-ai", "instructor"):
        none = {"search": "no such tool for chats"}
    if name == "langchain-openai":
        none = {"cut": "fails in the client, which parses them"}
    script = str(HERE / "python_clients.py")
    return Client(
        name,
        PYTHON_PACKAGES.get(name, name),
        ("{python}", script, name, "{kind}", "{url}"),
        calls={"tool": ("lookup", {"key": "a"})},
        is_npm=False,
        none=none,
    )


_CODEX = """model = "agent"
model_provider = "local"
[model_providers.local]
name = "local"
base_url = "{url}/v1"
wire_api = "responses"
"""
_OPENCODE = json.dumps(
    {
        "provider": {
            "local": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": "{url}/v1", "apiKey": "none"},
                "models": {"agent": {"name": "agent"}},
            }
        }
    }
)

CLIENTS = (
    *(_python_client(name) for name in PYTHON_CLIENTS),
    Client(
        "ai",
        "ai",
        ("node", "{node}/vercel.mjs", "{kind}", "{url}"),
        calls={"tool": ("lookup", {"key": "a"})},
        none={"search": "no such tool for chats"},
    ),
    Client(
        "claude-code",
        "@anthropic-ai/claude-code",
        (
            "{node}/node_modules/.bin/claude",
            "-p",
            "--allowedTools",
            "Bash",
            "Read",
            "WebSearch",
            "--",
            "{prompt}",
        ),
        environment={
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_MODEL": "agent",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "agent",
        },
        calls={
            "tool": ("Bash", {"command": COMMAND, "description": "Say it"}),
            "image": ("Read", {"file_path": "{homes}/claude-code/picture.png"}),
            "pdf": ("Read", {"file_path": "{homes}/claude-code/paper.pdf"}),
            "search": ("WebSearch", {"query": "claude-search-query"}),
        },
        more=(
            ("an image, which this model cannot see", final("image")),
            ("application/pdf, which this server cannot read", final("pdf")),
            ("Perform a web search for the query: claude-search-query", "nothing was found"),
            ("Web search results for query", final("search")),
        ),
        is_agent=True,
    ),
    Client(
        "codex",
        "@openai/codex",
        (
            "{node}/node_modules/.bin/codex",
            "exec",
            "--skip-git-repo-check",
            "{attached}",
            "--",
            "{prompt}",
        ),
        attached={"image": ("-i", "picture.png")},
        files={".codex/config.toml": _CODEX},
        calls={"tool": ("exec_command", {"cmd": COMMAND})},
        is_agent=True,
        none={"pdf": "no way to send one"},
    ),
    Client(
        "opencode",
        "opencode-ai",
        ("{node}/node_modules/.bin/opencode", "run", "-m", "local/agent", "{prompt}", "{attached}"),
        attached={"image": ("-f", "picture.png"), "pdf": ("-f", "paper.pdf")},
        files={".config/opencode/opencode.json": _OPENCODE},
        calls={"tool": ("bash", {"command": COMMAND, "description": "Say it"})},
        is_agent=True,
        none={"search": "a service of its vendor"},
    ),
    Client(
        "qwen-code",
        "@qwen-code/qwen-code",
        ("{node}/node_modules/.bin/qwen", "--yolo", "-p", "{prompt} {attached}"),
        attached={"image": ("@picture.png",), "pdf": ("@paper.pdf",)},
        environment={
            "OPENAI_BASE_URL": "{url}/v1",
            "OPENAI_API_KEY": "none",
            "OPENAI_MODEL": "agent",
        },
        calls={"tool": ("run_shell_command", {"command": COMMAND, "is_background": False})},
        is_agent=True,
        none={"search": "a service of its vendor"},
    ),
)

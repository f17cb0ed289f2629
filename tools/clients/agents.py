"""Claude Code and Codex CLI against `serve-local`, offline, each through a tool call and back.

    npm install --prefix FOLDER @anthropic-ai/claude-code @openai/codex
    python tools/clients/agents.py --npm FOLDER [--output agents.json]

The model is a tiny random Llama with the bundled tokenizer and a context of 131,072 tokens, because these
programs' own prompts are longer than the bundled model's. It cannot choose a tool, so `--scripted-output`
gives its outputs: the call of a shell command after the task, an answer after the command's result. That the
command ran is seen in a file that it writes, and that the result came back in the answer. Neither program
needs its vendor's network with these settings. Exit code 1 if one fails; one that is absent is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmopt.recipes import DEFAULT_MODEL, MODELS

TEMPLATE = Path(__file__).with_name("template.jinja")
TASK = "Please run the agreed command."
RESULT = "forty-two-came-back"
ANSWER = "The command ran, and its result came back."
CONTEXT = 131_072
LIMIT_SECONDS = 300


def tiny_model(folder: Path) -> Path:
    """A random checkpoint of 131,072 tokens of context with the bundled tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(MODELS / DEFAULT_MODEL, trust_remote_code=False)
    tokenizer.model_max_length = CONTEXT
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def script_of(tool: str, arguments: dict[str, Any]) -> list[dict[str, str]]:
    """Outputs for one agent: the call after the task, the answer after the result."""
    call = json.dumps({"name": tool, "arguments": arguments})
    return [
        {"after": TASK, "text": f"<tool_call>\n{call}\n</tool_call>"},
        {"after": RESULT, "text": ANSWER},
    ]


@contextmanager
def serving(work: Path, script: list[dict[str, str]]) -> Iterator[str]:
    """The URL of a server with this script."""
    path = work / "script.json"
    path.write_text(json.dumps(script))
    model = work / "tiny"
    if not model.is_dir():
        tiny_model(model)
    command = [sys.executable, "-m", "llmopt.cli.main", "serve-local", str(model), "--port", "0"]
    command += ["--json", "--served-model-name", "tiny", "--chat-template", str(TEMPLATE)]
    command += ["--scripted-output", str(path), "--num-blocks", "40000", "--log-prompts"]
    with (work / "server.log").open("w") as log, subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=log, text=True
    ) as process:  # fmt: skip
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            sys.exit(f"the server did not start:\n{(work / 'server.log').read_text()[-3000:]}")
        try:
            yield json.loads(line)["url"]
        finally:
            process.terminate()


def claude(program: str, url: str, work: Path) -> str:
    """What Claude Code answers, run once without a terminal."""
    settings = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": "tiny",
        "ANTHROPIC_SMALL_FAST_MODEL": "tiny",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    words = ["-p", TASK, "--output-format", "json", "--allowedTools", "Bash", "--max-turns", "3"]
    done = run([program, *words], work, settings)
    return str(json.loads(done.stdout).get("result"))


def codex(program: str, url: str, work: Path) -> str:
    """What Codex answers, run once without a terminal."""
    home = work / "home" / ".codex"
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.toml").write_text(
        'model = "tiny"\nmodel_provider = "llmopt"\n'
        f'[model_providers.llmopt]\nname = "llmopt"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
    )
    last = work / "last.txt"
    words = ["exec", "--skip-git-repo-check", "--sandbox", "danger-full-access"]
    run(
        [program, *words, "--output-last-message", str(last), TASK], work, {"CODEX_HOME": str(home)}
    )
    return last.read_text()


def run(
    command: list[str], work: Path, settings: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run an agent with a home and a folder of its own."""
    home, folder = work / "home", work / "project"
    for path in (home, folder):
        path.mkdir(exist_ok=True)
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        stdin=subprocess.DEVNULL,
        cwd=folder,
        env={**kept, "HOME": str(home), "NO_PROXY": "127.0.0.1", **settings},
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stderr[-1500:]}")
    return done


Agent = tuple[str, Callable[[str, str, Path], str], Callable[[str], list[dict[str, str]]]]
AGENTS: dict[str, Agent] = {
    "claude": (
        "@anthropic-ai/claude-code",
        claude,
        lambda command: script_of("Bash", {"command": command, "description": "Say it"}),
    ),
    "codex": (
        "@openai/codex",
        codex,
        lambda command: script_of("exec_command", {"cmd": command}),
    ),
}


def tried(name: str, program: str) -> dict[str, Any]:
    """One agent's session: what it asked for, whether the command ran, and what came back."""
    package, ask, script = AGENTS[name]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        proof = work / "proof.txt"
        command = f"echo {RESULT} | tee {proof}"
        version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
        with serving(work, script(command)) as url:
            try:
                answer = ask(program, url, work)
            except (RuntimeError, ValueError, OSError, subprocess.TimeoutExpired) as error:
                answer = f"failed: {error}"
        log = (work / "server.log").read_text()
        paths = re.findall(r'"(?:POST|GET) (/\S+)" (\d+)', log)
        return {
            "agent": package,
            "version": version.strip(),
            "requests": sorted({f"{path.partition('?')[0]} {status}" for path, status in paths}),
            "command_ran": proof.is_file() and RESULT in proof.read_text(),
            "answer": answer.strip(),
            "ok": proof.is_file() and answer.strip() == ANSWER,
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--npm", type=Path, required=True, help="where the agents were installed")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    for name, (package, *_) in AGENTS.items():
        program = shutil.which(name, path=str(options.npm / "node_modules" / ".bin"))
        if program is None:
            print(f"{package} is not installed in {options.npm}: left out")
            continue
        rows.append(tried(name, program))
        print(json.dumps(rows[-1], ensure_ascii=False))
    if options.output is not None:
        options.output.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    sys.exit(0 if rows and all(row["ok"] for row in rows) else 1)


if __name__ == "__main__":
    main()

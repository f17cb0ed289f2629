"""Lets loaders really load checkpoints: a forward pass and two tokens, or the reason why not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.owners import ENVIRONMENT, SCRIPTS

PROMPTS = ((1, 300, 17, 411, 92, 203, 365, 58, 477), (1, 45, 501, 268, 119, 330))
VOCABULARY = 512
BYTES = tuple(range(3, 259))
"""Tokens of the bundled tokenizer that are bytes."""
SECONDS = 240
"""Time without an answer after which a loader is ended."""
DIED = 400
"""Characters of the last lines of a loader that died."""
LOADERS = {
    "transformers": "tf",
    "vllm": "vllm",
    "llama.cpp": "llamacpp",
    "llmopt": "",
}
"""Environment of each loader; llmopt's is this one."""
Task = dict[str, Any]


def task(loader: str, folder: Path) -> Task:
    """The task of a loader; `tests/owners/protocol.py` has its keys."""
    common: Task = {"prompts": PROMPTS, "max_tokens": 2, "top": VOCABULARY, "dtype": "bfloat16"}
    file = next(folder.glob("*.gguf"), None)
    if loader == "vllm" and file is not None:
        return common | {"folder": str(file)}
    if loader == "llama.cpp":
        common["never"] = BYTES
    if loader == "transformers" and file is not None:
        common["gguf_file"] = file.name
    return common | {"folder": str(folder)}


def ask(python: Path, loader: str, tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """Answers of a loader. Where its process dies or hangs, it starts again with the next task."""
    answers: list[dict[str, Any]] = []
    while len(answers) < len(tasks):
        rest = tasks[len(answers) :]
        answers += _ask_once(python, loader, rest)
        print(f"{loader}: {len(answers)} of {len(tasks)}", flush=True)
    return answers


def _ask_once(python: Path, loader: str, tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """Answers up to the first death of the process, its reason included."""
    script = SCRIPTS / f"load_{loader.replace('.', '')}.py"
    with tempfile.TemporaryDirectory() as name:
        given, answered, log = (Path(name) / part for part in ("tasks", "answers", "log"))
        given.write_text(json.dumps(tasks))
        environment = os.environ | ENVIRONMENT
        if loader != "llmopt":
            environment.pop("PYTHONPATH", None)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [str(python), str(script), str(given), str(answered)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
            )
            hung = not _finished(process, answered)
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        answers = json.loads(answered.read_text()) if answered.exists() else []
    if len(answers) < len(tasks):
        reason = f"no answer in {SECONDS} s" if hung else f"it died with {process.returncode}"
        answers.append({"error": f"{reason}: {' '.join(lines[-3:])[-DIED:]}"})
    return answers


def _finished(process: subprocess.Popen[bytes], answered: Path) -> bool:
    """True if the process ended itself; False if it was ended after too long without an answer."""
    since = time.monotonic()
    changed = 0.0
    while process.poll() is None:
        time.sleep(1)
        now = answered.stat().st_mtime if answered.exists() else 0.0
        if now != changed:
            changed, since = now, time.monotonic()
        if time.monotonic() - since > SECONDS:
            process.kill()
            process.wait()
            return False
    return True


def load_all(
    loader: str, environments: Path, folders: Sequence[Path]
) -> Mapping[str, dict[str, Any]]:
    """Answers of a loader by the folder's name. What transformers refuses it tries again dequantized."""
    folder = LOADERS[loader]
    python = environments / folder / "bin" / "python" if folder else Path(sys.executable)
    readable = [f for f in folders if loader != "llama.cpp" or any(f.glob("*.gguf"))]
    answers = ask(python, loader, [task(loader, folder) for folder in readable])
    named = {folder.name: answer for folder, answer in zip(readable, answers, strict=True)}
    if loader == "transformers":
        again = [folder for folder in readable if "error" in named[folder.name] and _packed(folder)]
        tasks = [task(loader, folder) | {"dequantize": True} for folder in again]
        for folder, answer in zip(again, ask(python, loader, tasks), strict=True):
            if "error" not in answer:
                named[folder.name] = answer | {"needs": "CompressedTensorsConfig(dequantize=True)"}
    return named


def _packed(folder: Path) -> bool:
    config = json.loads((folder / "config.json").read_text())
    return config.get("quantization_config", {}).get("quant_method") == "compressed-tensors"

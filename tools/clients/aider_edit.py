"""Check a server with aider, which writes a file: `python aider_edit.py URL MODEL`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import MODEL, URL, tell

TASK = "Write the agreed greeting into greeting.txt."
GREETING = "Hello from the server.\n"


def main() -> None:
    program = Path(sys.executable).with_name("aider")
    for provider, variable, base in (
        ("openai", "OPENAI_API_BASE", f"{URL}/v1"),
        ("anthropic", "ANTHROPIC_API_BASE", URL),
        ("ollama_chat", "OLLAMA_API_BASE", URL),
    ):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "greeting.txt"
            file.write_text("")
            settings = {variable: base, f"{provider.upper()}_API_KEY": "none", "HOME": folder}
            done = subprocess.run(
                [
                    str(program), "--model", f"{provider}/{MODEL}", "--message", TASK, "--edit-format",
                    "whole", "--no-git", "--yes-always", "--no-check-update", "--no-show-model-warnings",
                    "--no-analytics", "--map-tokens", "0", "--no-detect-urls", "greeting.txt",
                ],
                capture_output=True, text=True, timeout=280, cwd=folder, stdin=subprocess.DEVNULL,
                env=os.environ | settings,
            )  # fmt: skip
            assert file.read_text() == GREETING, (done.stdout + done.stderr)[-2500:]
            tell(f"{provider}: a file is written", text=GREETING.strip())


main()

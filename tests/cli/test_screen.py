"""The exit code is that of the result, whatever happens to the terminal, the pipe or its encoding."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[1] / "bench" / "record" / "results"
EVALUATIONS = [str(RESULTS / "lm-eval" / name) for name in ("real_base", "real_new")]
RUN = str(RESULTS / "vllm" / "serve_base.json")
COMMANDS = {
    0: ["compare", *EVALUATIONS],
    1: ["compare", RUN, RUN, "--gate", "completed>=1000000"],
    2: ["compare", RUN],
    3: ["compare", RUN, EVALUATIONS[0]],
}
"""A command line by its exit code."""
PLAN = ["kv-plan", "llama-70b", "--ctx", "8k", "--explain"]


def run(shell: str, words: list[str], **env: str) -> tuple[int, bytes]:
    """(exit code, output) of a line of bash in which `"$@"` is llmopt with `words`; the code is that of the
    first command of its last pipeline."""
    done = subprocess.run(
        ["bash", "-c", f"{shell}; exit ${{PIPESTATUS[0]}}", "bash", sys.executable, "-m", "llmopt", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **env},
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.parametrize("code", COMMANDS)
def test_a_reader_that_leaves_changes_no_code(code: int) -> None:
    # The reader is gone before the first byte; without buffers every write fails by itself.
    unbuffered = {"PYTHONUNBUFFERED": "1"} if code == 1 else {}
    assert run('"$@" 2>&1 | true', COMMANDS[code], **unbuffered)[0] == code


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_stream_changes_no_code(closed: str) -> None:
    assert run(f'"$@" {closed}', PLAN)[0] == 0


@pytest.mark.parametrize(
    "env",
    [
        *({"PYTHONIOENCODING": name} for name in ("ascii", "latin-1", "cp1252")),
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
    ids=["ascii", "latin-1", "cp1252", "C"],
)
def test_characters_that_an_encoding_lacks_are_replaced(env: dict[str, str]) -> None:
    code, output = run('"$@"', PLAN, **env)
    assert code == 0 and b"KV budget" in output and b"Traceback" not in output


def test_a_path_that_is_no_text_can_be_shown(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(str(tmp_path)) + b"/run\xff.json")
    shutil.copy(RUN, path)
    code, output = run('"$@"', ["compare", path, path, "--gate", "completed>=1000000"])
    assert code == 1 and b"Traceback" not in output


def test_files_are_written_before_anything_is_shown(tmp_path: Path) -> None:
    summary, plan = tmp_path / "summary.md", tmp_path / "plan.json"
    code, output = run('"$@" > /dev/full', [*COMMANDS[1], "--summary", str(summary)])
    assert (code, output) == (1, b"error: cannot write the output: No space left on device\n")
    assert "REGRESSION" in summary.read_text().upper()
    # A result that nobody got is no success.
    code, output = run('"$@" > /dev/full', [*PLAN, "--output", str(plan)])
    assert code == 2 and plan.read_text().endswith("}\n")
    assert output.endswith(b"error: cannot write the output: No space left on device\n")

"""The files of the product that a plain prompt enters: from `LLM()`, once it is warm, and in a decode step.

    python -m tools.path_trace
    python -m tools.path_trace kv-plan llama-3.1-8b --gpu l40s

With a command line, the files that this command enters in its own process instead. Prints JSON. A file is
entered where one of its functions is called; what only runs on import does not count.
tests/engine/test_path.py holds the optional parts of the engine off these paths.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import llmopt.engine
from llmopt.engine import SamplingParams
from llmopt.engine.core.llm import LLM

PRODUCT = Path(llmopt.engine.__file__).parent.parent
FLOORS = tuple(f"{PRODUCT / floor}/" for floor in ("cli", "bench", "engine", "quant", "base"))
"""Where the product's code lies: a checkout has a virtual environment and its tests beside them."""
PROMPT = "Once upon a time"
START, PREFILL, DECODE = (
    "LLM() to the first token",
    "a prompt to its first token",
    "a warm decode step",
)
"""The paths, by the name under which they are printed."""


@contextmanager
def tracing(files: set[str]) -> Iterator[None]:
    """Add the product's files whose functions any thread calls within the block."""

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(FLOORS) and code.co_name != "<module>":
            files.add(str(Path(code.co_filename).relative_to(PRODUCT)))

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def traced_paths(model: str = "stories3M") -> dict[str, list[str]]:
    """The files entered on each path, by its name.

    The prompts are a few tokens of text with the default sampling parameters, on the CPU.
    """
    paths: dict[str, set[str]] = {START: set(), PREFILL: set(), DECODE: set()}
    one = SamplingParams(max_tokens=1)
    with tracing(paths[START]):
        llm = LLM(model, device="cpu", async_scheduling=False)
        next(llm.stream(PROMPT, one))
    with tracing(paths[PREFILL]):
        next(llm.stream(PROMPT, one))
    tokens = llm.stream(PROMPT, SamplingParams(max_tokens=16, ignore_eos=True))
    for _ in range(4):  # the first decode steps capture their graphs
        next(tokens)
    with tracing(paths[DECODE]):
        next(tokens)
    llm.engine.close()
    return {name: sorted(files) for name, files in paths.items()}


def traced_command(argv: list[str]) -> list[str]:
    """The files that a command line of llmopt enters."""
    from llmopt.cli.main import main

    files: set[str] = set()
    with tracing(files), suppress(SystemExit):
        main(argv)
    return sorted(files)


if __name__ == "__main__":
    if argv := sys.argv[1:]:
        output = os.dup(1)
        os.dup2(2, 1)  # the command prints to standard error, and may detach Python's streams
        entered = traced_command(argv)
        text = json.dumps({argv[0]: entered, "files": len(entered)}, indent=1)
        os.write(output, f"{text}\n".encode())
    else:
        print(json.dumps(traced_paths(), indent=1))

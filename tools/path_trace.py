"""The files of the product that a plain prompt enters: from `LLM()`, once it is warm, and in a decode step.

    python -m tools.path_trace [--functions | --json]

A file is entered where one of its functions is called; what only runs on import does not count.
tests/engine/test_path.py holds the optional parts of the engine off these paths.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import llmopt.engine
from llmopt.engine import SamplingParams
from llmopt.engine.llm import LLM

PRODUCT = Path(llmopt.engine.__file__).parent.parent
FLOORS = tuple(f"{PRODUCT / floor}/" for floor in ("cli", "bench", "engine", "quant"))
"""Where the product's code lies: a checkout has a virtual environment and its tests beside them."""
PROMPT = "Once upon a time"
START, PREFILL, DECODE = (
    "LLM() to the first token",
    "a prompt to its first token",
    "a warm decode step",
)
"""The paths, by the name under which they are printed."""

Entered = Mapping[str, frozenset[str]]
"""The functions that were called, by their file's path in the product."""


@contextmanager
def tracing() -> Iterator[dict[str, set[str]]]:
    """Record the product's functions that any thread calls within the block."""
    entered: dict[str, set[str]] = {}

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(FLOORS) and code.co_name != "<module>":
            file = str(Path(code.co_filename).relative_to(PRODUCT))
            entered.setdefault(file, set()).add(code.co_qualname)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield entered
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def traced_paths(model: str = "stories3M") -> dict[str, Entered]:
    """The files entered on each path, by its name.

    The prompts are a few tokens of text with the default sampling parameters, on the CPU.
    """
    paths: dict[str, Entered] = {}

    def keep(name: str, entered: dict[str, set[str]]) -> None:
        paths[name] = {file: frozenset(names) for file, names in entered.items()}

    def first_token(llm: LLM) -> None:
        for _ in llm.stream(PROMPT, SamplingParams(max_tokens=1)):
            return

    with tracing() as entered:
        llm = LLM(model, device="cpu", async_scheduling=False)
        first_token(llm)
    keep(START, entered)
    with tracing() as entered:
        first_token(llm)
    keep(PREFILL, entered)
    tokens = llm.stream(PROMPT, SamplingParams(max_tokens=16, ignore_eos=True))
    for _ in range(4):  # the first decode steps capture their graphs
        next(tokens)
    with tracing() as entered:
        next(tokens)
    keep(DECODE, entered)
    llm.engine.close()
    return paths


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--functions", action="store_true", help="name the functions too")
    parser.add_argument("--json", action="store_true", help="the files by path, and nothing else")
    given = parser.parse_args()
    if given.json:
        print(json.dumps({name: sorted(entered) for name, entered in traced_paths().items()}))
        return 0
    for name, entered in traced_paths().items():
        count = sum(map(len, entered.values()))
        print(f"{name}: {len(entered)} files, {count} functions")
        for file in sorted(entered):
            print(
                f"  {file}" + (f": {', '.join(sorted(entered[file]))}" if given.functions else "")
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Questions that a platform engineer asks, with the answers of kv-plan.

    python -m tools.plan_questions            # write them into docs/commands/kv-plan.md
    python -m tools.plan_questions --check    # compare them with the page

Each question shows the lines of the command's output that answer it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from .document_part import put_part

PAGE, PART = "docs/commands/kv-plan.md", "plan_questions.py"
WIDTH = 126
"""Columns of a line in the page; the command itself gets more, so that it breaks no line."""
LENGTHS = "--input-len 1024 --output-len 256"
SLO = '--slo "ttft:1s tpot:30ms"'
OTHER_PROGRAMS = ("--n-cpu-moe", "--cpu-moe", "--cpu-offload-gb")
"""Options of llama.cpp and vLLM that the page names."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question, the options that answer it, and the labels of the lines that hold the answer. The error of
    a speed is shown if `has_error`."""

    text: str
    options: str
    labels: tuple[str, ...]
    has_error: bool = False

    @property
    def command(self) -> str:
        return f"llmopt kv-plan {self.options}"


QUESTIONS = (
    Question(
        "Does the model fit, and on how many GPUs?",
        "llama-70b --ctx 128k --gpu h100",
        ("fits", "limit"),
    ),
    Question(
        "Can it run on the one card that I have?",
        "gpt-oss-120b --ctx 32k --gpu rtx-4090 --ram 64GB",
        ("fits", "start", "speed"),
        has_error=True,
    ),
    Question(
        "How many users keep our limits on latency?",
        f"qwen3-32b {LENGTHS} {SLO} --gpu h200 --tp 1",
        ("users",),
    ),
    Question(
        "We have 20 users. What do they see?",
        f"qwen3-32b {LENGTHS} {SLO} --gpu h200 --tp 1 --concurrency 20",
        ("users",),
    ),
    Question(
        "How many GPUs do 50 requests per second need?",
        f"llama-70b {LENGTHS} {SLO} --gpu h100,h200,b200 --target-request-rate 50",
        ("fleet",),
    ),
    Question(
        "Does one server keep 4 requests per second?",
        "qwen3-32b --dataset azure --request-rate 4 --prefix-hit-rate 0.3 --gpu h200",
        ("speed",),
    ),
    Question(
        "Which weight format wins at our load?",
        "llama-8b --ctx 1k --concurrency 8 --gpu h100",
        ("formats",),
    ),
    Question(
        "What does a million tokens cost, and what would be cheaper?",
        "llama-70b --ctx 8k --concurrency 32 --gpu h100",
        ("cost", "cheaper"),
    ),
    Question(
        "Our own GPUs, or an API?",
        "qwen3-32b --ctx 4k --concurrency 32 --gpu h100 --gpu-hour-price 2.95 --api-price-in 0.1 "
        "--api-price-out 0.4 --duty-cycle 0.4",
        ("cost on",),
    ),
    Question(
        "Which engine holds a long context in less memory?",
        "gemma-3-27b --ctx 128k --gpu h200",
        ("fits", "KV per sequence"),
    ),
    Question(
        "How do we divide a mixture of experts over one node?",
        f"qwen3-235b-a22b {LENGTHS} {SLO} --gpu h200 --weights fp8",
        ("users",),
    ),
    Question(
        "Does speculative decoding pay?",
        "llama-70b --ctx 4k --gpu h100 --draft-tokens 3 --acceptance 0.7",
        ("speculation on",),
    ),
)


def answer_of(question: Question) -> str:
    """The lines of the output that answer a question; a line without indent begins a new label."""
    words = shlex.split(question.options)
    environment = {**os.environ, "COLUMNS": "400"}
    run = subprocess.run(
        [sys.executable, "-m", "llmopt", "kv-plan", *words],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    lines = lines_of(run.stdout, question.labels)
    if not question.has_error:
        lines = (line for line in lines if not re.match(r" +(measured was|no measurement) ", line))
    broken = (piece for line in lines for piece in _broken(line))
    return "\n".join(broken)


def lines_of(output: str, labels: tuple[str, ...]) -> Iterator[str]:
    islines_of = False
    for line in output.splitlines():
        if not line.startswith(" "):
            islines_of = line.startswith(labels)
        if islines_of and line.strip():
            yield line.rstrip()


def _broken(line: str) -> list[str]:
    """The line in pieces of the page's width, indented like its text."""
    label = re.match(r"\S.*?  +|\s*", line)
    indent = " " * (label.end() if label else 0)
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent)


def part() -> str:
    """All questions with their commands and answers."""
    blocks = (
        f"**{question.text}**\n\n```\n$ {question.command}\n{answer_of(question)}\n```"
        for question in QUESTIONS
    )
    return "\n\n".join(blocks)


if __name__ == "__main__":
    put_part(PAGE, PART, __doc__, part)

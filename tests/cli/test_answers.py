"""Every command of docs/answers runs, in the order of its page, on the bundled model."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from ..support.cli_process import LlmoptProcess, run_llmopt

ROOT = Path(__file__).parents[2]
ANSWERS = sorted((ROOT / "docs" / "answers").glob("*.md"))
# The bundled model stands for the reader's, and llmopt's server for vLLM's.
STANDS_FOR = {"MODEL": "stories3M", "vllm": "llmopt"}
# The last value of an option holds: little work, whatever the page asks for.
LITTLE = {
    "bench": "--num-prompts 8 --output-len 4 --num-runs 2 --quality-tokens 128 --no-check-client --no-report",
    "quantize": "--num-samples 2 --seq-len 32",
    "best": "--num-samples 2 --seq-len 32 --quality-tokens 128 --no-quality-full --finalists 2",
    "run": "--set bench.num_prompts=8 --set bench.num_runs=2 --set bench.output_len=4 "
    "--set bench.quality_tokens=128 --set bench.check_client=false --set bench.report=false",
}
# What judges may find a regression, or nothing at all, on the machine of a test.
VERDICTS = {
    **dict.fromkeys(("bench", "best", "check", "compare", "run"), (0, 1, 3)),
    "doctor": (0, 1),
}
COMMAND = re.compile(r"^ {4}(llmopt .+)$", re.MULTILINE)
FILE = re.compile(r"`([\w.-]+)`:\n\n```\w*\n(.*?)```", re.DOTALL)
MOST_WORDS = 260
"""A screen and a half."""


def commands(page: Path) -> list[list[str]]:
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    return [shlex.split(line)[1:] for line in COMMAND.findall(text)]


def test_ten_answers_of_a_screen_and_a_half_each_with_a_command() -> None:
    assert len(ANSWERS) == 10
    listed = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for page in ANSWERS:
        text = page.read_text(encoding="utf-8")
        assert len(text.split()) <= MOST_WORDS and len(text.splitlines()) <= 48, page.name
        assert commands(page), page.name
        title = text.partition("\n")[0].removeprefix("# ")
        assert f"[{title}](answers/{page.name})" in listed


@pytest.mark.whole
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", ANSWERS, ids=lambda page: page.stem)
def test_every_command_of_an_answer_runs(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name, content in FILE.findall(text):
        (tmp_path / name).write_text(content, encoding="utf-8")
    ports = sorted(set(re.findall(r"http://127\.0\.0\.1:(\d+)", text)))
    servers = [LlmoptProcess("serve-local", "stories3M", "--json", "--port", "0") for _ in ports]
    try:
        ready = [re.search(r"http://[\d.:]+", server.stdout.readline()) for server in servers]
        urls = {
            f"http://127.0.0.1:{port}": found[0]
            for port, found in zip(ports, ready, strict=True)
            if found
        }
        for command, *words in commands(page):
            words = [shown_as(word, urls) for word in words]
            little = shlex.split(LITTLE.get(command, "")) if "--plan-runs" not in words else []
            if "workload.json" in words and command == "bench":
                little = little[4:]  # a frozen workload has its own number and lengths
            done = run_llmopt(command, *words, *little, cwd=tmp_path)
            assert done.returncode in VERDICTS.get(command, (0,)), (command, words, done.stderr)
            assert "Traceback" not in done.stderr
    finally:
        for server in servers:
            with server:
                server.kill()


def shown_as(word: str, urls: dict[str, str]) -> str:
    head, _, model = word.rpartition("=")
    word = urls.get(word, STANDS_FOR.get(word, word))
    return f"{head}={STANDS_FOR[model]}" if head and model in STANDS_FOR else word

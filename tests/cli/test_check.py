"""`llmopt check` as a command: exit codes, JSON, Markdown and values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from llmopt.cli.main import main

STRANGERS = Path(__file__).parents[1] / "strangers" / "checkpoints"
INT4 = str(STRANGERS / "llmcompressor-w4a16-0.14.0.1")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["check", *arguments])
    out, err = capsys.readouterr()
    return stopped.value.code or 0, out, err


def test_exit_codes_of_the_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, INT4, "--engine", "vllm", "--gpu", "h100")[0] == 0
    assert run(capsys, INT4, "--engine", "trtllm")[0] == 1
    assert run(capsys, INT4, "--engine", "sglang")[0] == 3
    code, _, err = run(capsys, "./nowhere", "--engine", "vllm")
    assert code == 2 and err.count("\n") == 1
    code, _, err = run(capsys, INT4, "--engine-version", "0.33")
    assert code == 2 and "--engine-version goes with" in err


def test_the_answer_as_json_markdown_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, INT4, "--json", "--values")
    answer = json.loads(out)
    assert code == 0 and answer["answer"] == "loads"
    assert {"checkpoint", "answer", "method", "linears", "engines", "findings"} == set(answer)
    assert len(answer["engines"]) == 6
    assert all(finding["severity"] != "broken" for finding in answer["findings"])
    _, out, _ = run(capsys, INT4, "--markdown", "--gpu", "h100", "--engine", "vllm")
    assert "| vllm 0.33.0 | loads | Marlin |" in out
    _, out, _ = run(capsys, INT4, "--engine", "vllm", "--gpu", "h100")
    assert "Marlin" in out and "missing-tokenizer" in out

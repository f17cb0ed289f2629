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
    assert {"checkpoint", "answer", "method", "linears", "engines", "findings", "planned"} == set(
        answer
    )
    assert len(answer["engines"]) == 6
    assert all(finding["severity"] != "broken" for finding in answer["findings"])
    _, out, _ = run(capsys, INT4, "--markdown", "--gpu", "h100", "--engine", "vllm")
    assert "| vllm 0.33.0 | loads | Marlin |" in out
    _, out, _ = run(capsys, INT4, "--engine", "vllm", "--gpu", "h100")
    assert "Marlin" in out and "missing-tokenizer" in out


def test_a_fallback_is_named_with_its_planned_speed(capsys: pytest.CaptureFixture[str]) -> None:
    """An A100 has no FP8 products: Marlin reads the weights alone, and plain weights are as fast for many."""
    checkpoint = str(STRANGERS / "llmcompressor-fp8-dynamic-0.14.0.1")
    asked = (checkpoint, "--engine", "vllm", "--gpu")
    _, out, _ = run(capsys, *asked, "a100", "--json")
    speeds = {entry["weights"]: entry for entry in json.loads(out)["planned"]}
    assert speeds["fp8"]["tokens_per_second_full"] < speeds["bf16"]["tokens_per_second_full"]
    _, out, _ = run(capsys, *asked, "a100")
    assert "Marlin FP8, weights alone (fallback: " in " ".join(out.split())
    assert "with 8 clients: bf16" in out
    _, out, _ = run(capsys, *asked, "h100", "--json")
    assert json.loads(out)["planned"] == []

"""`llmopt doctor`: the machine's facts and the kernel table."""

from __future__ import annotations

import json

import pytest
import torch
from llmopt.cli.main import main
from llmopt.engine.kernels.table import table


def call(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as stop:
        main(["doctor", *arguments])
    return stop.value.code


def test_json_holds_the_kernel_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"] == torch.__version__
    assert 1 <= found["cpu"]["usable_cores"] <= found["cpu"]["cores"]
    assert 0 < found["memory"]["available_bytes"] <= found["memory"]["total_bytes"]
    assert len(found["cuda"]) == torch.cuda.device_count()
    choices = table(torch.device("cpu"), torch.bfloat16)
    section = found["kernels"][0]
    assert (section["device"], section["dtype"]) == ("cpu", "bfloat16")
    assert [row["chosen"] for row in section["operations"]] == [c.chosen for c in choices]


def test_table_names_each_operation_and_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert call() == 0
    out = " ".join(capsys.readouterr().out.split())
    for choice in table(torch.device("cpu"), torch.float32):
        assert choice.operation in out
        assert str(choice.chosen) in out
    assert "Kernels on cpu in float32" in out

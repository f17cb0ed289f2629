"""Checkpoints whose linears have different kinds, in the packages that own their formats, where these are installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine

from tools import owners

MIXED = [
    (case, reading) for case in owners.CASES for reading in case.readings if "mixed" in case.name
]
PACKAGES = {"llamacpp": "xllamacpp"}


@pytest.mark.whole
@pytest.mark.parametrize(
    ("case", "reading"), MIXED, ids=[f"{case.name} in {one.owner}" for case, one in MIXED]
)
def test_a_mixed_checkpoint_answers_there_as_here(
    case: owners.Case, reading: owners.Reading, tmp_path: Path
) -> None:
    pytest.importorskip(PACKAGES.get(reading.owner, reading.owner), reason="it is not installed")
    folder = owners.write(case, tmp_path)
    tokenizer = Engine(EngineConfig(owners.resolve_model("stories3M"), device="cpu")).tokenizer
    prompts = [list(tokenizer(text).input_ids) for text in owners.TEXTS]
    task = owners.task(folder, reading, prompts)
    (answer,) = owners.ask(Path(sys.executable), reading.owner, [task])
    assert "error" not in answer, answer
    _, mean, same = owners.compare(owners.ours(folder, prompts), answer)
    assert mean <= reading.limit and same >= 0.75

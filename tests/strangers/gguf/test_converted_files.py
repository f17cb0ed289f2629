"""Files that llama.cpp's converter wrote: transformers' numbers, and the tokenizer's ids.

`make.py` writes the files, and the README tells by which tools.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.quant.gguf.container import GgufFile

FOLDER = Path(__file__).parent
EXPECTED = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", EXPECTED)
def test_a_converted_file_alone_has_the_numbers_of_transformers(tmp_path: Path, name: str) -> None:
    path = Path(shutil.copy(FOLDER / f"{name}.gguf", tmp_path))
    engine = Engine(EngineConfig(path, dtype="float32", device="cpu"))
    tokens, expected = EXPECTED[name]["tokens"], torch.tensor(EXPECTED[name]["logprobs"])
    logprobs = engine.prompt_logits(tokens)[:-1].log_softmax(-1)
    got = logprobs.gather(1, torch.tensor(tokens)[1:, None])[:, 0]
    assert expected.std() > 0.5
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=0)
    assert engine.tokenizer(EXPECTED[name]["text"]).input_ids == EXPECTED[name]["ids"]


def test_the_files_are_the_converters() -> None:
    """Files of our own writer would prove nothing here."""
    for name in EXPECTED:
        metadata = GgufFile(FOLDER / f"{name}.gguf").metadata
        assert metadata["general.type"] == "model" and "general.size_label" in metadata

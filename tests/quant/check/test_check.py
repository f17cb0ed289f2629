"""Which engines load checkpoints of other tools, and what is wrong with damaged ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from llmopt.quant.check.check import check

STRANGERS = Path(__file__).parents[2] / "strangers" / "checkpoints"


@pytest.mark.parametrize(
    ("name", "engine", "answer"),
    [
        ("ct-int4-0.9.4", "vllm", "loads"),
        ("bnb-nf4-double-0.50.2", "vllm", "does not"),
        ("bnb-nf4-double-0.50.2", "transformers", "loads"),
        ("gptqmodel-v1-7.7.0", "llama.cpp", "does not"),
        ("autoround-native-0.16.1", "llmopt", "does not"),
    ],
)
def test_checkpoints_of_other_tools_load_where_they_do(name: str, engine: str, answer: str) -> None:
    folder = STRANGERS / name
    assert check(folder, [engine]).answer == answer

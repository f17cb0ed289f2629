"""Codes of ggml's blocks in C, on every path of this processor, against torch."""

from __future__ import annotations

import pytest
import torch
from llmopt.base.processor import VARIABLE
from llmopt.quant.kinds.ggml.scheme import GGUF_BLOCKS
from llmopt.quant.kinds.ggml.tensor import LAYOUTS, block_codes, block_codes_torch, native_codes

from ...support.native_paths import native_paths

HERE = native_paths()


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("path", HERE or ["off"])
def test_codes_are_those_of_torch(kind: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, path)
    if native_codes().library is None:
        pytest.skip(str(native_codes().reason))
    generator = torch.Generator().manual_seed(0)
    width, size = GGUF_BLOCKS[kind]
    for blocks in (1, 300):
        data = torch.randint(0, 256, (blocks, size), dtype=torch.uint8, generator=generator)
        expected = block_codes_torch(data, kind)
        assert expected.shape == (blocks, width)
        torch.set_num_threads(2)
        try:
            assert torch.equal(block_codes(data, kind), expected)
        finally:
            torch.set_num_threads(1)

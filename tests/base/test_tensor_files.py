"""Tensor files are written in the dtypes of safetensors, and read back by its own reader."""

from __future__ import annotations

from pathlib import Path

import torch
from llmopt.base.atomic_io import entry_bytes, file_bytes, layout_of, write_tensors
from safetensors.torch import _TYPES, load_file


def test_every_dtype_is_written_and_measured(tmp_path: Path) -> None:
    dtypes = {name: dtype for name, dtype in _TYPES.items() if not name.startswith("F4")}
    tensors = {name: torch.arange(6).view(3, 2).to(dtype) for name, dtype in dtypes.items()}
    path = tmp_path / "all.safetensors"
    write_tensors(path, tensors)
    read, layout = load_file(path), layout_of(tensors)
    assert {name: tensor.dtype for name, tensor in read.items()} == dtypes
    for name, tensor in tensors.items():
        assert torch.equal(read[name].view(torch.uint8), tensor.view(torch.uint8)), name
        assert entry_bytes(layout[name]) == tensor.nbytes
    assert path.stat().st_size == file_bytes(layout)

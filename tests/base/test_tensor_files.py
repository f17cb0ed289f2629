"""Tensor files are written in the dtypes of safetensors, and read back by its own reader."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from llmopt.base.atomic_io import entry_bytes, file_bytes, layout_of, write_tensors
from safetensors.torch import _TYPES, load_file, save_file


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


def test_dtypes_below_a_byte_are_measured_as_their_owner_writes_them(tmp_path: Path) -> None:
    """Other tools write them; the size of a tensor is what its place in the file says."""
    path = tmp_path / "small.safetensors"
    values = torch.arange(12, dtype=torch.uint8)
    save_file({"w": values.view(3, 4).view(torch.float4_e2m1fn_x2)}, path)
    length = int.from_bytes(path.read_bytes()[:8], "little")
    entry = json.loads(path.read_bytes()[8 : 8 + length])["w"]
    assert entry["dtype"] == "F4" and entry["data_offsets"] == [0, 12]
    assert entry_bytes((entry["dtype"], tuple(entry["shape"]))) == 12
    assert entry_bytes(("F6_E2M3", (2, 8))) == entry_bytes(("F6_E3M2", (2, 8))) == 12

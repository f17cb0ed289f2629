"""Opening a checkpoint of any kind by path."""

from __future__ import annotations

from pathlib import Path

from .gguf.checkpoint import DequantizedGguf, GgufCheckpoint
from .model.checkpoint import Checkpoint, gguf_file_of


def open_checkpoint(path: Path | str, *, trust_remote_code: bool = False) -> Checkpoint:
    """Open a model as a checkpoint: a folder of safetensors, a `.gguf` file, or a folder with one.

    Args:
        trust_remote_code: see `Checkpoint`.

    Raises:
        BadInput: see `Checkpoint` and `gguf.checkpoint.GgufCheckpoint`.
    """
    file = gguf_file_of(Path(path))
    if file is not None:
        return GgufCheckpoint(file)
    return Checkpoint(path, trust_remote_code=trust_remote_code)


def open_plain(path: Path | str, *, trust_remote_code: bool = False) -> Checkpoint:
    """Open a model likewise, a quantized `.gguf` file as its dequantized weights.

    Raises:
        BadInput: see `open_checkpoint`.
    """
    file = gguf_file_of(Path(path))
    if file is not None:
        return DequantizedGguf(file)
    return Checkpoint(path, trust_remote_code=trust_remote_code)

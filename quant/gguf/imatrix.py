"""Importance matrices in llama.cpp's two file formats: GGUF, and the binary one before it (`.dat`).

An entry is the mean square of each input of a tensor, for each of its matrices (experts). GGUF holds sums and
counts, `<tensor>.in_sum2` and `.counts`; the old format `i32 entries`, then for each `i32 length, name, i32
calls, i32 values, f32 values × calls`, chunks and the text's name (`tools/imatrix/imatrix.cpp`).
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ...base.atomic_io import write_atomically
from ...base.errors import BadInput
from ..model.checkpoint import expert_of
from .architecture import to_gguf
from .container import GgufFile, TensorToWrite, write_gguf

_SUMS, _COUNTS = ".in_sum2", ".counts"
_LONGEST_NAME = 4096


@dataclass(frozen=True, slots=True)
class ImportanceMatrix:
    """Mean squares of the inputs of each linear.

    Attributes:
        means: float32 `[matrices, in]` by tensor name, such as `blk.0.attn_q.weight`; from a file of the old
            format `[1, matrices * in]`.
        counts: tokens that each matrix saw, float32 `[matrices]`.
    """

    means: dict[str, torch.Tensor]
    counts: dict[str, torch.Tensor] = field(default_factory=dict)
    dataset: str = ""
    chunk_size: int = 512
    chunks: int = 1

    def of(
        self, module: str, architecture: str = "llama", matrices: int = 1
    ) -> torch.Tensor | None:
        """Mean squares of a linear's inputs `[in]`, or None. BadInput: another number of experts."""
        means = self.means.get(f"{to_gguf(module, architecture)}.weight")
        if means is None:
            return None
        expert = expert_of(module)
        if expert is None:
            return means.mean(dim=0)
        if len(means) == 1 and means.shape[1] % matrices == 0:
            means = means.view(matrices, -1)
        if len(means) != matrices:
            raise BadInput(
                f"--imatrix: {module} is one of {len(means)} experts there and of {matrices} in the model: "
                "it belongs to another model"
            )
        return means[expert]

    def for_modules(
        self, modules: Mapping[str, tuple[int, int]], architecture: str
    ) -> dict[str, torch.Tensor]:
        """Entries of linears by Hugging Face name, all experts. BadInput: another width, or not finite."""
        matrices = Counter(to_gguf(module, architecture) for module in modules)
        entries = {}
        for module, (_, in_features) in modules.items():
            means = self.of(module, architecture, matrices[to_gguf(module, architecture)])
            if means is None:
                continue
            if len(means) != in_features:
                raise BadInput(
                    f"--imatrix: {module} has {len(means)} inputs there and {in_features} in the model: "
                    "it belongs to another model"
                )
            if not bool(torch.isfinite(means).all()):
                raise BadInput(f"--imatrix: {module} holds NaN or infinite values")
            entries[module] = means
        if not entries:
            raise BadInput("--imatrix has no entry for any linear of the model")
        return entries


def read_imatrix(path: Path) -> ImportanceMatrix:
    """Read a file of either format, by its first bytes; BadInput if it is missing, damaged or another."""
    try:
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
            file.seek(0)
            if not is_gguf:
                return _read_legacy(file, path)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    return _read_gguf(GgufFile(path))


def write_imatrix(path: Path, matrix: ImportanceMatrix) -> None:
    """Write a file atomically, in the old format where the name ends in `.dat`; BadInput on a full disk."""
    if path.suffix == ".dat":
        parts = [struct.pack("<i", len(matrix.means))]
        for name, means in sorted(matrix.means.items()):
            # Rounded up, so that no entry has zero calls.
            calls = max(1, -(-int(_counts(matrix, name).max()) // matrix.chunk_size))
            values, text = (means * calls).to(torch.float32).flatten(), name.encode()
            parts += [struct.pack("<i", len(text)), text, struct.pack("<ii", calls, len(values))]
            parts.append(values.numpy().tobytes())
        text = matrix.dataset.encode()
        parts += [struct.pack("<ii", matrix.chunks, len(text)), text]
        write_atomically(path, b"".join(parts))
        return
    tensors = []
    for name, means in sorted(matrix.means.items()):
        counts = _counts(matrix, name).unsqueeze(1)
        for ending, values in ((_SUMS, means * counts), (_COUNTS, counts)):
            data = values.to(torch.float32).contiguous().numpy().tobytes()
            tensor = TensorToWrite(name + ending, tuple(values.shape), "F32", lambda d=data: [d])
            tensors.append(tensor)
    metadata: dict[str, Any] = {"general.type": "imatrix", "imatrix.datasets": [matrix.dataset]}
    sizes = {"imatrix.chunk_count": matrix.chunks, "imatrix.chunk_size": matrix.chunk_size}
    write_gguf(path, metadata | sizes, tensors)


def _read_gguf(file: GgufFile) -> ImportanceMatrix:
    if file.metadata.get("general.type") != "imatrix":
        raise BadInput(f"{file.path} is a GGUF file, but no importance matrix")
    means, counts = {}, {}
    for name in file.tensors:
        if not name.endswith(_SUMS):
            continue
        tensor = name.removesuffix(_SUMS)
        if tensor + _COUNTS not in file.tensors:
            raise BadInput(f"{file.path} lacks {tensor}{_COUNTS}: it is damaged")
        sums, seen = _floats(file, name), _floats(file, tensor + _COUNTS).flatten()
        sums = sums.view(len(seen), -1)
        # Experts that no token reached: equal importance, as in llama.cpp.
        reached = (seen > 0).unsqueeze(1)
        means[tensor] = torch.where(reached, sums / seen.clamp(min=1).unsqueeze(1), 1.0)
        counts[tensor] = seen
    keys = file.metadata
    dataset = ", ".join(keys.get("imatrix.datasets", []))
    sizes = keys.get("imatrix.chunk_size", 512), keys.get("imatrix.chunk_count", 1)
    return ImportanceMatrix(means, counts, dataset, *map(int, sizes))


def _floats(file: GgufFile, name: str) -> torch.Tensor:
    info = file.tensors[name]
    if info.type != "F32":
        raise BadInput(f"{file.path}: {name} is {info.type}, not F32: it is damaged")
    return torch.from_numpy(file.data(name).copy()).view(torch.float32).view(info.shape)


def _read_legacy(file: BinaryIO, path: Path) -> ImportanceMatrix:
    damaged = BadInput(f"{path} is no importance matrix of llama.cpp, or it is cut off")

    def number() -> int:
        data = file.read(4)
        if len(data) < 4:
            raise damaged
        return struct.unpack("<i", data)[0]

    size = path.stat().st_size
    entries = number()
    if not 0 < entries <= size // 12:
        raise damaged
    means = {}
    for _ in range(entries):
        length = number()
        if not 0 < length <= _LONGEST_NAME:
            raise damaged
        name = file.read(length).decode("utf-8", errors="replace")
        calls, count = number(), number()
        data = file.read(4 * count) if 0 < count <= size // 4 else b""
        if not data or len(data) != 4 * count or calls < 0:
            raise damaged
        values = torch.frombuffer(bytearray(data), dtype=torch.float32)
        means[name] = (values / max(calls, 1)).unsqueeze(0)
    tail = file.read(8)
    chunks, length = struct.unpack("<ii", tail) if len(tail) == 8 else (1, 0)
    dataset = file.read(max(length, 0)).decode("utf-8", errors="replace")
    return ImportanceMatrix(means, dataset=dataset, chunks=chunks)


def _counts(matrix: ImportanceMatrix, name: str) -> torch.Tensor:
    whole = torch.full((len(matrix.means[name]),), float(matrix.chunks * matrix.chunk_size))
    return matrix.counts.get(name, whole)

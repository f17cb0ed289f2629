"""A GGUF file as a `Checkpoint`: Hugging Face's names, row order and config."""

from __future__ import annotations

import ctypes
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...base.errors import BadInput
from ..base.plain_tokenizer import processor_template
from ..kinds.ggml.formats import BLOCKS_SUFFIX
from ..kinds.ggml.scheme import GGUF_BLOCKS, GgufScheme
from ..kinds.ggml.tensor import GgufTensor, dequantize_blocks
from ..model.checkpoint import TOKENIZER_FILES, Checkpoint, files_of
from .architecture import ROPE_FACTORS, family_rules, from_gguf, permuted_heads, to_halves
from .container import ALIGNMENT, TYPE_SIZES, GgufFile, TensorInfo
from .keys import TEMPLATE, TOKENIZER, end_tokens, stored_sampling, template_keys
from .mix import file_type
from .read_config import stored_config
from .read_tokenizer import own_tokenizer

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_STORED_AS = {"float32": "F32", "float16": "F16"}
# A config.json has them as lists; without one they are refused.
_LONGROPE_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")
# Looked up by row, so it is dequantized whatever its type in the file.
_EMBEDDING = "model.embed_tokens"


class GgufCheckpoint(Checkpoint):
    """A `.gguf` file, ours or llama.cpp's, through the interface of `Checkpoint`.

    Linears in blocks appear as `<module>.gguf_blocks`, uint8 `[out, row bytes]`; everything else as
    floats under its usual name. A `config.json` in the same folder supplies what the file lacks
    (its model type must be of the file's architecture); without one the config is made from the keys.

    Raises:
        BadInput: a broken file, an architecture or a tensor that is not known, or a part of a split model.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.folder = self.path.parent
        self._file = GgufFile(self.path)
        self.config = stored_config(self._file)
        rules = family_rules(self.config)
        self._norm_offset = rules.norm_offset
        has_config = (self.folder / "config.json").is_file()
        self._infos: dict[str, TensorInfo] = {}
        types: dict[str, str] = {}
        for info in self._file.tensors.values():
            if info.name == ROPE_FACTORS or (has_config and info.name in _LONGROPE_FACTORS):
                continue
            if info.type not in TYPE_SIZES:
                raise BadInput(
                    f"{self.path}: tensor {info.name!r} has ggml type {info.type}, which is not read here"
                )
            stem, _, kind = info.name.rpartition(".")
            module = from_gguf(stem, rules)
            if module is None or kind not in ("weight", "bias"):
                raise BadInput(
                    f"{self.path}: tensor {info.name!r} has no place in the models read here"
                )
            for part, matrix in _matrices(module, info):
                if matrix.type in GGUF_BLOCKS and part != _EMBEDDING:
                    self._infos[part + BLOCKS_SUFFIX] = matrix
                    types[part] = matrix.type
                else:
                    self._infos[f"{part}.{kind}"] = matrix
        if types:
            self.config["quantization_config"] = {"quant_method": "gguf", "types": types}
        self._heads = permuted_heads(self.config)
        self.shard_of = dict.fromkeys(self._infos, self.path.name)

    @cached_property
    def source_tokenizer(  # pyright: ignore[reportIncompatibleVariableOverride]
        self,
    ) -> Mapping[str, Any] | None:
        keys = {k: v for k, v in self._file.metadata.items() if k.startswith("tokenizer.")}
        has_own = f"{TOKENIZER}.tokens" in keys
        if (self.folder / "tokenizer.json").is_file() and (
            not has_own or own_tokenizer(self._file) is None
        ):
            return None
        has_template = any(name.startswith(TEMPLATE) for name in keys)
        return keys if has_template else keys | template_keys(processor_template(self.folder))

    def generation_config(self) -> dict[str, Any]:
        """The file next to it, over the sampling of its keys."""
        return stored_sampling(self.path, self._file.metadata) | super().generation_config()

    def end_token_ids(self) -> frozenset[int]:
        return super().end_token_ids() | frozenset(end_tokens(self._file.metadata))

    def companions(self) -> dict[str, bytes]:
        """The files next to it, the tokenizer of its keys, and their sampling where none is there."""
        files = super().companions()
        if generation := self.generation_config():
            files.setdefault("generation_config.json", json.dumps(generation).encode())
        if (tokenizer := own_tokenizer(self._file)) is not None:
            files = {n: d for n, d in files.items() if not any(map(Path(n).match, TOKENIZER_FILES))}
            with tempfile.TemporaryDirectory() as folder:
                tokenizer.save_pretrained(folder)
                files |= files_of(Path(folder))
        return files

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor as floats, or blocks as bytes of the mapped file, which kernels pack: read-only."""
        if name not in self._infos:
            raise BadInput(f"{self.path} has no tensor {name!r}")
        info = self._infos[name]
        mapped = _in_place(self._file.bytes_of(info))
        data = self._place(mapped)
        if info.type in _DTYPES:
            # A copy, so that the mapped file's pages are never written.
            data = data.clone() if data is mapped else data
            tensor = data.view(_DTYPES[info.type]).view(info.shape)
        else:
            tensor = data.view(info.shape[0], -1)
            if not name.endswith(BLOCKS_SUFFIX):
                tensor = _dequantized(tensor, info.type)
        if self._norm_offset and name.endswith("norm.weight"):
            tensor = tensor - self._norm_offset
        for linear, heads in self._heads.items():
            if f".{linear}." in name:
                return to_halves(tensor, heads).contiguous()
        return tensor

    def blocks(self, name: str) -> GgufTensor | None:
        info = self._infos.get(name)
        if info is None or info.type not in GGUF_BLOCKS or len(info.shape) != 2:
            return None
        data = _in_place(self._file.bytes_of(info))
        return GgufTensor(data.view(info.shape[0], -1), GgufScheme(info.type))

    def release(self) -> None:
        self._file.release()

    def shape(self, name: str) -> tuple[int, ...]:
        info = self._infos[name]
        if not name.endswith(BLOCKS_SUFFIX):
            return info.shape
        return info.shape[0], info.nbytes // info.shape[0]

    def dtype_name(self, name: str) -> str:
        if name.endswith(BLOCKS_SUFFIX):
            return "U8"
        kind = self._infos[name].type
        return kind if kind in _DTYPES else "F32"


class DequantizedGguf(GgufCheckpoint):
    """A quantized `.gguf` file as a plain checkpoint of floats, in the config's dtype, as they are read."""

    def __init__(self, path: Path | str):
        super().__init__(path)
        config = self.config.pop("quantization_config", None)
        if config is None:
            return
        infos = self._infos.items()
        self._infos = {name.replace(BLOCKS_SUFFIX, ".weight"): info for name, info in infos}
        self.shard_of = dict.fromkeys(self._infos, self.path.name)
        self.source_type = file_type(self._file, config["types"].values())
        self.notes = (
            f"note: {self.path.name} is quantized already ({self.source_type}): its dequantized weights are "
            "the reference that errors are measured against",
        )

    def tensor(self, name: str) -> torch.Tensor:
        return super().tensor(name).to(_DTYPES[self.dtype_name(name)])

    def dtype_name(self, name: str) -> str:
        if self._infos[name].type in _DTYPES:
            return super().dtype_name(name)
        dtype = self.config.get("dtype") or self.config.get("torch_dtype")
        return _STORED_AS.get(str(dtype), "BF16")


# Bytes of blocks that are dequantized at once: intermediate values take tens of times as many.
_AT_ONCE = 2**20


def _dequantized(blocks: torch.Tensor, type_name: str) -> torch.Tensor:
    """Blocks `[rows, row bytes]` as float32 `[rows, width]`."""
    width, size = GGUF_BLOCKS[type_name]
    whole = blocks.new_empty(len(blocks), blocks.shape[1] // size * width, dtype=torch.float32)
    rows = max(1, _AT_ONCE // blocks.shape[1])
    for part, out in zip(blocks.split(rows), whole.split(rows), strict=True):
        out.copy_(dequantize_blocks(part, type_name))
    return whole


def _in_place(data: npt.NDArray[np.uint8]) -> torch.Tensor:
    """Bytes of a mapped file as a tensor; not by `from_numpy`, which warns of what cannot be written."""
    if data.ctypes.data % ALIGNMENT or not data.nbytes:
        return torch.from_numpy(data.copy())
    memory = (ctypes.c_uint8 * data.nbytes).from_address(data.ctypes.data)
    memory.owner = data  # type: ignore[attr-defined]  # the tensor holds `memory`
    return torch.frombuffer(memory, dtype=torch.uint8)


def _matrices(module: str, info: TensorInfo) -> Iterator[tuple[str, TensorInfo]]:
    """A tensor under its module's name; that of experts as a matrix for each, by the expert's name."""
    if len(info.shape) != 3:
        yield module, info
        return
    count, nbytes = info.shape[0], info.nbytes // info.shape[0]
    for expert in range(count):
        name = module.replace(".experts.", f".experts.{expert}.")
        start = info.start + expert * nbytes
        yield name, replace(info, shape=info.shape[1:], start=start, nbytes=nbytes)

"""Assembling layer shards into one GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open

from ...base.atomic_io import HOLLOW_BYTES, Entry
from ...base.errors import BadInput
from ..base.scheme import Scheme
from ..kinds.ggml.formats import BLOCKS_SUFFIX
from ..kinds.ggml.scheme import GGUF_BLOCKS
from ..kinds.ggml.tensor import quantize_blocks
from ..model.checkpoint import Checkpoint, expert_of
from .architecture import (
    ROPE_FACTORS,
    architecture_keys,
    gguf_architecture,
    permuted_heads,
    rope_factors,
    to_gguf,
    to_interleaved,
    writable_rules,
)
from .container import TensorToWrite, data_bytes, gguf_bytes, write_gguf
from .keys import sampling_keys
from .mix import GGUF_TYPES, embedding_type, mix_name, output_type
from .tokenizer import tokenizer_keys

ROWS_AT_ONCE = 4096
"""Rows of an embedding that are rounded together."""
_EMBEDDING, _HEAD = "model.embed_tokens", "lm_head"
_TOKENIZER_SUFFIXES = (".json", ".jinja", ".model", ".txt")


def gguf_name(model_name: str, type_name: str) -> str:
    return f"{model_name.rstrip('/').rsplit('/', 1)[-1]}-{type_name}.gguf"


def check_source(source: Checkpoint) -> None:
    """Raises BadInput where GGUF cannot represent a model: its type, a tensor, its tokenizer."""
    architecture_keys(source.config)
    architecture = gguf_architecture(source.config)
    for name in _held(source.names, source.config):
        _gguf_tensor_name(name, architecture)
    head, table = f"{_HEAD}.weight", f"{_EMBEDDING}.weight"
    is_left = head in source and head not in _held(source.names, source.config)
    if is_left and not torch.equal(source.tensor(head), source.tensor(table)):
        raise BadInput(
            f"{source.path} has {head} of its own, and config.json ties it: set tie_word_embeddings to false"
        )
    _tokenizer_keys(source)


def assemble(
    source: Checkpoint,
    layer_shards: Sequence[Path],
    output: Path,
    schemes: Mapping[str, Scheme],
    type_name: str,
    tables: Mapping[str, str] = MappingProxyType({}),
    *,
    hollow: bool = False,
) -> list[str]:
    """Write a whole model as one GGUF file, one tensor in memory at a time.

    Blocks are copied, norms and biases become float32, unquantized linears keep their dtype, and embedding
    and output head are quantized to the types that llama.cpp uses in a file of this type.

    Args:
        source: the original checkpoint, for what the shards do not hold.
        layer_shards: safetensors files that hold `<module>.gguf_blocks` and the other tensors of layers.
        schemes: scheme of every module with blocks: a `GgufScheme`, or an integer one that converts exactly.
        type_name: one of `mix.GGUF_TYPES`.
        tables: block types of embedding and output head, by module, where the mix does not decide them; an
            empty one leaves the table as it is.
        hollow: True for a mock, whose large tensors are holes in the file.

    Returns notes for the user; BadInput as of `check_source`, for NaN in a weight and for a full disk.
    """
    readers: dict[str, Callable[[str], torch.Tensor]] = dict.fromkeys(source.names, source.tensor)
    layout = _layout(source)
    # One shard is mapped at a time: the pages that were read stay resident.
    mapped = lru_cache(maxsize=1)(partial(safe_open, framework="pt"))
    for path in layer_shards:
        with safe_open(path, framework="pt") as handle:
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
            layout |= {n: (part.get_dtype(), tuple(part.get_shape())) for n, part in slices.items()}
        readers |= dict.fromkeys(slices, lambda name, path=path: mapped(path).get_tensor(name))
    metadata = _metadata(source, output.stem, type_name)
    tensors = _contents(source.config, layout, readers, schemes, type_name, tables)
    if hollow:
        tensors = [
            replace(tensor, hollow=data_bytes(tensor.type, tensor.shape) > HOLLOW_BYTES)
            for tensor in tensors
        ]
    write_gguf(output, metadata, tensors)
    used = sorted({tensor.type for tensor in tensors})
    return [f"note: {output.name} holds {', '.join(used)} tensors"]


def planned_tensors(
    source: Checkpoint,
    schemes: Mapping[str, Scheme],
    type_name: str,
    tables: Mapping[str, str] = MappingProxyType({}),
) -> list[TensorToWrite]:
    """The tensors of the file that `assemble` writes, by headers alone: they cannot be read."""
    layout = _layout(source)
    for module, scheme in schemes.items():
        _, (rows, columns) = layout[f"{module}.weight"]
        width, block_bytes = GGUF_BLOCKS[str(scheme.ggml_type)]
        layout[module + BLOCKS_SUFFIX] = "U8", (rows, columns // width * block_bytes)
    return _contents(source.config, layout, {}, schemes, type_name, tables)


def planned_bytes(
    source: Checkpoint, tensors: Sequence[TensorToWrite], type_name: str, stem: str
) -> int:
    return gguf_bytes(_metadata(source, stem, type_name), tensors)


def _layout(source: Checkpoint) -> dict[str, Entry]:
    return {name: source.entry(name) for name in source.names}


def _metadata(source: Checkpoint, stem: str, type_name: str) -> dict[str, Any]:
    kind = GGUF_TYPES[mix_name(type_name)][1]
    general = {"name": stem, "file_type": kind, "quantization_version": 2}
    keys = architecture_keys(source.config) | {f"general.{key}": v for key, v in general.items()}
    return keys | sampling_keys(source.generation_config()) | dict(_tokenizer_keys(source))


def _contents(
    config: Mapping[str, Any],
    layout: Mapping[str, Entry],
    readers: Mapping[str, Callable[[str], torch.Tensor]],
    schemes: Mapping[str, Scheme],
    type_name: str,
    tables: Mapping[str, str],
) -> list[TensorToWrite]:
    """The tensors of the file, in its order; `readers` are called when they are written."""
    blocks = (name.removesuffix(BLOCKS_SUFFIX) for name in layout if name.endswith(BLOCKS_SUFFIX))
    replaced = {f"{module}.weight" for module in blocks}
    names = [name for name in _held(layout, config) if name not in replaced]
    entries = {name: layout[name] for name in sorted(names, key=_file_order)}
    # Embedding and output head, where they are not quantized already.
    left = {module: f"{module}.weight" for module in (_EMBEDDING, _HEAD)}
    columns = {m: entries[name][1][1] for m, name in left.items() if name in entries}
    chosen = {**mix_tables(config, columns, type_name), **tables}
    types = {left[module]: block for module, block in chosen.items() if block and module in columns}
    tensors = _Writer(config, readers, schemes, types).tensors(entries)
    factors = rope_factors(config)
    if factors is not None:
        data = factors.tobytes()
        tensors.append(TensorToWrite(ROPE_FACTORS, factors.shape, "F32", lambda: [data]))
    return tensors


def _tokenizer_keys(source: Checkpoint) -> Mapping[str, Any]:
    """The keys of the tokenizer: those of a GGUF source as they are, else of its `tokenizer.json`."""
    if source.source_tokenizer is not None:
        return source.source_tokenizer
    paths = (*source.folder.iterdir(), *source.folder.glob("additional_chat_templates/*"))
    files = [path for path in sorted(paths) if path.suffix in _TOKENIZER_SUFFIXES]
    stamps = [(path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in files]
    vocab_size, ends = int(source.config["vocab_size"]), source.end_token_ids()
    return _read_keys(source.folder, vocab_size, ends, tuple(stamps))


@lru_cache(maxsize=1)
def _read_keys(
    folder: Path, vocab_size: int, ends: frozenset[int], stamps: tuple[tuple[str, int, int], ...]
) -> Mapping[str, Any]:
    # Read once for the plan and the file, as long as no stamp changes.
    return tokenizer_keys(folder, vocab_size, ends)


class _Writer:
    """Converts Hugging Face tensors to GGUF ones: names, row order, types."""

    def __init__(
        self,
        config: Mapping[str, Any],
        readers: Mapping[str, Callable[[str], torch.Tensor]],
        schemes: Mapping[str, Scheme],
        head_types: Mapping[str, str],
    ):
        self._heads, self._rules = permuted_heads(config), writable_rules(config)
        self._readers, self._schemes, self._head_types = readers, schemes, head_types

    def tensors(self, entries: Mapping[str, Entry]) -> list[TensorToWrite]:
        tensors = {name: self.tensor(name, entry) for name, entry in entries.items()}
        groups: dict[str, list[TensorToWrite]] = {tensor.name: [] for tensor in tensors.values()}
        for name in sorted(entries, key=lambda name: expert_of(name) or 0):
            groups[tensors[name].name].append(tensors[name])
        return [_stacked(experts) for experts in groups.values()]

    def tensor(self, name: str, entry: Entry) -> TensorToWrite:
        kept, shape = entry
        target = _gguf_tensor_name(name, self._rules.architecture)
        module = name.removesuffix(BLOCKS_SUFFIX)
        if module != name:
            block = self._schemes[module].ggml_type
            assert block is not None
            width, block_bytes = GGUF_BLOCKS[block]
            logical = shape[0], shape[1] // block_bytes * width
            return TensorToWrite(target, logical, block, lambda: [_bytes(self._rows(name))])
        if len(shape) == 1 or target.endswith(".ffn_gate_inp.weight"):
            return TensorToWrite(target, shape, "F32", lambda: [_bytes(self._vector(name))])
        if name in self._head_types:
            block = self._head_types[name]
            return TensorToWrite(target, shape, block, lambda: self._rounded(name, block))
        return TensorToWrite(target, shape, kept, lambda: [_bytes(self._rows(name))])

    def _rows(self, name: str) -> torch.Tensor:
        tensor = self._readers[name](name)
        for linear, heads in self._heads.items():
            if f".{linear}." in name:
                return to_interleaved(tensor, heads)
        return tensor

    def _vector(self, name: str) -> torch.Tensor:
        values = self._rows(name).to(torch.float32)
        return values + self._rules.norm_offset if name.endswith("norm.weight") else values

    def _rounded(self, name: str, block: str) -> Iterable[bytes]:
        for rows in self._readers[name](name).split(ROWS_AT_ONCE):
            yield _bytes(quantize_blocks(rows, block, name=name))


def _stacked(experts: Sequence[TensorToWrite]) -> TensorToWrite:
    """One tensor of several matrices; a tensor alone is itself."""
    first = experts[0]
    if len(experts) == 1:
        return first
    if any((expert.type, expert.shape) != (first.type, first.shape) for expert in experts):
        raise BadInput(f"{first.name}: all experts of a layer need the same type in GGUF")
    shape, chunks = (len(experts), *first.shape), [expert.chunks for expert in experts]
    return TensorToWrite(
        first.name, shape, first.type, lambda: (chunk for make in chunks for chunk in make())
    )


def _held(names: Iterable[str], config: Mapping[str, Any]) -> list[str]:
    left = (f"{_HEAD}.",) if config.get("tie_word_embeddings") else ()
    return [n for n in names if not n.endswith("rotary_emb.inv_freq") and not n.startswith(left)]


def table_names(source: Checkpoint) -> list[str]:
    """The modules whose tables have a block type of their own: embedding, and a head that is not tied."""
    table = _held(source.names, source.config)
    return [module for module in (_EMBEDDING, _HEAD) if f"{module}.weight" in table]


def table_types(source: Checkpoint, mix: str, tables: Mapping[str, str]) -> dict[str, str]:
    """Block types that `assemble` gives to embedding and output head, by module, without what stays plain."""
    columns = {module: source.shape(f"{module}.weight")[1] for module in table_names(source)}
    chosen = {**mix_tables(source.config, columns, mix), **tables}
    return {module: block for module, block in chosen.items() if block and module in columns}


def mix_tables(config: Mapping[str, Any], columns: Mapping[str, int], mix: str) -> dict[str, str]:
    """Block types that a mix has for embedding and output head of so many columns, where one fits."""
    # Gemma's config leaves its class's default out, as transformers 4 wrote it.
    tied = config.get("tie_word_embeddings", _HEAD not in columns)
    choices = {_EMBEDDING: output_type if tied else embedding_type, _HEAD: output_type}
    types = {module: choices[module](mix, count) for module, count in columns.items()}
    return {module: block for module, block in types.items() if block}


def _gguf_tensor_name(name: str, architecture: str) -> str:
    """`blk.3.attn_q.weight` for `model.layers.3.self_attn.q_proj.weight`, also for its blocks."""
    for ending, theirs in ((BLOCKS_SUFFIX, ".weight"), (".weight", ".weight"), (".bias", ".bias")):
        if name.endswith(ending):
            module = to_gguf(name.removesuffix(ending), architecture)
            if module is not None:
                return module + theirs
    raise BadInput(f"tensor {name} has no name in GGUF: such a model cannot be written")


def _file_order(name: str) -> tuple[int, int, str]:
    if name.startswith(_EMBEDDING):
        return 0, 0, name
    parts = name.split(".")
    return (1, int(parts[2]), name) if name.startswith("model.layers.") else (2, 0, name)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()

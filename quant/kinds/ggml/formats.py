"""GGUF as a weight format, and the second reader of GGUF files, from ggml's `docs/gguf.md`.

A module's blocks go into layer shards; `quant.gguf.assemble` merges the shards into one file at the end.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from ....base.errors import BadInput
from ...base.scheme import Scheme
from ..base.format import Config, TensorSource, WeightFormat
from ..base.kind import Storage
from ..base.raw import Array, Entries, Entry, Raw
from ..base.tensor import QuantizedTensor
from .scheme import GgufScheme
from .tensor import GgufTensor, as_blocks

BLOCKS_SUFFIX = ".gguf_blocks"


class GgufFormat(WeightFormat):
    """ggml blocks, and weights that convert to blocks exactly."""

    name = "gguf"
    markers: tuple[str, ...] = (BLOCKS_SUFFIX,)
    suffixes: tuple[str, ...] = (BLOCKS_SUFFIX,)
    irrelevant: tuple[str, ...] = ("types",)

    def check_scheme(self, scheme: Scheme) -> None:
        if scheme.ggml_type is None:
            raise BadInput(
                f"format gguf cannot hold {scheme.label} weights: choose a block type with "
                "--gguf-type, 4- or 8-bit symmetric ones in groups of 32, or mxfp4"
            )

    def check(self, module: str, out_features: int, in_features: int, scheme: Scheme) -> None:
        self.check_scheme(scheme)
        width, _ = _gguf_scheme(scheme).block
        if in_features % width:
            raise BadInput(
                f"{module} has {in_features} inputs, no multiple of the {width} weights in a "
                f"{_gguf_scheme(scheme).type} block: leave it out with --ignore"
            )

    def held(self, module: str, tensor: QuantizedTensor) -> GgufTensor:
        return as_blocks(module, tensor)

    def pack(self, module: str, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
        return {module + BLOCKS_SUFFIX: as_blocks(module, tensor).data}

    def unpack(self, module: str, source: TensorSource, config: Config) -> GgufTensor:
        scheme, data = self.scheme(config, module), source.tensor(module + BLOCKS_SUFFIX)
        if data.dtype != torch.uint8 or data.dim() != 2 or data.shape[1] % scheme.block[1]:
            raise BadInput(f"{module}: its {tuple(data.shape)} bytes are no {scheme.type} blocks")
        return GgufTensor(data, scheme)

    def config(self, schemes: Mapping[str, Scheme], ignore: Sequence[str]) -> dict[str, Any]:
        return {
            "quant_method": self.name,
            "types": {module: _gguf_scheme(scheme).type for module, scheme in schemes.items()},
            "modules_to_not_convert": list(ignore),
        }

    def scheme(self, config: Config, module: str) -> GgufScheme:
        types = config.get("types")
        if not isinstance(types, Mapping) or module not in types:
            raise BadInput(f"the quantization_config gives {module} no GGUF type")
        return GgufScheme(str(types[module]))

    @staticmethod
    def read_raw(entries: Entries, module: str, config: dict[str, Any]) -> Raw:
        """Blocks with rows in Hugging Face's order; integer codes too, for types of codes and scales only."""
        entry = entries[f"{module}.gguf_blocks"]
        kind, _, size, offsets = _BY_NAME[entry.dtype]
        with entry.path.open("rb") as file:
            file.seek(entry.start)
            data = np.frombuffer(file.read(entry.nbytes), dtype=np.uint8).reshape(
                entry.shape[0], -1
            )
        heads = config["heads"].get(module.rpartition(".")[2])
        if heads:
            pairs = data.reshape(heads, -1, 2, data.shape[1])
            data = np.ascontiguousarray(pairs.transpose(0, 2, 1, 3)).reshape(data.shape)
        blocks = data.reshape(-1, size)
        scales = [blocks[:, at : at + 2] for at in offsets]
        numbers = np.ascontiguousarray(np.concatenate([blocks[:, :0], *scales], axis=1))
        parts: dict[str, Array] = {"data": data}
        shape = (entry.shape[0], entry.shape[1])
        codes: Array | None = None
        if kind == "Q8_0":
            codes = blocks[:, 2:] ^ np.uint8(128)
        elif kind == "Q4_0":
            codes = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1)
        if codes is not None:
            parts["codes"] = codes.reshape(shape)
        return Raw(parts, {"block scales": numbers.view("<f2").astype(np.float32)}, shape)


def _gguf_scheme(scheme: Scheme) -> GgufScheme:
    type_name = scheme.ggml_type
    if type_name is None:
        raise BadInput(f"format gguf cannot hold {scheme.label} weights")
    return GgufScheme(type_name)


_FORMATS = dict(enumerate("BbHhIif?")) | dict(enumerate("Qqd", 10))
# Type number, weights and bytes per block, and offsets of its float16 scales.
_BLOCKS: dict[int, tuple[str, int, int, tuple[int, ...]]] = {
    2: ("Q4_0", 32, 18, (0,)),
    3: ("Q4_1", 32, 20, (0, 2)),
    6: ("Q5_0", 32, 22, (0,)),
    7: ("Q5_1", 32, 24, (0, 2)),
    8: ("Q8_0", 32, 34, (0,)),
    10: ("Q2_K", 256, 84, (80, 82)),
    11: ("Q3_K", 256, 110, (108,)),
    12: ("Q4_K", 256, 144, (0, 2)),
    13: ("Q5_K", 256, 176, (0, 2)),
    14: ("Q6_K", 256, 210, (208,)),
    16: ("IQ2_XXS", 256, 66, (0,)),
    17: ("IQ2_XS", 256, 74, (0,)),
    18: ("IQ3_XXS", 256, 98, (0,)),
    19: ("IQ1_S", 256, 50, (0,)),
    20: ("IQ4_NL", 32, 18, (0,)),
    21: ("IQ3_S", 256, 110, (0,)),
    22: ("IQ2_S", 256, 82, (0,)),
    29: ("IQ1_M", 256, 56, ()),  # its scale is in four parts
    23: ("IQ4_XS", 256, 136, (0,)),
    39: ("MXFP4", 32, 17, ()),  # its scales are exponents of 8 bits
}
_BY_NAME = {block[0]: block for block in _BLOCKS.values()}
_PLAIN = {0: ("F32", 4), 1: ("F16", 2), 30: ("BF16", 2)}
_LINEARS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_qkv": "self_attn.qkv_proj",
}
_PARTS = {"gate": 1, "down": 2, "up": 3}
# Architectures with other linears under these names, and those whose RoPE is interleaved.
_OTHER_LINEARS = {
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "starcoder2": {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
}
_EXPERTS = {
    "qwen3moe": {f"ffn_{name}_exps": f"mlp.experts.{{}}.{name}_proj" for name in _PARTS},
    "llama": {
        f"ffn_{name}_exps": f"block_sparse_moe.experts.{{}}.w{number}"
        for name, number in _PARTS.items()
    },
}
_INTERLEAVED = ("llama", "granite")


def read_gguf_headers(path: Path) -> tuple[Entries, dict[str, Any]]:
    """Quantized linears as `<module>.gguf_blocks`, and the head counts for reordering q and k rows.

    llama.cpp's architectures `llama` and `granite` use interleaved RoPE, so rows of q and k are permuted
    there; the others keep Hugging Face's order.
    """
    with path.open("rb") as file:
        magic, _, num_tensors, num_keys = struct.unpack("<4sIQQ", file.read(24))
        if magic != b"GGUF":
            raise ValueError(f"{path} does not begin with GGUF")
        keys = {}
        for _ in range(num_keys):
            name = _string(file)
            keys[name] = _value(file, *struct.unpack("<I", file.read(4)))
        infos = []
        for _ in range(num_tensors):
            name = _string(file)
            (dims,) = struct.unpack("<I", file.read(4))
            shape = struct.unpack(f"<{dims}Q", file.read(8 * dims))[::-1]
            infos.append((name, shape, *struct.unpack("<IQ", file.read(12))))
        alignment = int(keys.get("general.alignment", 32))
        start = -(-file.tell() // alignment) * alignment
    architecture = str(keys.get("general.architecture"))
    linears = _LINEARS | _OTHER_LINEARS.get(architecture, {})
    entries: Entries = {}
    for name, shape, number, offset in infos:
        if number in _BLOCKS:
            kind, weights, size, _ = _BLOCKS[number]
        else:
            kind, size = _PLAIN[number]
            weights = 1
        begin = start + offset
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+_exps)\.weight", name)
        if layer is not None and number in _BLOCKS:
            stem = _EXPERTS[architecture][layer[2]]
            step = int(np.prod(shape[1:])) // weights * size
            for expert in range(shape[0]):
                at = begin + expert * step
                module = f"model.layers.{layer[1]}.{stem.format(expert)}"
                entries[f"{module}.gguf_blocks"] = Entry(path, kind, shape[1:], at, at + step)
            continue
        nbytes = int(np.prod(shape)) // weights * size
        entries[_entry_name(name, linears, number in _BLOCKS)] = Entry(
            path, kind, tuple(shape), begin, begin + nbytes
        )
    heads = {}
    if architecture in _INTERLEAVED:
        queries = int(keys[f"{architecture}.attention.head_count"])
        heads = {
            "q_proj": queries,
            "k_proj": int(keys.get(f"{architecture}.attention.head_count_kv", queries)),
        }
    return entries, {"heads": heads}


def _entry_name(name: str, linears: dict[str, str], in_blocks: bool) -> str:
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if in_blocks and layer is not None and layer[2] in linears:
        return f"model.layers.{layer[1]}.{linears[layer[2]]}.gguf_blocks"
    if in_blocks and name == "output.weight":
        return "lm_head.gguf_blocks"
    return name


def _string(file: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", file.read(8))
    return file.read(length).decode()


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == 8:
        return _string(file)
    if kind == 9:
        kind, count = struct.unpack("<IQ", file.read(12))
        return [_value(file, kind) for _ in range(count)]
    (value,) = struct.unpack("<" + _FORMATS[kind], file.read(struct.calcsize(_FORMATS[kind])))
    return value


STORAGE = Storage(formats=(GgufFormat(),))

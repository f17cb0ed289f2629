"""GGUF as a weight format, and the second reader of GGUF files, over the reader of the `gguf` package.

A module's blocks go into layer shards; `quant.gguf.assemble` merges the shards into one file at the end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ....base.errors import BadInput
from ....base.extras import import_extra
from ...base.scheme import Scheme
from ..base.format import Config, TensorSource, WeightFormat
from ..base.kind import Storage
from ..base.raw import Array, Entries, Entry, Raw
from ..base.tensor import QuantizedTensor
from .scheme import GGUF_BLOCKS, GgufScheme
from .tensor import GgufTensor, as_blocks

BLOCKS_SUFFIX = ".gguf_blocks"


class GgufFormat(WeightFormat):
    """ggml blocks, and weights that convert to blocks exactly."""

    name = "gguf"
    markers: tuple[str, ...] = (BLOCKS_SUFFIX,)
    suffixes: tuple[str, ...] = (BLOCKS_SUFFIX,)
    irrelevant: tuple[str, ...] = ("types",)
    plain_head = True

    def lists_plain(self, config: Config) -> bool:
        return False

    def check_scheme(self, scheme: Scheme) -> None:
        if scheme.ggml_type is None:
            raise BadInput(
                f"format gguf cannot hold {scheme.label} weights: choose a block type with "
                "--gguf-type, 4- or 8-bit symmetric ones in groups of 32, or mxfp4"
            )

    def check(self, module: str, out_features: int, in_features: int, scheme: Scheme) -> None:
        self.check_scheme(scheme)
        width, _ = GGUF_BLOCKS[str(scheme.ggml_type)]
        if in_features % width:
            raise BadInput(
                f"{module} has {in_features} inputs, no multiple of the {width} weights in a "
                f"{scheme.ggml_type} block: leave it out with --ignore"
            )

    def held(self, tensor: QuantizedTensor) -> GgufTensor:
        return as_blocks(tensor)

    def pack(self, module: str, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
        return {module + BLOCKS_SUFFIX: as_blocks(tensor).data}

    def unpack(self, module: str, source: TensorSource, config: Config) -> GgufTensor:
        scheme, data = self.scheme(config, module), source.tensor(module + BLOCKS_SUFFIX)
        if data.dtype != torch.uint8 or data.dim() != 2 or data.shape[1] % scheme.block[1]:
            raise BadInput(f"{module}: its {tuple(data.shape)} bytes are no {scheme.type} blocks")
        return GgufTensor(data, scheme)

    def config(self, schemes: Mapping[str, Scheme], ignore: Sequence[str]) -> dict[str, Any]:
        return {
            "quant_method": self.name,
            "types": {module: scheme.ggml_type for module, scheme in schemes.items()},
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
        kind = entry.dtype
        gguf = import_extra("a GGUF file", "gguf", "gguf")
        _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
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
        scales = [blocks[:, at : at + 2] for at in _SCALES_AT.get(kind, (0,))]
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


# Offsets of the float16 scales in a block, where there is not one at its beginning. The scale of IQ1_M is in
# four parts, those of MXFP4 are exponents of 8 bits.
_SCALES_AT: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "IQ1_M": (),
    "MXFP4": (),
}
_PLAIN = ("F32", "F16", "BF16")
_LINEARS = {
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    "attn_output": "self_attn.o_proj",
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
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
    """Quantized linears as `<module>.gguf_blocks`, and the head counts of `llama` and `granite`, whose rows
    of q and k are permuted for interleaved RoPE."""
    reader = import_extra("a GGUF file", "gguf", "gguf").GGUFReader(path)
    keys = {
        name: field.contents() for name, field in reader.fields.items() if "tokenizer" not in name
    }
    architecture = str(keys.get("general.architecture"))
    linears = _LINEARS | _OTHER_LINEARS.get(architecture, {})
    entries: Entries = {}
    for tensor in reader.tensors:
        name, kind = tensor.name, tensor.tensor_type.name
        shape = tuple(map(int, reversed(tensor.shape)))
        begin, nbytes = int(tensor.data_offset), int(tensor.n_bytes)
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
        if kind in _PLAIN:
            entries[name] = Entry(path, kind, shape, begin, begin + nbytes)
        elif layer is not None and layer[2].endswith("_exps"):
            stem, step = _EXPERTS[architecture][layer[2]], nbytes // shape[0]
            for expert, start in enumerate(range(begin, begin + nbytes, step)):
                module = f"model.layers.{layer[1]}.{stem.format(expert)}"
                entry = Entry(path, kind, shape[1:], start, start + step)
                entries[module + BLOCKS_SUFFIX] = entry
        else:
            if layer is not None and layer[2] in linears:
                name = f"model.layers.{layer[1]}.{linears[layer[2]]}{BLOCKS_SUFFIX}"
            elif name == "output.weight":
                name = f"lm_head{BLOCKS_SUFFIX}"
            entries[name] = Entry(path, kind, shape, begin, begin + nbytes)
    if architecture not in _INTERLEAVED:
        return entries, {"heads": {}}
    queries = int(keys[f"{architecture}.attention.head_count"])
    shared = int(keys.get(f"{architecture}.attention.head_count_kv", queries))
    return entries, {"heads": {"q_proj": queries, "k_proj": shared}}


STORAGE = Storage(formats=(GgufFormat(),))

"""How 4-bit codes are stored: bitsandbytes alone, written without that package (`docs/formats.md`)."""

from __future__ import annotations

import json
from typing import Any, Literal

import numpy as np
import torch

from ....base.errors import BadInput
from ..base.containers import BitsAndBytesCodes
from ..base.format import COMPUTE_DTYPE, Config, Stored
from ..base.kind import Storage
from ..base.raw import Array, Entries, Floats, Raw, read_array
from .kind import NESTED_BLOCK, CodebookTensor, codebook
from .scheme import CodebookScheme

_STATE = ".weight.quant_state.bitsandbytes__"
_Kind = Literal["nf4", "fp4"]
_KINDS: tuple[_Kind, ...] = ("nf4", "fp4")


class CodebookCodes(BitsAndBytesCodes):
    """nf4 and fp4 in bitsandbytes."""

    bits = 4
    marker = ".weight.absmax"
    suffixes: tuple[str, ...] = (
        *(".weight", ".weight.absmax", ".weight.quant_map"),
        *(".weight.nested_absmax", ".weight.nested_quant_map"),
        *(_STATE + kind for kind in _KINDS),
    )

    def fields(self, scheme: CodebookScheme) -> dict[str, Any]:
        double = scheme.double_quant
        return {"bnb_4bit_quant_type": scheme.kind, "bnb_4bit_use_double_quant": double}

    def scheme(self, config: Config) -> CodebookScheme:
        kind = config.get("bnb_4bit_quant_type", "fp4")
        if kind not in _KINDS:
            raise BadInput(f"quant_method bitsandbytes with {kind!r} is not supported")
        if config.get("bnb_4bit_quant_storage", "uint8") != "uint8":
            raise BadInput("quant_method bitsandbytes with codes stored as floats is not supported")
        return CodebookScheme(kind, double_quant=bool(config.get("bnb_4bit_use_double_quant")))

    def check(self, module: str, out_features: int, in_features: int, scheme: Any) -> None:
        if out_features * in_features % 2:
            raise BadInput(
                f"format bitsandbytes cannot pack {module}: its {out_features} × {in_features} weights "
                "are an odd number; leave it out with --ignore"
            )

    def pack(self, module: str, tensor: CodebookTensor) -> dict[str, torch.Tensor]:
        codes = tensor.codes.flatten()
        scheme = tensor.scheme
        state: dict[str, Any] = {"quant_type": scheme.kind, "blocksize": scheme.block_size}
        state |= {"dtype": COMPUTE_DTYPE, "shape": list(tensor.shape)}
        stored = {
            f"{module}.weight": ((codes[0::2] << 4) | codes[1::2]).view(-1, 1),
            f"{module}.weight.absmax": tensor.absmax,
            f"{module}.weight.quant_map": codebook(tensor.scheme.kind),
        }
        if tensor.nested_absmax is not None:
            assert tensor.nested_map is not None and tensor.nested_offset is not None
            stored[f"{module}.weight.nested_absmax"] = tensor.nested_absmax
            stored[f"{module}.weight.nested_quant_map"] = tensor.nested_map
            state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32"}
            state["nested_offset"] = tensor.nested_offset.item()
        text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        return stored | {module + _STATE + tensor.scheme.kind: text}

    def unpack(self, stored: Stored, config: Config) -> CodebookTensor:
        kind: _Kind = "fp4" if f"{_STATE[1:]}fp4" in stored else "nf4"
        state = _read_state(stored, _STATE[1:] + kind)
        out_features, in_features = state["shape"]
        size, count = state["blocksize"], out_features * in_features
        scheme = CodebookScheme(kind, size, double_quant="nested_offset" in state)
        packed = stored.tensor("weight", torch.uint8)
        if packed.numel() * 2 != count:
            raise BadInput(
                f"{stored.module}.weight has {packed.numel()} bytes, but its quant_state implies "
                f"{count // 2}"
            )
        table = stored.tensor("weight.quant_map", shape=(16,)).cpu().to(torch.float32)
        if not torch.allclose(table, codebook(kind), rtol=0, atol=1e-6):
            name = f"{stored.module}.weight.quant_map"
            raise BadInput(f"{name} is not the table of {kind}: its codes would be read wrong")
        dtype = torch.uint8 if scheme.double_quant else torch.float32
        absmax = stored.tensor("weight.absmax", dtype, shape=(-(-count // size),))
        codes = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], dim=1)
        codes = codes.view(out_features, in_features)
        if not scheme.double_quant:
            return CodebookTensor(codes, absmax, scheme)
        sizes = {"absmax": -(-absmax.numel() // NESTED_BLOCK), "quant_map": NESTED_BLOCK}
        nested_absmax, nested_map = (
            stored.tensor(f"weight.nested_{part}", torch.float32, shape=(length,))
            for part, length in sizes.items()
        )
        offset = nested_map.new_tensor([state["nested_offset"]])
        return CodebookTensor(codes, absmax, scheme, nested_absmax, nested_map, offset)

    def read_raw(self, entries: Entries, module: str) -> Raw:
        prefix = f"{module}.weight.quant_state."
        (state_name,) = [name for name in entries if name.startswith(prefix)]
        state = json.loads(read_array(entries[state_name], "U8").tobytes())
        out_features, in_features = state["shape"]
        packed = read_array(entries[f"{module}.weight"], "U8").reshape(-1)
        codes = np.stack([packed // 16, packed % 16], axis=1).reshape(out_features, in_features)
        absmax = read_array(entries[f"{module}.weight.absmax"], "F32", "U8")
        if absmax.size != -(-codes.size // state["blocksize"]):
            raise ValueError(f"absmax has {absmax.size} values for {codes.size} weights")
        parts: dict[str, Array] = {"codes": codes, "absmax": absmax}
        numbers: dict[str, Floats] = {} if absmax.dtype == np.uint8 else {"absmax": absmax}
        if "nested_offset" in state:
            parts["nested_absmax"] = read_array(entries[f"{module}.weight.nested_absmax"], "F32")
            parts["nested_map"] = read_array(entries[f"{module}.weight.nested_quant_map"], "F32")
            parts["nested_offset"] = np.array([state["nested_offset"]], dtype=np.float32)
            numbers |= {name: part for name, part in parts.items() if name.startswith("nested")}
        return Raw(parts, numbers, (out_features, in_features))


def _read_state(stored: Stored, ending: str) -> dict[str, Any]:
    data = stored.tensor(ending, torch.uint8)
    try:
        state = json.loads(bytes(data.tolist()))
        size, shape = int(state["blocksize"]), [int(width) for width in state["shape"]]
        if len(shape) != 2 or size < 1 or min(shape) < 1:
            raise ValueError("its shape is no matrix")
        if "nested_offset" in state and state.get("nested_blocksize") != NESTED_BLOCK:
            raise ValueError(f"its nested blocks are not {NESTED_BLOCK}")
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{stored.module}.{ending} cannot be read: {error}") from error
    return state | {"blocksize": size, "shape": shape}


STORAGE = Storage(bitsandbytes=CodebookCodes())

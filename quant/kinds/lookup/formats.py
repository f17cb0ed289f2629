"""SqueezeLLM format: lookup tables and sparse weights (`quant_method: squeezellm`), llmopt's own layout.

Layout in `docs/formats.md`; only this engine reads it. The names `qweight` and `lookup_table` are those of
the authors' code (github.com/SqueezeAILab/SqueezeLLM), whose packing is tied to its CUDA kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ....base.errors import BadInput
from ...base.scheme import Scheme
from ..base.format import (
    Config,
    Stored,
    TensorSource,
    WeightFormat,
    held_scheme,
    only_scheme,
    pack_words,
    unpack_words,
)
from ..base.kind import Storage
from ..base.raw import Array, Entries, Raw, bit_fields, read_array
from ..base.tensor import QuantizedTensor
from .kind import LookupTensor
from .scheme import LookupScheme


class SqueezeLlmFormat(WeightFormat):
    """Lookup tables and CSR sparse weights, in llmopt's own layout."""

    name = "squeezellm"
    markers: tuple[str, ...] = (".lookup_table",)
    plain_head = True
    suffixes: tuple[str, ...] = (
        *(".qweight", ".lookup_table", ".weight_shape"),
        *(".sparse_rows", ".sparse_columns", ".sparse_values"),
    )

    def _scheme(self, scheme: Scheme) -> LookupScheme:
        return held_scheme(self.name, scheme, LookupScheme, ": only look-up tables")

    def check_scheme(self, scheme: Scheme) -> None:
        self._scheme(scheme)

    def pack(self, module: str, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
        assert isinstance(tensor, LookupTensor)
        stored = {
            "qweight": pack_words(tensor.codes, tensor.scheme.bits),
            "lookup_table": tensor.table,
            "weight_shape": torch.tensor(tensor.shape, dtype=torch.int64),
            "sparse_rows": tensor.sparse_rows,
            "sparse_columns": tensor.sparse_columns,
            "sparse_values": tensor.sparse_values,
        }
        return {f"{module}.{name}": part for name, part in stored.items() if part is not None}

    def unpack(self, module: str, source: TensorSource, config: Config) -> LookupTensor:
        scheme, stored = self.scheme(config, module), Stored(source, module)
        out_features, in_features = stored.weight_shape()
        words = (out_features, -(-in_features * scheme.bits // 32))
        codes = unpack_words(stored.tensor("qweight", torch.int32, shape=words), scheme.bits)
        table = stored.tensor("lookup_table", torch.float16, shape=(out_features, 2**scheme.bits))
        codes = codes[:, :in_features].contiguous()
        sparse = self._sparse(stored, out_features, in_features)
        return LookupTensor(codes, table, scheme, *sparse)

    @staticmethod
    def _sparse(
        stored: Stored, out_features: int, in_features: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        if not any(f"sparse_{part}" in stored for part in ("rows", "columns", "values")):
            return None, None, None
        rows = stored.tensor("sparse_rows", torch.int32, shape=(out_features + 1,))
        if int(rows[0]) != 0 or bool((rows.diff() < 0).any()):
            raise BadInput(f"{stored.module}.sparse_rows does not begin at 0 or goes backwards")
        count = int(rows[-1])
        columns = stored.tensor("sparse_columns", torch.int32, shape=(count,))
        if count and not 0 <= int(columns.min()) <= int(columns.max()) < in_features:
            name = f"{stored.module}.sparse_columns"
            raise BadInput(f"{name} names columns outside 0..{in_features - 1}")
        return rows, columns, stored.tensor("sparse_values", torch.float16, shape=(count,))

    def config(self, schemes: Mapping[str, Scheme], ignore: Sequence[str]) -> dict[str, Any]:
        scheme = self._scheme(only_scheme(self.name, schemes))
        return {
            "quant_method": "squeezellm",
            "bits": scheme.bits,
            "sparse_fraction": scheme.sparse_fraction,
            "modules_to_not_convert": list(ignore),
        }

    def scheme(self, config: Config, module: str) -> LookupScheme:
        bits = config.get("bits", config.get("wbits"))
        if not isinstance(bits, int):
            raise BadInput("quant_method squeezellm without bits in its config is not supported")
        return LookupScheme(bits, float(config.get("sparse_fraction", 0.0)))

    @staticmethod
    def read_raw(entries: Entries, module: str, config: dict[str, Any]) -> Raw:
        """llmopt's SqueezeLLM layout: bit streams and tables per row, CSR sparse weights."""
        bits = int(config["bits"])
        out_features, in_features = read_array(entries[f"{module}.weight_shape"], "I64").tolist()
        words = read_array(entries[f"{module}.qweight"], "I32")
        table = read_array(entries[f"{module}.lookup_table"], "F16")
        if words.shape[0] != out_features or table.shape != (out_features, 1 << bits):
            raise ValueError(f"qweight {words.shape} and lookup_table {table.shape} do not fit")
        parts: dict[str, Array] = {"codes": bit_fields(words, bits, in_features), "table": table}
        problems: tuple[str, ...] = ()
        if f"{module}.sparse_rows" in entries:
            rows = read_array(entries[f"{module}.sparse_rows"], "I32").view(np.int32)
            columns = read_array(entries[f"{module}.sparse_columns"], "I32").view(np.int32)
            values = read_array(entries[f"{module}.sparse_values"], "F16")
            if len(rows) != out_features + 1 or not rows[-1] == len(columns) == len(values):
                raise ValueError("the sparse weights do not fit their rows")
            if columns.size and (columns.min() < 0 or columns.max() >= in_features):
                problems = (f"has sparse weights outside columns 0..{in_features - 1}",)
            parts |= {"sparse_rows": rows, "sparse_columns": columns, "sparse_values": values}
        floats = parts.keys() & {"table", "sparse_values"}
        numbers = {name: parts[name].astype(np.float32) for name in sorted(floats, reverse=True)}
        return Raw(parts, numbers, (out_features, in_features), problems)


STORAGE = Storage(formats=(SqueezeLlmFormat(),))

"""The toy kind's format: `P.signs` uint8 `[out, in / 8]`, the first channel lowest, `P.magnitude` float16."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from llmopt.base.errors import BadInput
from llmopt.quant.base.scheme import Scheme
from llmopt.quant.kinds.base.format import (
    Config,
    Stored,
    TensorSource,
    WeightFormat,
    held_scheme,
)
from llmopt.quant.kinds.base.kind import Storage
from llmopt.quant.kinds.base.raw import Entries, Raw, read_array
from llmopt.quant.kinds.base.tensor import QuantizedTensor

from .kind import ToyTensor
from .scheme import ToyScheme

_BITS = torch.arange(8, dtype=torch.uint8)


class ToyFormat(WeightFormat):
    name = "toy"
    markers: tuple[str, ...] = (".signs",)
    suffixes: tuple[str, ...] = (".signs", ".magnitude")
    rounds_to = ToyScheme()

    def check_scheme(self, scheme: Scheme) -> None:
        held_scheme(self.name, scheme, ToyScheme)

    def check(self, module: str, out_features: int, in_features: int, scheme: Scheme) -> None:
        self.check_scheme(scheme)
        if in_features % 8:
            raise BadInput(f"{module} has {in_features} inputs, no whole bytes of signs")

    def pack(self, module: str, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
        assert isinstance(tensor, ToyTensor)
        bits = (tensor.signs > 0).to(torch.uint8).unflatten(1, (-1, 8)) << _BITS
        signs = bits.sum(dim=-1, dtype=torch.uint8)
        return {f"{module}.signs": signs, f"{module}.magnitude": tensor.magnitude}

    def unpack(self, module: str, source: TensorSource, config: Config) -> ToyTensor:
        stored = Stored(source, module)
        packed = stored.matrix("signs", torch.uint8)
        signs = (((packed.unsqueeze(-1) >> _BITS) & 1).to(torch.int8) * 2 - 1).flatten(1)
        magnitude = stored.tensor("magnitude", torch.float16, shape=(len(packed),))
        return ToyTensor(signs, magnitude, ToyScheme())

    def config(self, schemes: Mapping[str, Scheme], ignore: Sequence[str]) -> dict[str, Any]:
        return {"quant_method": "toy", "modules_to_not_convert": list(ignore)}

    def scheme(self, config: Config, module: str) -> Scheme:
        return ToyScheme()

    @staticmethod
    def read_raw(entries: Entries, module: str, config: dict[str, Any]) -> Raw:
        packed = read_array(entries[f"{module}.signs"], "U8")
        magnitude = read_array(entries[f"{module}.magnitude"], "F16")
        signs = np.unpackbits(packed, axis=1, bitorder="little").astype(np.int8) * 2 - 1
        numbers = {"magnitude": magnitude.astype(np.float32)}
        return Raw(
            {"signs": signs, "magnitude": magnitude}, numbers, (signs.shape[0], signs.shape[1])
        )


STORAGE = Storage(formats=(ToyFormat(),))

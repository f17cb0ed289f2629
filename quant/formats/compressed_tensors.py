"""compressed-tensors format, read by transformers, vLLM and this engine.

Its layouts are in `ct_layouts`, its config in `ct_config`. Modules of one model may have several schemes;
then every config group lists its modules, and where the layouts differ too, the model's layout is
`mixed-precision`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..base.errors import BadInput
from ..base.scheme import Scheme
from ..kinds.fp4.scheme import Fp4Scheme
from ..kinds.fp8.scheme import FloatScheme
from ..kinds.integer.scheme import IntScheme
from ..tensors.base import QuantizedTensor
from ..tensors.fp4 import Fp4Tensor
from ..tensors.fp8 import Fp8Tensor
from ..tensors.integer import IntTensor
from .base import Config, TensorSource, check_groups
from .ct_config import FLOAT, INT8, MIXED, CtScheme, find_group, group_of, layout_of, read_group
from .ct_fp4 import check_blocks, pack_fp4, unpack_fp4
from .ct_layouts import pack_codes, pack_float, pack_int8, unpack_codes, unpack_float, unpack_int8

_EXPERT = re.compile(r".*\.experts\.\d+\..*")
# `kv_cache_scheme`: static per-tensor fp8 scales, the only kind that vLLM reads besides those per head.
_KV_CACHE = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor",
    "dynamic": False,
}


class CompressedTensorsFormat:
    """compressed-tensors: integers of 2 to 8 bits, int8, fp8, NVFP4 and MXFP4 with or without activations."""

    name = "compressed-tensors"
    markers: tuple[str, ...] = (".weight_packed", ".weight_scale")
    suffixes: tuple[str, ...] = (
        ".weight_packed",
        ".weight",
        ".weight_scale",
        ".weight_zero_point",
        ".weight_shape",
        ".weight_g_idx",
        ".weight_global_scale",
        ".input_global_scale",
        ".input_scale",
        ".input_zero_point",
    )

    def _scheme(self, scheme: Scheme) -> CtScheme:
        if not isinstance(scheme, CtScheme):
            raise BadInput(f"format {self.name} cannot hold {scheme.label} weights")
        return scheme

    def check_scheme(self, scheme: Scheme) -> None:
        layout_of(self._scheme(scheme))

    def check(self, module: str, out_features: int, in_features: int, scheme: Scheme) -> None:
        # Rows are padded to whole words, so any width packs; only group sizes must divide.
        if isinstance(scheme, IntScheme):
            check_groups(module, in_features, scheme)
        elif isinstance(scheme, Fp4Scheme):
            check_blocks(module, in_features, scheme)
        activations = scheme.activations
        if activations is not None and activations.granularity == "group128" and in_features % 128:
            raise BadInput(
                f"{module} has {in_features} inputs, and readers of compressed-tensors quantize inputs in "
                "groups of 128 only where that divides them: leave it out with --ignore"
            )

    def scale_dtype(self, weights: torch.dtype, scheme: Scheme) -> torch.dtype:
        return weights

    def pack(self, module: str, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
        if isinstance(tensor, Fp8Tensor):
            return pack_float(module, tensor)
        if isinstance(tensor, Fp4Tensor):
            return pack_fp4(module, tensor)
        assert isinstance(tensor, IntTensor)
        return (pack_int8 if layout_of(tensor.scheme) == INT8 else pack_codes)(module, tensor)

    def unpack(self, module: str, source: TensorSource, config: Config) -> QuantizedTensor:
        layout, scheme = read_group(*find_group(config, module))
        if isinstance(scheme, Fp4Scheme):
            return unpack_fp4(module, source, scheme)
        if layout == FLOAT:
            assert isinstance(scheme, FloatScheme)
            return unpack_float(module, source, scheme)
        assert isinstance(scheme, IntScheme)
        return (unpack_int8 if layout == INT8 else unpack_codes)(module, source, scheme)

    def config(
        self,
        schemes: Mapping[str, Scheme],
        ignore: Sequence[str],
        *,
        kv_cache: str | None = None,
        kv_cache_strategy: str = "tensor",
    ) -> dict[str, Any]:
        """See `WeightFormat.config`.

        Args:
            kv_cache: `fp8` where `k_scale` and `v_scale` are stored beside the attention layers.
            kv_cache_strategy: `tensor`, or `attn_head` where each KV head has its own.
        """
        members: dict[CtScheme, list[str]] = {}
        for module, scheme in schemes.items():
            members.setdefault(self._scheme(scheme), []).append(module)
        layouts = {scheme: layout_of(scheme) for scheme in members}
        mixed = len(set(layouts.values())) > 1
        groups = {}
        experts = {scheme for scheme, names in members.items() if any(map(_EXPERT.match, names))}
        for index, (scheme, modules) in enumerate(members.items()):
            targets = modules if experts != {scheme} else _with_pattern_of_experts(modules)
            group = group_of(scheme, ["Linear"] if len(members) == 1 else targets)
            groups[f"group_{index}"] = group | ({"format": layouts[scheme]} if mixed else {})
        return {
            "quant_method": self.name,
            "format": MIXED if mixed else next(iter(layouts.values())),
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": [*ignore, *_inside_experts(ignore)],
            "kv_cache_scheme": None
            if kv_cache is None
            else _KV_CACHE | {"strategy": kv_cache_strategy},
        }

    def kv_scale_name(self, name: str) -> str:
        """The name itself."""
        return name

    def scheme(self, config: Config, module: str) -> CtScheme:
        return read_group(*find_group(config, module))[1]


def _with_pattern_of_experts(modules: Sequence[str]) -> list[str]:
    """Targets with a pattern for all experts, by which transformers finds the scheme of what it merges."""
    return [f"re:{_EXPERT.pattern}", *(name for name in modules if not _EXPERT.match(name))]


def _inside_experts(ignore: Sequence[str]) -> list[str]:
    """Patterns for the linears in fused experts, whose schemes vLLM looks up by the names they would have."""
    return [f"re:{re.escape(name)}\\..*" for name in ignore if name.endswith(".experts")]

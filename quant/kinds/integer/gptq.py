"""GPTQ format (AutoGPTQ, GPTQModel; `quant_method: gptq`), read by vLLM, transformers and this engine.

Version 1 cannot store a zero point of 0, so it is for symmetric weights, and `gptq_v2` for others. Some tools
label version 2 as 1: equal zero points, in the bytes, tell them apart.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ....base.errors import BadInput
from ...base.scheme import PER_CHANNEL, Scheme
from ..base.format import (
    Config,
    Skips,
    Stored,
    TensorSource,
    WeightFormat,
    held_scheme,
    matches,
    pack_words,
    unpack_words,
)
from ..base.tensor import SCALE_DTYPES, QuantizedTensor
from .kind import IntTensor, sequential_groups
from .raw import read_gptq
from .scheme import IntScheme

_BITS = (2, 3, 4, 8)
_VERSIONS = {"gptq": 1, "gptq_v2": 0}  # added to a stored zero point by a reader
_MULTIPLE = 32  # AutoGPTQ and the kernels require it of both dimensions, for all bits
# vLLM fuses these and looks the fused name up, so an override of the first names the fused one as well.
_FUSED = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj"}


class GptqFormat(WeightFormat):
    """GPTQ format: 2, 3, 4 or 8 bits, symmetric or not, sequential groups or `g_idx`."""

    name = "gptq"
    markers: tuple[str, ...] = (".qweight",)
    suffixes: tuple[str, ...] = (".qweight", ".qzeros", ".scales", ".g_idx")
    irrelevant: tuple[str, ...] = ("lm_head", "desc_act", "checkpoint_format", "format")
    plain_head = True
    read_raw = staticmethod(read_gptq)

    def lists_plain(self, config: Config) -> bool:
        return bool(config.get("dynamic"))  # else loaders look which linears have codes

    def skips(self, config: Config) -> Skips:
        """The first pattern of `dynamic` that matches excludes if it begins with `-:`."""
        # A pattern of GPTQModel has a sign, or none for "+:".
        rules = [
            (rule[:2] == "-:", re.sub(r"^[-+]:", "", rule)) for rule in config.get("dynamic") or {}
        ]
        return lambda name: next((skips for skips, rule in rules if matches(rule, name)), False)

    def check_scheme(self, scheme: Scheme) -> None:
        scheme = held_scheme(self.name, scheme, IntScheme)
        if scheme.activations is not None:
            raise BadInput(
                f"format gptq cannot hold {scheme.label} weights: it does not quantize activations"
            )
        if scheme.bits not in _BITS:
            raise BadInput(
                f"format gptq holds 2, 3, 4 or 8 bits, not {scheme.bits}: "
                "use --format compressed-tensors"
            )

    def check(self, module: str, out_features: int, in_features: int, scheme: Scheme) -> None:
        for side, width in (("inputs", in_features), ("outputs", out_features)):
            if width % _MULTIPLE:
                raise BadInput(
                    f"format gptq cannot pack {module}: its {width} {side} are no multiple of "
                    f"{_MULTIPLE}; leave it out with --ignore, or use --format compressed-tensors"
                )
        held_scheme(self.name, scheme, IntScheme).check_groups(module, in_features)

    def pack(self, module: str, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
        assert isinstance(tensor, IntTensor)
        scheme, index = tensor.scheme, tensor.group_index
        if index is None:
            index = sequential_groups(scheme, tensor.in_features)
        stored_zeros = tensor.zeros.t() - (1 if scheme.symmetric else 0)
        return {
            f"{module}.qweight": pack_words(tensor.codes, scheme.bits).t().contiguous(),
            f"{module}.qzeros": pack_words(stored_zeros, scheme.bits),
            f"{module}.scales": tensor.scales.t().contiguous(),
            f"{module}.g_idx": index.to(torch.int32),
        }

    def unpack(self, module: str, source: TensorSource, config: Config) -> IntTensor:
        scheme, stored = self.scheme(config, module), Stored(source, module)
        words = stored.matrix("qweight", torch.int32)
        in_features, out_features = words.shape[0] * 32 // scheme.bits, words.shape[1]
        scheme.check_groups(module, in_features)
        groups = scheme.num_groups(in_features)
        shape = groups, out_features * scheme.bits // 32
        stored_zeros = unpack_words(stored.tensor("qzeros", torch.int32, shape=shape), scheme.bits)
        scales = stored.tensor("scales", *SCALE_DTYPES, shape=(groups, out_features))
        index = None
        if "g_idx" in stored:
            index = stored.group_index("g_idx", in_features, groups)
            in_order = sequential_groups(scheme, in_features).to(index.device)
            # All zeros stand for no index, as in exllamav2 and text-generation-inference.
            if not index.any() or torch.equal(index, in_order):
                index = None
        offset = zero_offset(stored_zeros, scheme, config, module)
        return IntTensor(
            codes=unpack_words(words.t(), scheme.bits),
            scales=scales.t().contiguous(),
            zeros=((stored_zeros + offset) & scheme.max_code).t().contiguous(),
            scheme=replace(scheme, permuted=index is not None),
            group_index=index,
        )

    def config(self, schemes: Mapping[str, Scheme], ignore: Sequence[str]) -> dict[str, Any]:
        kinds = {
            name: held_scheme(self.name, scheme, IntScheme) for name, scheme in schemes.items()
        }
        if len({scheme.symmetric for scheme in kinds.values()}) != 1:
            raise BadInput(
                "format gptq stores the zero codes of a model in one way: make all modules symmetric "
                "or none, or use --format compressed-tensors"
            )
        in_use = list(kinds.values())
        base = max(dict.fromkeys(in_use), key=in_use.count)
        plain = (name for name in ignore if name != "lm_head")
        dynamic: dict[str, Any] = {f"-:{_pattern(name)}": {} for name in plain}
        others = ((name, scheme) for name, scheme in kinds.items() if scheme != base)
        dynamic |= {f"+:{_pattern(name)}": _fields(scheme) for name, scheme in others}
        config: dict[str, Any] = {
            "quant_method": "gptq",
            **_fields(base),
            "checkpoint_format": "gptq" if base.symmetric else "gptq_v2",
            "pack_dtype": "int32",
            "static_groups": False,
            "true_sequential": True,
            "lm_head": "lm_head" in schemes,
        }
        return config | ({"dynamic": dynamic} if dynamic else {})

    def scheme(self, config: Config, module: str) -> IntScheme:
        version_offset(config)
        dynamic: Config = config.get("dynamic") or {}
        # GPTQModel takes the first that matches the beginning of the name; no sign is a plus.
        positive = (key for key in dynamic if not key.startswith("-:"))
        key = next((key for key in positive if matches(key.removeprefix("+:"), module)), None)
        return self._scheme(config, {} if key is None else dynamic[key])

    def read_config(self, config: Config, modules: Collection[str]) -> None:
        self.scheme(config, min(modules))
        self.expect(config, pack_dtype=("int32",), act_bits=(16, 32))
        for key, override in (config.get("dynamic") or {}).items():
            if key.startswith("-:"):
                tuple((override or {}).values())  # of modules that have no codes
            else:
                self._scheme(config, override)

    @staticmethod
    def _scheme(config: Config, override: Config | None) -> IntScheme:
        """The scheme of modules whose entry of `dynamic` is `override`."""

        def field(name: str, default: Any = None) -> Any:
            return (override or {}).get(name, config.get(name, default))

        bits = field("bits")
        if bits not in _BITS:
            raise BadInput(
                f"quant_method gptq with {bits} bits is not supported: only 2, 3, 4 and 8"
            )
        group_size = int(field("group_size", 128))
        group_size = PER_CHANNEL if group_size < 1 else group_size
        permuted = field("desc_act") and not field("static_groups") and group_size != PER_CHANNEL
        return IntScheme(bits, group_size, bool(field("sym", True)), permuted=bool(permuted))


def version_offset(config: Config) -> int:
    """The zero-point offset of the `checkpoint_format` label; BadInput for unknown labels."""
    label = config.get("checkpoint_format") or config.get("format") or "gptq"
    if label not in _VERSIONS:
        raise BadInput(
            f"quant_method gptq with checkpoint_format {label!r} is not supported: "
            f"only {' and '.join(_VERSIONS)}"
        )
    return _VERSIONS[label]


def zero_offset(stored: torch.Tensor, scheme: IntScheme, config: Config, module: str) -> int:
    """The zero-point offset: from the stored values where they are conclusive, else from the label."""
    if not scheme.symmetric:
        return version_offset(config)
    for offset in (1, 0):
        if bool((stored == scheme.middle - offset).all()):
            return offset
    raise BadInput(
        f"{module}.qzeros: its config says symmetric, but the zero codes are not all "
        f"{scheme.middle - 1} (gptq) or {scheme.middle} (gptq_v2)"
    )


def _fields(scheme: IntScheme) -> dict[str, Any]:
    return {
        "bits": scheme.bits,
        "group_size": scheme.group_size,
        "desc_act": scheme.permuted,
        "sym": scheme.symmetric,
    }


def _pattern(module: str) -> str:
    parent, _, leaf = module.rpartition(".")
    names = re.escape(leaf) if leaf not in _FUSED else f"(?:{leaf}|{_FUSED[leaf]})"
    return f"^{re.escape(parent)}\\.{names}$" if parent else f"^{names}$"

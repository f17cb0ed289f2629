"""The linears of a checkpoint with their stored schemes, as engines see them: by names, headers and config.

The schemes are read by the formats' own readers. What no reader here takes, and an engine may, is described
from the config alone (`described`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...base.errors import BadInput
from ..base.scheme import Scheme
from ..families.registry import type_of
from ..formats.compressed_tensors import find_group
from ..formats.registry import module_scheme, quantized_modules
from ..kinds.codebook.scheme import CodebookScheme
from ..kinds.fp4.scheme import Fp4Scheme
from ..kinds.fp8.scheme import FloatScheme
from ..kinds.ggml.scheme import GgufScheme
from ..kinds.integer.scheme import IntScheme
from ..model.checkpoint import Checkpoint, gguf_file_of
from ..model.parameters import ModelParameters, model_parameters, unquantized_modules
from ..plan.loaders import CheckpointContents
from .findings import Finding
from .headers import HeaderCheckpoint

# Endings of tensors that only a quantized linear has, over all methods.
_MARKERS = (
    *(".weight_packed", ".qweight", ".weight_scale", ".weight_scale_inv", ".SCB"),
    *(".weight.absmax", ".gguf_blocks", ".trellis", ".Qidxs", ".lookup_table", ".W_q"),
)
_EXPERT_BLOCKS = "_blocks"  # gpt-oss: `experts.gate_up_proj_blocks`


@dataclass(frozen=True, slots=True)
class Codes:
    """Stored codes of a linear, by what engines choose a kernel for.

    Attributes:
        kind: `int4`, `fp8`, `fp8-block`, `nvfp4`, `mxfp4`, `nf4`, a ggml type ...; empty: not known.
        group: input channels that share a scale; -1: a scale per output channel or for the whole weight.
        symmetric: False for codes with zero points.
        inputs: dtype that inputs are quantized to (`int8`, `fp8`, `nvfp4` ...); empty: none.
        static: True for calibrated input scales.
        permuted: True if groups follow an order of the channels that is stored (`g_idx`).
    """

    kind: str
    label: str
    group: int = -1
    symmetric: bool = True
    inputs: str = ""
    static: bool = False
    permuted: bool = False

    @property
    def key(self) -> str:
        """Name of the rules' rows: `int4`, `int8+int8`, `fp8+fp8`."""
        return f"{self.kind}+{self.inputs}" if self.inputs else self.kind


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """A quantized linear. `shape` is `(out_features, in_features)`; None where the headers do not tell."""

    module: str
    codes: Codes
    shape: tuple[int, ...] | None
    scheme: Scheme | None = None


@dataclass(frozen=True, slots=True)
class Contents:
    """The part of a checkpoint that engines decide by.

    Attributes:
        method: `quant_method` of the config, `gguf`, or empty for a plain checkpoint.
        refusal: reason why the readers here take it not; empty: they do.
        loaders: the contents for the rules of loaders; None if the readers here do not take it.
    """

    checkpoint: Checkpoint
    method: str
    linears: tuple[StoredLinear, ...]
    findings: tuple[Finding, ...]
    parameters: ModelParameters | str
    refusal: str = ""
    loaders: CheckpointContents | None = None

    @property
    def architecture(self) -> str:
        return str(next(iter(self.checkpoint.config.get("architectures") or ()), ""))


def read_contents(path: Path, *, trust_remote_code: bool = False) -> Contents:
    """Read the headers and the config of a folder, a GGUF file, or a `config.json` next to an index."""
    if gguf_file_of(path) is not None:
        from ..source.models import open_checkpoint

        checkpoint = open_checkpoint(path)
        findings: list[Finding] = []
    else:
        checkpoint = HeaderCheckpoint(path)
        checkpoint.trust_remote_code = trust_remote_code
        findings = [*checkpoint.findings]
    config = checkpoint.quantization_config or {}
    parameters = model_parameters(checkpoint)
    refusal, schemes = "", {}
    try:
        modules = sorted(quantized_modules(checkpoint))
        schemes = {module: module_scheme(checkpoint, module) for module in modules}
    except (BadInput, AttributeError, KeyError, TypeError, ValueError) as error:
        modules = marked_modules(checkpoint)
        refusal = str(error).removeprefix(f"{checkpoint.path}: ") or type(error).__name__
    known = {} if isinstance(parameters, str) else parameters.weight_shapes(modules)
    linears = []
    for module in modules:
        scheme = schemes.get(module)
        codes = codes_of(scheme) if scheme is not None else described(config, module)
        stored, expected = stored_shape(checkpoint, module, codes), known.get(module)
        if stored and expected and stored != expected:
            findings.append(_misshapen(module, stored, expected))
        linears.append(StoredLinear(module, codes, stored or expected, scheme))
    shapes = {linear.module: linear.shape for linear in linears if linear.shape is not None}
    loaders = None
    if not refusal and len(shapes) == len(linears):
        text = checkpoint.text_config
        loaders = CheckpointContents(
            type_of(checkpoint.config),
            shapes,
            schemes,
            unquantized_modules(checkpoint, modules, parameters),
            [*plain_tensors(checkpoint, modules), *(f"{module}.weight" for module in modules)],
            parameters,
            type_of(text) if text is not checkpoint.config else "",
        )
    method = str(config.get("quant_method") or "") if config else ""
    return Contents(
        checkpoint, method, tuple(linears), tuple(findings), parameters, refusal, loaders
    )


def marked_modules(checkpoint: Checkpoint) -> list[str]:
    """Modules with a tensor that only quantized ones have, whatever the method."""
    return sorted(
        {
            name.removesuffix(marker)
            for name in checkpoint.names
            for marker in (*_MARKERS, _EXPERT_BLOCKS)
            if name.endswith(marker)
        }
    )


def plain_tensors(checkpoint: Checkpoint, modules: Sequence[str]) -> list[str]:
    """Names of the tensors that belong to no quantized linear, but for its bias."""
    quantized = {*modules}
    return [
        name
        for name in checkpoint.names
        if name.endswith(".bias")
        or not any(name[: len(name) - len(end)] in quantized for end in _endings(name))
    ]


def _endings(name: str) -> list[str]:
    """The last one and the last two parts of a name, each with its dot."""
    parts = name.split(".")
    return [f".{'.'.join(parts[-count:])}" for count in (1, 2) if len(parts) > count]


def _misshapen(module: str, stored: tuple[int, ...], expected: tuple[int, ...]) -> Finding:
    sizes = f"{stored[0]} × {stored[1]}, and the config's model has {expected[0]} × {expected[1]}"
    is_transposed = stored == expected[::-1]
    code = "transposed-weight" if is_transposed else "wrong-shape"
    return Finding(code, module, f"{module} is stored as {sizes}: quantize it again")


def codes_of(scheme: Scheme) -> Codes:
    """The codes of a scheme that the readers here take."""
    inputs = scheme.activations
    common: dict[str, Any] = {
        "label": scheme.label,
        "inputs": inputs.kind if inputs else "",
        "static": scheme.has_static_inputs,
    }
    match scheme:
        case IntScheme():
            shape = {"group": scheme.group_size, "symmetric": scheme.symmetric}
            return Codes(f"int{scheme.bits}", permuted=scheme.permuted, **shape, **common)
        case FloatScheme():
            is_block = scheme.granularity == "block"
            return Codes(
                "fp8-block" if is_block else "fp8", group=128 if is_block else -1, **common
            )
        case Fp4Scheme() | CodebookScheme():
            return Codes(scheme.kind, group=scheme.block_size, **common)
        case GgufScheme():
            return Codes(scheme.type, group=scheme.block[0], **common)
    return Codes(scheme.kind_name, **common)


def described(config: Mapping[str, Any], module: str) -> Codes:
    """The codes that a config describes, where no reader here takes them."""
    method = str(config.get("quant_method"))
    try:
        if method == "compressed-tensors":
            return _of_group(find_group(config, module)[1])
        if method == "mxfp4":
            return Codes("mxfp4", "mxfp4", 32)
        if method in ("auto-round", "intel/auto-round", "gptq", "awq"):
            bits, group = int(config["bits"]), int(config.get("group_size", -1))
            symmetric = bool(config.get("sym", not config.get("zero_point", False)))
            label = f"int{bits} g{group}"
            return Codes(
                f"int{bits}", label, group, symmetric, permuted=bool(config.get("desc_act"))
            )
    except (BadInput, KeyError, TypeError, ValueError):
        pass
    return Codes("", method)


def _of_group(group: Mapping[str, Any]) -> Codes:
    """Codes of an entry of compressed-tensors' `config_groups`."""
    weights, inputs = group["weights"], group.get("input_activations") or {}

    def dtype(fields: Mapping[str, Any]) -> str:
        if not fields:
            return ""
        bits, size = fields["num_bits"], fields.get("group_size")
        if fields.get("type") != "float":
            return f"int{bits}"
        is_block = fields.get("strategy") == "block"
        names = {8: "fp8-block" if is_block else "mxfp8" if size == 32 else "fp8"}
        return names.get(bits, "nvfp4" if size == 16 else "mxfp4")

    kind, read = dtype(weights), dtype(inputs).removesuffix("-block")
    size = weights.get("group_size") or -1
    symmetric = bool(weights.get("symmetric", True))
    label = f"{kind}{f' g{size}' if size > 0 else ''}{'' if symmetric else ' asym'}"
    return Codes(
        kind,
        f"{label}, inputs {read}" if read else label,
        size,
        symmetric,
        read,
        static=bool(inputs) and not inputs.get("dynamic"),
    )


def stored_shape(checkpoint: Checkpoint, module: str, codes: Codes) -> tuple[int, int] | None:
    """`(out_features, in_features)` of a quantized linear by the shapes of its stored tensors."""
    digits = "".join(letter for letter in codes.kind if letter.isdigit())
    bits = int(digits[-1]) if digits else 8

    def stored(ending: str) -> tuple[int, ...]:
        name = f"{module}.{ending}"
        return checkpoint.shape(name) if name in checkpoint else ()

    if len(packed := stored("weight_packed")) == 2:
        dtype = checkpoint.dtype_name(f"{module}.weight_packed")
        per_entry = (32 if dtype == "I32" else 8) // bits if (32 % bits == 0) else 0
        groups = stored("weight_scale")
        if not per_entry:
            width = packed[1] * 32 // bits
            if len(groups) == 2 and codes.group > 0:
                width = groups[1] * codes.group
            return packed[0], width
        return packed[0], packed[1] * per_entry
    if len(packed := stored("qweight")) == 2:
        if (checkpoint.quantization_config or {}).get("quant_method") == "awq":
            return packed[1] * 32 // bits, packed[0]
        if "autoawq" in str((checkpoint.quantization_config or {}).get("packing_format")):
            return packed[1] * 32 // bits, packed[0]
        return packed[1], packed[0] * 32 // bits
    if len(blocks := stored("gguf_blocks")) == 2:
        scheme = GgufScheme(codes.kind)
        return blocks[0], blocks[1] // scheme.block[1] * scheme.block[0]
    if len(weight := stored("weight")) == 2 and weight[1] > 1:
        is_nibbles = checkpoint.dtype_name(f"{module}.weight") == "U8"
        return weight[0], weight[1] * (2 if is_nibbles else 1)
    return None

"""The linears of a checkpoint with their stored schemes, as engines see them: by names, headers and config.

The schemes are read by the formats' own readers. What no reader here takes, and an engine may, is described
by the config alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ...base.errors import BadInput
from ..base.scheme import Scheme
from ..families.registry import type_of
from ..formats.registry import module_scheme, names_with_weights, quantized_modules
from ..model.checkpoint import Checkpoint, gguf_file_of
from ..model.parameters import ModelParameters, by_kind, model_parameters, unquantized_modules
from .findings import Finding
from .headers import HeaderCheckpoint
from .kernels import Codes, codes_of_config
from .loaders import CheckpointContents

if TYPE_CHECKING:
    from ..gguf.container import GgufFile

# Endings of tensors that only a quantized linear has, over all methods.
_MARKERS = (
    *(".weight_packed", ".qweight", ".weight_scale", ".weight_scale_inv", ".SCB"),
    *(".weight.absmax", ".gguf_blocks", ".trellis", ".Qidxs", ".lookup_table", ".W_q"),
    "_blocks",  # of gpt-oss: `experts.gate_up_proj_blocks`
)


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
        findings: faults of files and shapes.
        refusal: reason why the readers here take it not; empty: they do.
        loaders: the contents for the rules of loaders; None if the readers here do not take it.
        gguf: the file, if it is one.
    """

    checkpoint: Checkpoint
    method: str
    linears: tuple[StoredLinear, ...]
    findings: tuple[Finding, ...]
    parameters: ModelParameters | str
    refusal: str = ""
    loaders: CheckpointContents | None = None
    gguf: GgufFile | None = None

    @property
    def architecture(self) -> str:
        return str(next(iter(self.checkpoint.config.get("architectures") or ()), ""))


class _BareGguf(Checkpoint):
    """The tensors of a GGUF file whose architecture is not read here, by the file's own names."""

    def __init__(self, file: GgufFile):
        self.path, self.folder = file.path, file.path.parent
        self.config = {"model_type": str(file.metadata.get("general.architecture"))}
        self.shard_of = dict.fromkeys(file.tensors, file.path.name)
        self._infos = file.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._infos[name].shape


def read_contents(path: Path, *, trust_remote_code: bool = False) -> Contents:
    """Read the headers and the config of a folder, a GGUF file, or a `config.json` next to an index."""
    file = gguf_file_of(path) if path.name != "config.json" else None
    gguf = None
    if file is not None:
        from ..gguf.container import GgufFile
        from ..source.models import open_checkpoint

        gguf = GgufFile(file)
        try:
            checkpoint = open_checkpoint(file)
        except BadInput as error:
            return _unread(gguf, str(error))
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
    misshapen: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for module in modules:
        scheme = schemes.get(module)
        codes = codes_of(scheme) if scheme is not None else described(config, module)
        stored, expected = stored_shape(checkpoint, module, codes), known.get(module)
        if codes.kind and stored and expected and stored != expected:
            misshapen.setdefault((stored, expected), []).append(module)
        linears.append(StoredLinear(module, codes, stored or expected, scheme))
    for (stored, expected), names in misshapen.items():
        findings += [_misshapen(kind, stored, expected) for kind in by_kind(names)]
    shapes = {linear.module: linear.shape for linear in linears if linear.shape is not None}
    loaders = None
    if not refusal and len(shapes) == len(linears):
        text = checkpoint.text_config
        loaders = CheckpointContents(
            type_of(checkpoint.config),
            shapes,  # pyright: ignore[reportArgumentType]  # of two dimensions
            schemes,
            unquantized_modules(checkpoint, modules, parameters),
            names_with_weights(checkpoint, modules),
            parameters,
            type_of(text) if text is not checkpoint.config else "",
        )
    method = "gguf" if gguf is not None else str(config.get("quant_method") or "")
    return Contents(
        checkpoint, method, tuple(linears), tuple(findings), parameters, refusal, loaders, gguf
    )


def _unread(file: GgufFile, refusal: str) -> Contents:
    """The contents of a GGUF file that no reader here takes."""
    linears = tuple(
        StoredLinear(name.removesuffix(".weight"), Codes(info.type, info.type), info.shape)
        for name, info in file.tensors.items()
        if info.type not in ("F32", "F16", "BF16")
    )
    refusal = refusal.removeprefix(f"{file.path} ").removeprefix(f"{file.path}: ")
    return Contents(_BareGguf(file), "gguf", linears, (), refusal, refusal, gguf=file)


def marked_modules(checkpoint: Checkpoint) -> list[str]:
    """Modules with a tensor that only quantized ones have, whatever the method."""
    return sorted(
        {
            name.removesuffix(marker)
            for name in checkpoint.names
            for marker in _MARKERS
            if name.endswith(marker) and not name.endswith((".k_scale", ".v_scale"))
        }
    )


def _misshapen(module: str, stored: Sequence[int], expected: Sequence[int]) -> Finding:
    sizes = f"{stored[0]} × {stored[1]}, and the config's model has {expected[0]} × {expected[-1]}"
    code = "transposed-weight" if [*stored] == [*expected][::-1] else "wrong-shape"
    return Finding(code, module, f"{module} is stored as {sizes}: quantize it again")


def codes_of(scheme: Scheme) -> Codes:
    """The codes of a scheme that the readers here take, without importing its kind."""
    inputs, fields = scheme.activations, cast(Any, scheme)
    common: dict[str, Any] = {
        "label": scheme.label,
        "inputs": inputs.kind if inputs else "",
        "static": scheme.has_static_inputs,
    }
    match scheme.kind_name:
        case "int":
            groups = {"group": fields.group_size, "symmetric": fields.symmetric}
            return Codes(f"int{scheme.bits}", permuted=scheme.permuted, **groups, **common)
        case "float":
            kind = "fp8-block" if fields.granularity == "block" else "fp8"
            return Codes(kind, group=scheme.scale_group or -1, **common)
        case "fp4" | "codebook":
            return Codes(fields.kind, group=fields.block_size, **common)
        case "gguf":
            return Codes(fields.type, group=fields.block[0], **common)
    return Codes(scheme.kind_name, **common)


def described(config: Mapping[str, Any], module: str) -> Codes:
    """The codes that a config describes for a module which no reader here takes."""
    if config.get("quant_method") == "compressed-tensors":
        from ..formats.compressed_tensors import find_group

        try:
            config = {**config, "config_groups": {"": find_group(config, module)[1]}}
        except BadInput:
            return Codes("", "compressed-tensors")
    return codes_of_config(config)[0]


def stored_shape(checkpoint: Checkpoint, module: str, codes: Codes) -> tuple[int, int] | None:
    """`(out_features, in_features)` of a quantized linear by the shapes of its stored tensors."""
    digits = "".join(letter for letter in codes.kind if letter.isdigit())
    bits = int(digits[-1]) if digits else 8

    def stored(ending: str) -> tuple[int, ...]:
        name = f"{module}.{ending}"
        return checkpoint.shape(name) if name in checkpoint else ()

    if len(packed := stored("weight_packed")) == 2:
        scales = stored("weight_scale")
        if codes.group > 0 and len(scales) == 2:
            return packed[0], scales[1] * codes.group
        is_word = checkpoint.dtype_name(f"{module}.weight_packed") == "I32"
        return packed[0], packed[1] * (32 if is_word else 8) // bits
    if len(packed := stored("qweight")) == 2:
        config = checkpoint.quantization_config or {}
        if config.get("quant_method") == "awq" or "awq" in str(config.get("packing_format")):
            return packed[1] * 32 // bits, packed[0]
        return packed[1], packed[0] * 32 // bits
    if len(blocks := stored("gguf_blocks")) == 2:
        from ..kinds.ggml.scheme import GGUF_BLOCKS

        weights, size = GGUF_BLOCKS[codes.kind]
        return blocks[0], blocks[1] // size * weights
    if len(weight := stored("weight")) == 2 and codes.kind not in ("nf4", "fp4", "awq4"):
        is_nibbles = checkpoint.dtype_name(f"{module}.weight") == "U8" and bits == 4
        return weight[0], weight[1] * (2 if is_nibbles else 1)
    return None

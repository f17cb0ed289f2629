"""`config_groups` of compressed-tensors: the scheme and the layout of each module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..base.errors import BadInput
from ..base.scheme import PER_CHANNEL, SUPPORTED_BITS, Activations
from ..kinds.fp4.scheme import FP4_BLOCKS, Fp4Scheme
from ..kinds.fp8.scheme import FloatScheme
from ..kinds.integer.scheme import IntScheme
from .base import Config, matches

PACKED, INT8, FLOAT = "pack-quantized", "int-quantized", "float-quantized"
NVFP4, MXFP4 = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
MIXED = "mixed-precision"
_NAIVE = "naive-quantized"  # an older name of the two layouts with a `weight` tensor
_BLOCK = [128, 128]

CtScheme = IntScheme | FloatScheme | Fp4Scheme
_FP4_LAYOUTS = {"nvfp4": NVFP4, "mxfp4": MXFP4}
# Of weights and of inputs, as the library's presets NVFP4 and MXFP4 have them.
_FP4_FIELDS: dict[str, dict[str, Any]] = {
    "nvfp4": {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"},
    "mxfp4": {"strategy": "group", "scale_dtype": "torch.uint8"},
}


def layout_of(scheme: CtScheme) -> str:
    """The compressed-tensors layout for a scheme.

    Raises:
        BadInput: no layout stores it.
    """
    if isinstance(scheme, Fp4Scheme):
        return _FP4_LAYOUTS[scheme.kind]
    if isinstance(scheme, FloatScheme):
        if scheme.activations is None or scheme.activations.kind == "fp8":
            return FLOAT
    elif scheme.activations is None:
        if not scheme.permuted:
            return PACKED
    elif scheme.bits == 8 and scheme.activations.kind == "int8":
        return INT8
    why = " (its library dropped permuted groups)" if getattr(scheme, "permuted", False) else ""
    raise BadInput(f"format compressed-tensors cannot hold {scheme.label} weights{why}")


def group_of(scheme: CtScheme, targets: list[str]) -> dict[str, Any]:
    """One entry of `config_groups`. The library rejects unknown keys."""
    weights: dict[str, Any] = {"num_bits": scheme.bits, "dynamic": False}
    if isinstance(scheme, Fp4Scheme):
        weights |= _fp4_record(scheme.kind)
    elif isinstance(scheme, FloatScheme):
        weights |= {"type": "float", "symmetric": True, "strategy": scheme.granularity}
        if scheme.granularity == "block":
            weights["block_structure"] = _BLOCK
    else:
        weights |= {"type": "int", "symmetric": scheme.symmetric, "strategy": "channel"}
        if scheme.group_size != PER_CHANNEL:
            weights |= {"strategy": "group", "group_size": scheme.group_size}
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": _activations_record(scheme.activations),
        "output_activations": None,
    }


def _activations_record(activations: Activations | None) -> dict[str, Any] | None:
    if activations is None:
        return None
    if activations.kind == "nvfp4" or activations.kind == "mxfp4":
        # Dynamic group scales; `local` where a calibrated global scale is their unit.
        dynamic = True if activations.dynamic else "local"
        return {"num_bits": 4, "dynamic": dynamic} | _fp4_record(activations.kind)
    grouped = activations.granularity == "group128"
    return {
        "num_bits": 8,
        "type": "int" if activations.kind == "int8" else "float",
        "symmetric": True,
        "strategy": "group" if grouped else activations.granularity,
        "dynamic": activations.dynamic,
    } | ({"group_size": 128} if grouped else {})


def _fp4_record(kind: str) -> dict[str, Any]:
    return {"type": "float", "symmetric": True, "group_size": FP4_BLOCKS[kind]} | _FP4_FIELDS[kind]


def find_group(config: Config, module: str) -> tuple[str, Config]:
    """Layout and `config_groups` entry of a module: by name, by `re:` pattern, or as class `Linear`.

    Raises:
        BadInput: there is none.
    """
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise unsupported("no config_groups")
    entries: list[Mapping[str, Any]] = list(groups.values())
    found = (
        next((e for e in entries if module in _targets(e)), None)
        or next((e for e in entries if _by_pattern(e, module)), None)
        or next((e for e in entries if "Linear" in _targets(e)), None)
        or (entries[0] if len(entries) == 1 else None)
    )
    if found is None:
        raise BadInput(f"no entry of config_groups is for {module}")
    return str(found.get("format") or config.get("format")), found


def _targets(group: Config) -> list[str]:
    return group.get("targets") or []


def _by_pattern(group: Config, module: str) -> bool:
    patterns = (target[3:] for target in _targets(group) if target.startswith("re:"))
    return any(matches(pattern, module) for pattern in patterns)


def read_group(layout: str, group: Config) -> tuple[str, CtScheme]:
    """Layout (never the naive name) and scheme of an entry of `config_groups`.

    Raises:
        BadInput: an unsupported kind of weights or activations.
    """
    weights = group.get("weights") or {}
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    if layout == _NAIVE:
        layout = FLOAT if kind == "float" else INT8
    if layout in (NVFP4, MXFP4):
        return layout, _read_fp4(layout, group)
    if layout not in (PACKED, INT8, FLOAT):
        raise BadInput(
            f"quant_method compressed-tensors with format {layout!r} is not supported: "
            f"only {PACKED}, {INT8}, {FLOAT}, {NVFP4} and {MXFP4}"
        )
    widths = {PACKED: SUPPORTED_BITS, INT8: (8,), FLOAT: (8,)}[layout]
    if kind != ("float" if layout == FLOAT else "int") or bits not in widths:
        raise unsupported(f"{bits}-bit {kind} weights in the layout {layout}")
    if group.get("output_activations"):
        raise unsupported("quantized outputs")
    activations = _read_activations(group.get("input_activations"))
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "channel")
    if layout == FLOAT:
        if strategy not in ("tensor", "channel", "block"):
            raise unsupported(f"the {strategy!r} strategy for fp8 weights")
        if strategy == "block" and weights.get("block_structure") not in (_BLOCK, "128x128"):
            raise unsupported(f"blocks of {weights.get('block_structure')}: only {_BLOCK}")
        return layout, FloatScheme(strategy, activations)
    if strategy not in ("group", "channel") and not (layout == INT8 and strategy == "tensor"):
        raise unsupported(f"the {strategy!r} strategy")
    return layout, IntScheme(
        bits=bits,
        group_size=int(weights["group_size"]) if strategy == "group" else PER_CHANNEL,
        symmetric=bool(weights.get("symmetric", True)),
        activations=activations,
        permuted=layout == PACKED and weights.get("actorder") in ("group", "dynamic"),
    )


def _read_fp4(layout: str, group: Config) -> Fp4Scheme:
    """The scheme of an entry with 4-bit floats; BadInput where its fields are not those of the layout."""
    kind = "nvfp4" if layout == NVFP4 else "mxfp4"
    wanted = {"num_bits": 4} | _fp4_record(kind)
    inputs = group.get("input_activations")
    for part, fields in (("weights", group.get("weights") or {}), ("inputs", inputs)):
        for name in ("num_bits", "type", "symmetric", "group_size", "strategy"):
            if fields and fields.get(name, wanted[name]) != wanted[name]:
                raise unsupported(f"{name} {fields[name]!r} of {part} in the layout {layout}")
    if group.get("output_activations"):
        raise unsupported("quantized outputs")
    if not inputs:
        return Fp4Scheme(kind)
    if kind == "mxfp4":
        return Fp4Scheme(kind, Activations("mxfp4", "group32"))
    return Fp4Scheme(kind, Activations("nvfp4", "group16", dynamic=False))


def _read_activations(record: Config | None) -> Activations | None:
    if not record:
        return None
    kind = "int8" if record.get("type", "int") == "int" else "fp8"
    if record.get("num_bits", 8) != 8 or not record.get("symmetric", True):
        raise unsupported("activations that are not 8 bits and symmetric")
    strategy, dynamic = record.get("strategy") or "tensor", record.get("dynamic", False)
    if strategy == "group" and record.get("group_size") == 128:
        return Activations(kind, "group128", bool(dynamic))
    if strategy not in ("token", "tensor"):
        raise unsupported(f"activations with the {strategy!r} strategy")
    return Activations(kind, strategy, bool(dynamic))


def unsupported(what: str) -> BadInput:
    """The error for an unsupported compressed-tensors checkpoint."""
    return BadInput(f"quant_method compressed-tensors with {what} is not supported")

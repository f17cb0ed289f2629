"""What transformers loads: its key mapping, its quantizers' converters, and its initialisation.

The mapping and the initialisation are asked of the installed transformers. The rules of its converters are
those of `integrations/compressed_tensors.py` and `quantizers/base.py` of 5.23: it dequantizes weights that it
merges (the experts of a layer) while loading, all by one scheme and without zero points, and a merged weight
that has no codes beside packed ones is lost. Converters of the other formats merge no codes.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..base.scheme import Scheme
from ..kinds.base.kind import storage_of
from ..model.parameters import Loaded, by_kind
from .contents import CheckpointContents

_NOT_TRIED = "not tried"
_NEEDS = {
    "awq": f"needs gptqmodel and accelerate; {_NOT_TRIED}",
    "gptq": f"needs optimum and gptqmodel; {_NOT_TRIED}",
    "bitsandbytes": "needs bitsandbytes and accelerate",
    "fp8": "needs accelerate; without a GPU of compute capability 8.9 it computes in 16 bits",
    "gguf": "needs gguf, and gguf_file= with the name of the file",
    "compressed-tensors": "needs compressed-tensors",
}
# Readers that put a module of codes in the place of a linear, so that it has no `weight`.
_WITHOUT_WEIGHT = ("awq", "gptq", "compressed-tensors")
_DEQUANTIZE = "CompressedTensorsConfig(dequantize=True)"


def transformers_loads(stored: CheckpointContents, name: str) -> tuple[bool, str]:
    """Whether transformers loads such a checkpoint in format `name`, and what it needs or why not."""
    if name not in _NEEDS:
        return False, f"it has no reader for the format {name}"
    parameters = stored.parameters
    if isinstance(parameters, str):
        return False, parameters
    if name == "gguf":
        return True, _NEEDS[name]
    if apart := parameters.experts_apart(stored.names):
        return False, f"it does not merge the experts of {by_kind(apart)[0]}, which are apart"
    if replaced := parameters.replaced(name):
        return False, f"for {name} it has other names in {replaced}"
    if missing := parameters.missing(stored.names):
        return False, f"{by_kind(missing)[0]} of its model is in no file"
    loaded = parameters.loaded_from(stored.names)
    if reason := _merged(stored, name, loaded):
        return False, reason
    with_codes = [
        target.removesuffix(".weight")
        for module in stored.shapes
        if not (each := loaded[f"{module}.weight"]).converted
        for target in each.parameters
    ]
    unloadable = parameters.needs_weights(with_codes) if name in _WITHOUT_WEIGHT else None
    if name != "compressed-tensors":
        return (False, unloadable) if unloadable else (True, _NEEDS[name])
    dense = {
        stored.schemes[module]
        for module in stored.shapes
        if not loaded[f"{module}.weight"].converted
    }
    return _compressed_tensors(dense, set(stored.schemes.values()), unloadable)


def _merged(stored: CheckpointContents, name: str, loaded: Mapping[str, Loaded]) -> str | None:
    """Why the weights that transformers merges would be lost or wrong; None: they are right."""
    merged = {
        tensor: stored.schemes.get(tensor.removesuffix(".weight"))
        for tensor, each in loaded.items()
        if each.converted and each.as_weight
    }
    quantized = {tensor: scheme for tensor, scheme in merged.items() if scheme is not None}
    if name == "fp8" or not merged:
        return None
    if name != "compressed-tensors":
        if not quantized:
            return None
        return f"it merges the weights of {by_kind(quantized)[0]}, not their codes"
    if len(set(quantized.values())) > 1:
        return f"it merges {by_kind(quantized)[0]}, which differ in scheme"
    scheme = next(iter((quantized or stored.schemes).values()))
    if quantized and not storage_of(scheme).rules.merged_right(scheme):
        return f"it merges {by_kind(quantized)[0]}, and reads {scheme.label} codes of such wrongly"
    if len(quantized) < len(merged) and not storage_of(scheme).rules.merges_without_codes:
        plain = [tensor for tensor in merged if tensor not in quantized]
        return f"it loses {by_kind(plain)[0]}, which it merges and which have no codes"
    return None


def _compressed_tensors(
    dense: set[Scheme], schemes: set[Scheme], unloadable: str | None
) -> tuple[bool, str]:
    """The requirements of compressed-tensors: dequantized while it loads, or as they are.

    Args:
        dense: schemes of the weights that are not merged.
        schemes: of all.
        unloadable: why a model of its modules of codes cannot be initialised.
    """
    need = _NEEDS["compressed-tensors"]
    asymmetric = any(s.asymmetric and s.activations is None for s in schemes)
    if asymmetric or unloadable:
        if len(dense) > 1:
            reason = unloadable or "asymmetric codes are only dequantized while it loads"
            return False, f"{reason}, which it does by one scheme, not {len(dense)}"
        need += f" and {_DEQUANTIZE}"
    # Those that begin with a semicolon sort behind the others, which go on with the sentence.
    needs = {storage_of(scheme).rules.transformers_needs(scheme) for scheme in schemes}
    return True, need + "".join(sorted(needs))

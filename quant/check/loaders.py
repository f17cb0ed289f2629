"""Loader compatibility: which engines load a checkpoint, and which rule it violates.

Rules of a single matrix are the kinds' (`LoaderRules`, in the `formats.py` of each); here are those of a
checkpoint. `docs/formats.md` has the runs that were made.

transformers: mapping and initialisation are asked of the installed version. The rules of its converters are
those of `integrations/compressed_tensors.py` and `quantizers/base.py` of 5.23: it dequantizes weights that it
merges (the experts of a layer) while loading, all by one scheme and without zero points, and a merged weight
that has no codes among packed ones is lost. Converters of the other formats merge no codes.

vLLM: from the source of 0.32; `make owners` compares the rules with it. Marlin takes symmetric 4 and 8 bits,
or 4 bits with zero codes, groups of 32, 64, 128 or whole rows, and pads what does not fill its tiles; the
rest of compressed-tensors' 2 to 8 bits goes to Triton (4 bits) or to the optional package humming. Experts go
to Marlin's or Triton's. `gptq` is read with symmetric 4 and 8 bits and without dynamic act-order. FP4 kernels
need a GPU: Marlin computes in 16 bits, W4A4 on Blackwell.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..base.scheme import Scheme
from ..families.layer_map import fused_name
from ..kinds.base.kind import EXPERTS, RankMatrix, storage_of
from ..model.parameters import Loaded, ModelParameters, by_kind
from .kernels import engine_rules


@dataclass(frozen=True, slots=True)
class CheckpointContents:
    """Facts that compatibility depends on: the model, and every linear.

    Attributes:
        shapes: `(out_features, in_features)` of the quantized linears by full name, by layer.
        plain: the unquantized linears.
        names: names of all tensors, `weight` for the codes of a quantized linear.
        parameters: parameters of transformers' model, or why transformers has none.
        text_family: family of the language model where it is wrapped in another; else empty.
        architecture: class of the model that its config names; empty: none.
    """

    family: str
    shapes: Mapping[str, tuple[int, int]]
    schemes: Mapping[str, Scheme]
    plain: Sequence[str]
    names: Sequence[str]
    parameters: ModelParameters | str
    text_family: str = ""
    architecture: str = ""

    def matrices(self) -> list[list[str]]:
        """The fused matrices of servers that are at least partly quantized."""
        groups: dict[str, list[str]] = defaultdict(list)
        for name in (*self.shapes, *self.plain):
            groups[fused_name(name)].append(name)
        return [group for group in groups.values() if group[0] in self.shapes]


@dataclass(frozen=True, slots=True)
class Loader:
    """One row of the table: loader, format, whether it loads, and the reason or requirement."""

    name: str
    format: str
    loads: bool
    reason: str


def loads_in(table: Iterable[Loader]) -> str:
    """The loaders that support it, each with its requirements."""
    readers = [
        f"{row.name} ({row.reason})" if row.reason else row.name for row in table if row.loads
    ]
    return "; ".join(readers) or "no loader that is known here"


_NOT_TRIED, _ON_A_CPU = "not tried", "tried on a CPU"
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
    """True if transformers loads such a checkpoint in format `name`, and what it needs or why not."""
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
    if name == "compressed-tensors" and (split := parameters.split_weights()):
        return False, f"it splits {split[0]}, and fails on that rule for any codes"
    loaded = parameters.loaded_from(stored.names)
    if reason := _merged(stored, name, loaded):
        return False, reason
    with_codes = [
        target.removesuffix(".weight")
        for module in stored.shapes
        if not (entry := loaded[f"{module}.weight"]).converted
        for target in entry.parameters
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
        for tensor, entry in loaded.items()
        if entry.converted and entry.as_weight
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
    """The requirements of compressed-tensors: dequantized while it loads, or as they are. `dense` are the
    schemes of weights that are not merged, `unloadable` is why a model of its modules of codes fails."""
    need = _NEEDS["compressed-tensors"]
    asymmetric = any(s.asymmetric and s.activations is None for s in schemes)
    if asymmetric or unloadable:
        if len(dense) > 1:
            reason = unloadable or "asymmetric codes are only dequantized while it loads"
            return False, f"{reason}, which it does by one scheme, not {len(dense)}"
        need += f" and {_DEQUANTIZE}"
    # Those that begin with a semicolon sort after the others, which go on with the sentence.
    needs = {storage_of(scheme).rules.transformers_needs(scheme) for scheme in schemes}
    return True, need + "".join(sorted(needs))


_TRIED_TYPE = "llama"  # of the models that `tools/owners.py` loads
_TRIED_WITH_IMAGES = ("idefics3", "qwen2_5_vl")  # and of those with images that were tried


def vllm_loads(stored: CheckpointContents, name: str, ranks: int) -> tuple[bool, str]:
    """True if vLLM's kernels take such a checkpoint on each of `ranks`, and which or why not."""
    if name == "gguf":
        return False, "GGUF went out of vLLM into a plugin"
    if name not in engine_rules()["vllm"].methods:
        return False, f"vLLM has no quantization method {name}"
    for group in stored.matrices():
        if len({stored.schemes.get(module) for module in group}) > 1:
            return False, f"{' and '.join(group[:2])} are one matrix there, and differ in scheme"
    # ModelOpt's list of excluded linears is matched as parts of names.
    names = "\n".join(stored.shapes) if name == "modelopt" else ""
    if (part := next((plain for plain in stored.plain if plain in names), None)) is not None:
        linear = next(linear for linear in stored.shapes if part in linear)
        return False, f"it takes {linear} as excluded, because {part} is"
    kernels = set()
    for matrix in _matrices(stored, ranks):
        scheme = stored.schemes[matrix.module]
        loads, text = storage_of(scheme).rules.vllm_kernel(scheme, matrix, name)
        if not loads:
            shape = f"{matrix.out_features} × {matrix.in_features} on a rank"
            return False, f"{matrix.module} ({shape}): {text}"
        kernels.add(text)
    tried = ranks == 1 and all(
        _tried(stored.family, name, scheme) for scheme in set(stored.schemes.values())
    )
    return True, f"{', '.join(sorted(kernels))}; {_ON_A_CPU if tried else _NOT_TRIED}"


def _tried(family: str, name: str, scheme: Scheme) -> bool:
    """True if vLLM for CPU loaded such a checkpoint."""
    rules = storage_of(scheme).rules
    if family in _TRIED_WITH_IMAGES:
        if name != "compressed-tensors" or not rules.vllm_tried_with_images(scheme):
            return False
    elif family != _TRIED_TYPE:
        return False
    return rules.vllm_tried(scheme, name)


def vllm_refuses_on_cpu(stored: CheckpointContents, name: str) -> str | None:
    """Say why vLLM for CPU may not load what vLLM does; None: it loaded such schemes."""
    for scheme in set(stored.schemes.values()):
        if not storage_of(scheme).rules.vllm_tried(scheme, name):
            return f"vLLM for CPU was not seen to load {scheme.label}"
    return None


def _matrices(stored: CheckpointContents, ranks: int) -> Iterator[RankMatrix]:
    """Every matrix of a checkpoint; experts are one matrix each."""
    for group in stored.matrices():
        together = [[name] for name in group] if EXPERTS in group[0] else [group]
        for names in together:
            parts = [stored.shapes[name][0] for name in names]
            in_features = stored.shapes[names[0]][1]
            yield RankMatrix.of(names[0], parts, in_features, ranks)

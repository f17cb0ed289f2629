"""Loader compatibility: which engines load a checkpoint, and which kernel rule it violates.

The rules of vLLM are those of its GPU kernels, from the source of 0.32: Marlin takes
symmetric 4 and 8 bits (or 4 bits with zero codes), groups of 32, 64, 128 or whole rows, and after the split
over ranks outputs in multiples of 64 and inputs in multiples of 128 and of the group; `gptq` is read with
symmetric 4 and 8 bits and without dynamic act-order. A "yes" says whether such a checkpoint was loaded
there; `docs/formats.md` has the runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..base.scheme import CodebookScheme, FloatScheme, IntScheme, Scheme
from ..request.selection import Shapes
from .plan import Plan

# Model types that llmopt's engine runs; others are written for other loaders.
ENGINE_TYPES = frozenset(
    {
        "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "phi3",
        "gpt_oss", "llama4_text", "deepseek_v2", "deepseek_v3", "gpt2", "falcon", "cohere", "cohere2",
        "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "gemma", "gemma4_text", "glm", "glm4",
        "glm4_moe", "glm4v_text", "glm4v_moe_text", "granite",
        "granitemoe", "hunyuan_v1_dense", "hunyuan_v1_moe", "minimax_m2", "ministral", "ministral3", "olmo2",
        "olmo3", "qwen2_moe", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text",
        "seed_oss", "smollm3",
    }
)  # fmt: skip
# Split over ranks along the inputs; all other linears along the outputs.
_ROW_PARALLEL = ("o_proj", "down_proj", "w2", "out_proj", "dense", "fc2")
_MARLIN_GROUPS = (-1, 32, 64, 128)
# Linears that servers fuse into one matrix, by the last part of their names.
_FUSED = {
    name: group[0]
    for group in (
        ("q_proj", "k_proj", "v_proj"),
        ("q_a_proj", "kv_a_proj_with_mqa"),
        ("gate_proj", "up_proj"),
        ("w1", "w3"),
    )
    for name in group
}
_NOT_TRIED, _ON_A_CPU = "not tried", "tried on a CPU"


@dataclass(frozen=True, slots=True)
class Loader:
    """One row of the table: loader, format, whether it loads, and the reason or requirement."""

    name: str
    format: str
    loads: bool
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointContents:
    """What compatibility depends on: the model type, and every quantized linear.

    Attributes:
        shapes: `(out_features, in_features)` by full name, in the order of the layers.
        plain: the unquantized linears.
    """

    model_type: str
    shapes: Shapes
    schemes: Mapping[str, Scheme]
    plain: Sequence[str]

    def matrices(self) -> list[list[str]]:
        """The fused matrices of servers that are at least partly quantized."""
        groups: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name in (*self.shapes, *self.plain):
            parent, _, leaf = name.rpartition(".")
            groups[parent, _FUSED.get(leaf, leaf)].append(name)
        return [group for group in groups.values() if group[0] in self.shapes]


def stored(plan: Plan) -> CheckpointContents:
    """The contents that a plan will write."""
    return CheckpointContents(
        plan.architecture.model_type, plan.modules, plan.schemes, plan.ignored
    )


def loaders(stored: CheckpointContents, format_name: str, tensor_parallel: int = 1) -> list[Loader]:
    """Compatibility of every loader of a format.

    Args:
        tensor_parallel: tensor-parallel ranks of vLLM.
    """
    ranks = "" if tensor_parallel == 1 else f", {tensor_parallel} ranks"
    return [
        Loader(name, format_name, loads, reason)
        for name, (loads, reason) in {
            "llmopt": _llmopt(stored.model_type),
            "transformers": _transformers(stored, format_name),
            f"vLLM{ranks}": _vllm(stored, format_name, tensor_parallel),
            "llama.cpp": (
                (True, "") if format_name == "gguf" else (False, "it reads GGUF files only")
            ),
        }.items()
    ]


def loads_in(found: Iterable[Loader]) -> str:
    """The loaders that support it, each with its requirements."""
    readers = [
        f"{one.name} ({one.reason})" if one.reason else one.name for one in found if one.loads
    ]
    return "; ".join(readers) or "no loader that is known here"


def _llmopt(model_type: str) -> tuple[bool, str]:
    if model_type in ENGINE_TYPES:
        return True, ""
    return False, f"its engine does not run {model_type}; verify and convert do read it"


def _transformers(stored: CheckpointContents, name: str) -> tuple[bool, str]:
    needs = {
        "awq": f"needs gptqmodel and accelerate; {_NOT_TRIED}",
        "gptq": f"needs optimum and gptqmodel; {_NOT_TRIED}",
        "bitsandbytes": "needs bitsandbytes and accelerate",
        "fp8": "needs accelerate; without a GPU of compute capability 8.9 it computes in 16 bits",
        "gguf": "needs gguf, and gguf_file= with the name of the file",
        "compressed-tensors": "needs compressed-tensors",
    }
    if name not in needs:
        return False, f"it has no reader for the format {name}"
    if name != "compressed-tensors":
        return True, needs[name]
    schemes = set(stored.schemes.values())
    plain = [s for s in schemes if isinstance(s, IntScheme) and s.activations is None]
    need = needs[name]
    if not all(scheme.symmetric for scheme in plain):
        need += " and CompressedTensorsConfig(dequantize=True)"
    if any(scheme.bits in (2, 5, 6) for scheme in plain):
        need += f"; {_NOT_TRIED} with such widths"
    return True, need


def _vllm(stored: CheckpointContents, name: str, ranks: int) -> tuple[bool, str]:
    if name == "gguf":
        return False, "GGUF went out of vLLM into a plugin"
    if name in ("squeezellm", "bitsandbytes"):
        return False, f"vLLM no longer reads {name}"
    for group in stored.matrices():
        if len({stored.schemes.get(module) for module in group}) > 1:
            return False, f"{' and '.join(group[:2])} are one matrix there, and differ in scheme"
    kernels = set()
    for module, scheme, out_features, in_features in _parts(stored, ranks):
        loads, text = _kernel(name, scheme, out_features, in_features)
        if not loads:
            return False, f"{module} ({out_features} × {in_features} on a rank): {text}"
        kernels.add(text)
    tried = ranks == 1 and all(_tried(name, scheme) for scheme in set(stored.schemes.values()))
    return True, f"{', '.join(sorted(kernels))}; {_ON_A_CPU if tried else _NOT_TRIED}"


def _tried(name: str, scheme: Scheme) -> bool:
    """Whether vLLM for CPU loaded such a checkpoint (`tools/owners.py`); GPU kernels were never run."""
    if isinstance(scheme, FloatScheme):
        return name == "compressed-tensors" and scheme.granularity == "channel"
    if not isinstance(scheme, IntScheme):
        return False
    if scheme.activations is not None:
        return name == "compressed-tensors" and scheme.activations.dynamic
    if scheme.bits != 4:
        return False
    return scheme.symmetric or name in ("compressed-tensors", "awq")


def _parts(stored: CheckpointContents, ranks: int) -> Iterator[tuple[str, Scheme, int, int]]:
    """Each matrix as vLLM holds it on one rank: fused along the outputs, then split."""
    for group in stored.matrices():
        together = [[name] for name in group] if ".experts." in group[0] else [group]
        for names in together:
            out_features = sum(stored.shapes[name][0] for name in names)
            in_features = stored.shapes[names[0]][1]
            if names[0].endswith(_ROW_PARALLEL):
                in_features = in_features // ranks if in_features % ranks == 0 else 1
            else:
                out_features = out_features // ranks if out_features % ranks == 0 else 1
            yield names[0], stored.schemes[names[0]], out_features, in_features


def _kernel(name: str, scheme: Scheme, out_features: int, in_features: int) -> tuple[bool, str]:
    """The kernel that supports such a weight, or the violated rule."""
    if isinstance(scheme, FloatScheme):
        if scheme.granularity == "block" and (out_features % 128 or in_features % 128):
            return False, "fp8 blocks need multiples of 128 on both sides"
        return _cutlass(out_features, in_features) if scheme.activations else (True, "FP8 Marlin")
    if not isinstance(scheme, IntScheme):
        kind = "codebooks" if isinstance(scheme, CodebookScheme) else "such codes"
        return False, f"no kernel for {kind} in the format {name}"
    if scheme.activations is not None:
        if not scheme.symmetric:
            return False, "with quantized activations it supports symmetric int8 weights only"
        return _cutlass(out_features, in_features)
    if name == "gptq" and (scheme.bits not in (4, 8) or not scheme.symmetric or scheme.permuted):
        return False, "of this format it reads symmetric 4 and 8 bits, without dynamic act-order"
    broken = _marlin_rule(scheme, out_features, in_features)
    if broken is None:
        return True, "Marlin"
    if name == "awq" and scheme.divides(in_features) and not out_features % 8:
        return True, f"the slower AWQ GEMM, since {broken}"
    if name == "gptq" and scheme.group_size > 0:
        return True, f"the slower exllama kernel, since {broken}"
    return False, f"{broken}, and the format {name} has no other kernel"


def _cutlass(out_features: int, in_features: int) -> tuple[bool, str]:
    if out_features % 16 or in_features % 16:
        return False, "8-bit GEMMs need multiples of 16 on both sides"
    return True, "CUTLASS W8A8"


def _marlin_rule(scheme: IntScheme, out_features: int, in_features: int) -> str | None:
    """The first of Marlin's rules that a weight violates."""
    if scheme.bits not in (4, 8):
        return f"Marlin has no {scheme.bits}-bit weights"
    if not scheme.symmetric and scheme.bits != 4:
        return "Marlin supports zero points with 4 bits only"
    if scheme.group_size not in _MARLIN_GROUPS:
        return f"Marlin has no groups of {scheme.group_size}"
    if out_features % 64:
        return f"Marlin needs outputs in multiples of 64, not {out_features}"
    if in_features % 128:
        return f"Marlin needs inputs in multiples of 128, not {in_features}"
    if scheme.group_size > 0 and in_features % scheme.group_size:
        return f"Marlin needs whole groups of {scheme.group_size} on every rank"
    return None

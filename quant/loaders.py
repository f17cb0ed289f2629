"""Who can load a checkpoint of a plan, and which of their rules a "no" breaks.

The rules of vLLM are those of its kernels: Marlin takes symmetric 4 and 8 bits (or 4 bits with zero
codes), groups of 32, 64, 128 or whole rows, and after the split over ranks outputs in multiples of 64 and
inputs in multiples of 128 and of the group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .formats.base import WeightFormat
from .plan import Plan
from .scheme import CodebookScheme, FloatScheme, IntScheme, Scheme
from .selection import fused_groups, split_fusions

# What llmopt's own engine runs; other model types are written for others to load.
ENGINE_TYPES = frozenset(
    {
        "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "phi3",
        "gpt_oss", "llama4_text", "deepseek_v2", "deepseek_v3", "gpt2", "falcon",
    }
)  # fmt: skip
# Split over ranks along the inputs; all other linears along the outputs.
_ROW_PARALLEL = ("o_proj", "down_proj", "w2", "out_proj", "dense", "fc2")
_MARLIN_GROUPS = (-1, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Loader:
    """One line of the table: who, of which format, whether, and why not or what it needs."""

    name: str
    format: str
    loads: bool
    reason: str


def loaders(plan: Plan, tensor_parallel: int = 1) -> list[Loader]:
    """Every loader of every format of a plan."""
    return [
        Loader(name, weight_format.name, loads, reason)
        for weight_format in plan.formats
        for name, (loads, reason) in {
            "llmopt": _llmopt(plan),
            "transformers": _transformers(plan, weight_format),
            f"vLLM, {tensor_parallel} rank{'s' if tensor_parallel > 1 else ''}": _vllm(
                plan, weight_format, tensor_parallel
            ),
            "llama.cpp": (
                (True, "") if weight_format.name == "gguf" else (False, "it reads GGUF files only")
            ),
        }.items()
    ]


def _llmopt(plan: Plan) -> tuple[bool, str]:
    if plan.architecture.model_type in ENGINE_TYPES:
        return True, ""
    return (
        False,
        f"its engine does not run {plan.architecture.model_type}; verify and convert do read it",
    )


def _transformers(plan: Plan, weight_format: WeightFormat) -> tuple[bool, str]:
    needs = {
        "awq": "needs gptqmodel and accelerate",
        "gptq": "needs optimum and gptqmodel",
        "bitsandbytes": "needs bitsandbytes and accelerate",
        "fp8": "needs accelerate; without a GPU of compute capability 8.9 it computes in 16 bits",
        "gguf": "needs gguf, and gguf_file= with the name of the file",
        "compressed-tensors": "needs compressed-tensors",
    }
    if weight_format.name not in needs:
        return False, f"it has no reader for the format {weight_format.name}"
    plain = [s for s in plan.schemes.values() if isinstance(s, IntScheme) and s.activations is None]
    if weight_format.name == "compressed-tensors" and not all(s.symmetric for s in plain):
        return True, "needs compressed-tensors and CompressedTensorsConfig(dequantize=True)"
    return True, needs[weight_format.name]


def _vllm(plan: Plan, weight_format: WeightFormat, ranks: int) -> tuple[bool, str]:
    if weight_format.name == "gguf":
        return False, "GGUF went out of vLLM into a plugin"
    if weight_format.name == "squeezellm":
        return False, "vLLM no longer reads squeezellm"
    split = split_fusions(plan.architecture, plan.schemes)
    if split:
        return False, f"{' and '.join(split[0][:2])} are one matrix there, and differ in scheme"
    if weight_format.name == "bitsandbytes":
        if ranks > 1:
            return False, "prequantized bitsandbytes weights cannot be split over ranks"
        return True, "weights stay codes, with bitsandbytes installed"
    kernels = set()
    for module, scheme, out_features, in_features in _parts(plan, ranks):
        loads, text = _kernel(weight_format.name, scheme, out_features, in_features)
        if not loads:
            return False, f"{module} ({out_features} × {in_features} on a rank): {text}"
        kernels.add(text)
    return True, ", ".join(sorted(kernels))


def _parts(plan: Plan, ranks: int) -> Iterator[tuple[str, Scheme, int, int]]:
    """Each matrix as vLLM holds it on one rank: fused along the outputs, then split."""
    fused = {group[0]: group for group in fused_groups(plan.architecture)}
    members = {name for group in fused.values() for name in group[1:]}
    experts = {name for name in plan.modules if ".experts." in name}
    for module, (out_features, in_features) in plan.modules.items():
        if module in members and module not in experts:
            continue
        group = fused.get(module, (module,)) if module not in experts else (module,)
        out_features = sum(plan.modules[name][0] for name in group)
        if module.endswith(_ROW_PARALLEL):
            in_features = in_features // ranks if in_features % ranks == 0 else 1
        else:
            out_features = out_features // ranks if out_features % ranks == 0 else 1
        yield module, plan.schemes[module], out_features, in_features


def _kernel(name: str, scheme: Scheme, out_features: int, in_features: int) -> tuple[bool, str]:
    """The kernel that takes such a weight, or the rule that none of them meets."""
    if isinstance(scheme, FloatScheme):
        if scheme.granularity == "block" and (out_features % 128 or in_features % 128):
            return False, "fp8 blocks need multiples of 128 on both sides"
        return _cutlass(out_features, in_features) if scheme.activations else (True, "FP8 Marlin")
    if not isinstance(scheme, IntScheme):
        kind = "codebooks" if isinstance(scheme, CodebookScheme) else "such codes"
        return False, f"no kernel for {kind} in the format {name}"
    if scheme.activations is not None:
        return _cutlass(out_features, in_features)
    broken = _marlin_rule(scheme, out_features, in_features)
    if broken is None:
        return True, "Marlin"
    if name == "awq" and scheme.divides(in_features) and not out_features % 8:
        return True, f"the slower AWQ GEMM, since {broken}"
    if name == "gptq" and scheme.bits in (2, 3, 4, 8) and not out_features % 32:
        return True, f"the slower exllama kernel, since {broken}"
    return False, f"{broken}, and the format {name} has no other kernel"


def _cutlass(out_features: int, in_features: int) -> tuple[bool, str]:
    if out_features % 16 or in_features % 16:
        return False, "8-bit matrix products need multiples of 16 on both sides"
    return True, "CUTLASS W8A8"


def _marlin_rule(scheme: IntScheme, out_features: int, in_features: int) -> str | None:
    """The first of Marlin's rules that a weight breaks."""
    if scheme.bits not in (4, 8):
        return f"Marlin has no {scheme.bits}-bit weights"
    if not scheme.symmetric and scheme.bits != 4:
        return "Marlin takes zero codes with 4 bits only"
    if scheme.group_size not in _MARLIN_GROUPS:
        return f"Marlin has no groups of {scheme.group_size}"
    if out_features % 64:
        return f"Marlin needs outputs in multiples of 64, not {out_features}"
    if in_features % 128:
        return f"Marlin needs inputs in multiples of 128, not {in_features}"
    if scheme.group_size > 0 and in_features % scheme.group_size:
        return f"Marlin needs whole groups of {scheme.group_size} on every rank"
    return None

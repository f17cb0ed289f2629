"""What vLLM loads: the rules of its kernels, from the source of 0.32; `make owners` compares them with it.

Linears: Marlin takes symmetric 4 and 8 bits, or 4 bits with zero codes, groups of 32, 64, 128 or whole rows,
and pads what does not fill its tiles; the rest of compressed-tensors' 2 to 8 bits goes to Triton (4 bits) or
to the optional package humming. Experts go to Marlin's or Triton's. `gptq` is read with symmetric 4 and 8
bits and without dynamic act-order. Its FP4 kernels need a GPU: Marlin computes in 16 bits, W4A4 on Blackwell.
GPU kernels were never run here; "tried" is vLLM for CPU on a llama and two image-text models.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..base.scheme import Scheme
from ..kinds.codebook.scheme import CodebookScheme
from ..kinds.fp4.scheme import Fp4Scheme
from ..kinds.fp8.scheme import FloatScheme
from ..kinds.integer.scheme import IntScheme
from .contents import CheckpointContents

VERSION = "0.32"
# Split over ranks along the inputs; all other linears along the outputs.
_ROW_PARALLEL = ("o_proj", "down_proj", "w2", "out_proj", "dense", "fc2")
_EXPERTS = ".experts."
_MARLIN_GROUPS = (-1, 32, 64, 128)
_TRITON_GROUPS = (*_MARLIN_GROUPS, 256)
_BLOCK = 128
_FP4_MARLIN = "FP4 Marlin"
_HUMMING = "Humming (needs the package humming)"
_NOT_TRIED, _ON_A_CPU = "not tried", "tried on a CPU"
_TRIED_TYPE = "llama"  # of the models that `tools/owners.py` loads
_TRIED_WITH_IMAGES = ("idefics3", "qwen2_5_vl")  # and of those that `tools/vision_owners.py` does


def vllm_loads(stored: CheckpointContents, name: str, ranks: int) -> tuple[bool, str]:
    """Whether vLLM's kernels take such a checkpoint on each of `ranks`, and which or why not."""
    if name == "gguf":
        return False, "GGUF went out of vLLM into a plugin"
    if name == "exl3":
        return False, "vLLM has no kernels for trellis codes"
    if name == "quip":
        return False, "vLLM has no kernels for lattice codes"
    if name in ("squeezellm", "bitsandbytes"):
        return False, f"vLLM no longer reads {name}"
    for group in stored.matrices():
        if len({stored.schemes.get(module) for module in group}) > 1:
            return False, f"{' and '.join(group[:2])} are one matrix there, and differ in scheme"
    if name == "modelopt" and (reason := _excluded_too(stored)):
        return False, reason
    kernels = set()
    for matrix in _matrices(stored, ranks):
        loads, text = matrix.kernel(name)
        if not loads:
            shape = f"{matrix.out_features} × {matrix.in_features} on a rank"
            return False, f"{matrix.module} ({shape}): {text}"
        kernels.add(text)
    tried = ranks == 1 and all(
        _tried(stored.model_type, name, scheme) for scheme in set(stored.schemes.values())
    )
    return True, f"{', '.join(sorted(kernels))}; {_ON_A_CPU if tried else _NOT_TRIED}"


def _tried(model_type: str, name: str, scheme: Scheme) -> bool:
    """Whether vLLM for CPU loaded such a checkpoint."""
    if model_type in _TRIED_WITH_IMAGES:
        rounded = isinstance(scheme, IntScheme) and scheme.symmetric and scheme.activations is None
        if name != "compressed-tensors" or not (rounded or isinstance(scheme, FloatScheme)):
            return False
    elif model_type != _TRIED_TYPE:
        return False
    if isinstance(scheme, FloatScheme):
        return name == "compressed-tensors" and scheme.granularity == "channel"
    if not isinstance(scheme, IntScheme):
        return False
    if scheme.activations is not None:
        return name == "compressed-tensors" and scheme.activations.dynamic
    if scheme.bits != 4:
        return False
    return scheme.symmetric or name in ("compressed-tensors", "awq")


class Matrix:
    """A matrix as vLLM holds it on one rank: fused along the outputs, then split.

    Attributes:
        module: the first linear in it.
        parts: outputs of each linear in it, on the rank.
    """

    def __init__(self, module: str, scheme: Scheme, parts: list[int], in_features: int, ranks: int):
        self.module, self.scheme = module, scheme
        self.row_parallel = module.endswith(_ROW_PARALLEL)
        self.ranks = ranks
        # A width that the ranks do not divide is one that no group or block divides either.
        if self.row_parallel:
            self.parts = parts
            self.in_features = in_features // ranks if in_features % ranks == 0 else 1
        else:
            self.parts = [out // ranks if out % ranks == 0 else 1 for out in parts]
            self.in_features = in_features

    @property
    def out_features(self) -> int:
        """Outputs on a rank."""
        return sum(self.parts)

    def kernel(self, name: str) -> tuple[bool, str]:
        """The kernel that takes it in format `name`, or the violated rule."""
        scheme = self.scheme
        if isinstance(scheme, Fp4Scheme):
            return self._fp4(scheme)
        if isinstance(scheme, FloatScheme):
            if name == "modelopt" and scheme.granularity == "block":
                return self._modelopt_blocks()
            if scheme.granularity == "block" and (reason := self._block_rule()):
                return False, reason
            return True, "CUTLASS W8A8" if scheme.activations else "FP8 Marlin"
        if not isinstance(scheme, IntScheme):
            kind = "codebooks" if isinstance(scheme, CodebookScheme) else "such codes"
            return False, f"no kernel for {kind} in the format {name}"
        if scheme.activations is not None:
            return self._int8(scheme)
        if name == "gptq" and (
            scheme.bits not in (4, 8) or not scheme.symmetric or scheme.permuted
        ):
            return (
                False,
                "of this format it reads symmetric 4 and 8 bits, without dynamic act-order",
            )
        broken = self._group_rule(scheme) or self._marlin_rule(scheme)
        if broken is None:
            return True, "Marlin"
        return self._other(name, scheme, broken)

    def _other(self, name: str, scheme: IntScheme, broken: str) -> tuple[bool, str]:
        """The kernel in place of Marlin, whose rule is `broken`."""
        if self._group_rule(scheme) is not None:
            return False, broken
        if _EXPERTS in self.module:
            if scheme.group_size > 0 and scheme.bits in (4, 8):
                return True, f"Triton experts, since {broken}"
        elif name == "awq":
            return True, f"the slower AWQ GEMM, since {broken}"
        elif name == "gptq":
            return False, f"{broken}, and vLLM reads no gptq without it"
        elif scheme.bits == 4 and scheme.group_size in _TRITON_GROUPS and not self.out_features % 8:
            return True, f"Triton, since {broken}"
        if name == "compressed-tensors":
            return True, f"{_HUMMING}, since {broken}"
        return False, f"{broken}, and the format {name} has no other kernel"

    def _fp4(self, scheme: Fp4Scheme) -> tuple[bool, str]:
        if self.in_features % scheme.block_size:
            return (
                False,
                f"{scheme.kind} needs inputs in multiples of {scheme.block_size} on a rank",
            )
        if scheme.activations is None:
            return True, f"{_FP4_MARLIN}, on a GPU alone"
        return True, f"W4A4 kernels on Blackwell, else {_FP4_MARLIN}, on a GPU alone"

    def _modelopt_blocks(self) -> tuple[bool, str]:
        """FP8_PB_WO, whose inputs vLLM quantizes in groups too."""
        if self.in_features % _BLOCK:
            return False, f"FP8_PB_WO needs inputs in multiples of {_BLOCK} on a rank"
        reason = self._block_rule()
        return (False, reason) if reason else (True, "block W8A8, inputs quantized too")

    def _int8(self, scheme: IntScheme) -> tuple[bool, str]:
        if not scheme.symmetric:
            return False, "with quantized activations it supports symmetric int8 weights only"
        if self.out_features % 16 or self.in_features % 16:
            return True, "the slower Triton W8A8, since CUTLASS needs multiples of 16"
        return True, "CUTLASS W8A8"

    def _block_rule(self) -> str | None:
        """Blocks of fp8 are split between ranks and merged matrices only at their borders."""
        split = self.parts if self.ranks > 1 and not self.row_parallel else self.parts[:-1]
        if _EXPERTS in self.module:
            split = [self.in_features] if self.row_parallel else self.parts
        if any(out % _BLOCK for out in split):
            return (
                f"fp8 blocks need outputs in multiples of {_BLOCK} where they are split or merged"
            )
        if self.ranks > 1 and self.row_parallel and self.in_features % _BLOCK:
            return f"fp8 blocks need inputs in multiples of {_BLOCK} on a rank"
        return None

    def _group_rule(self, scheme: IntScheme) -> str | None:
        if scheme.group_size > 0 and self.in_features % scheme.group_size:
            return f"it needs whole groups of {scheme.group_size} on every rank"
        return None

    def _marlin_rule(self, scheme: IntScheme) -> str | None:
        """The first of Marlin's rules that it violates."""
        if scheme.bits not in (4, 8):
            return f"Marlin has no {scheme.bits}-bit weights"
        if not scheme.symmetric and scheme.bits != 4:
            return "Marlin supports zero points with 4 bits only"
        if scheme.group_size not in _MARLIN_GROUPS:
            return f"Marlin has no groups of {scheme.group_size}"
        if _EXPERTS not in self.module:
            return None
        hidden, inner = self.in_features, self.out_features
        if self.row_parallel:
            hidden, inner = inner, hidden
        if hidden % 128:
            return f"Marlin needs experts on hidden states in multiples of 128, not {hidden}"
        if scheme.group_size > 0 and inner % scheme.group_size:
            return (
                f"Marlin needs experts with whole groups of {scheme.group_size} inside, not {inner}"
            )
        return None


def _excluded_too(stored: CheckpointContents) -> str | None:
    """Why a quantized linear is taken as excluded: ModelOpt's list is matched as parts of names."""
    names = "\n".join(stored.shapes)
    part = next((plain for plain in stored.plain if plain in names), None)
    if part is None:
        return None
    linear = next(name for name in stored.shapes if part in name)
    return f"it takes {linear} as excluded, because {part} is"


def _matrices(stored: CheckpointContents, ranks: int) -> Iterator[Matrix]:
    """Every matrix of a checkpoint; experts are one matrix each."""
    for group in stored.matrices():
        together = [[name] for name in group] if _EXPERTS in group[0] else [group]
        for names in together:
            parts = [stored.shapes[name][0] for name in names]
            in_features = stored.shapes[names[0]][1]
            yield Matrix(names[0], stored.schemes[names[0]], parts, in_features, ranks)

"""vLLM's rules for a checkpoint, from the source of 0.32; `make owners` compares them with it.

Those of single matrices are the kinds' (`LoaderRules`, in the `formats.py` of each).

Linears: Marlin takes symmetric 4 and 8 bits, or 4 bits with zero codes, groups of 32, 64, 128 or whole rows,
and pads what does not fill its tiles; the rest of compressed-tensors' 2 to 8 bits goes to Triton (4 bits) or
to the optional package humming. Experts go to Marlin's or Triton's. `gptq` is read with symmetric 4 and 8
bits and without dynamic act-order. Its FP4 kernels need a GPU: Marlin computes in 16 bits, W4A4 on Blackwell.
GPU kernels were never run here; "tried" is vLLM for CPU on a llama and two image-text models.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..base.scheme import Scheme
from ..kinds.base.kind import EXPERTS, RankMatrix, storage_of
from .contents import CheckpointContents

VERSION = "0.32"
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
    """Whether vLLM for CPU loaded such a checkpoint."""
    rules = storage_of(scheme).rules
    if family in _TRIED_WITH_IMAGES:
        if name != "compressed-tensors" or not rules.vllm_tried_with_images(scheme):
            return False
    elif family != _TRIED_TYPE:
        return False
    return rules.vllm_tried(scheme, name)


def _excluded_too(stored: CheckpointContents) -> str | None:
    """Why a quantized linear is taken as excluded: ModelOpt's list is matched as parts of names."""
    names = "\n".join(stored.shapes)
    part = next((plain for plain in stored.plain if plain in names), None)
    if part is None:
        return None
    linear = next(name for name in stored.shapes if part in name)
    return f"it takes {linear} as excluded, because {part} is"


def _matrices(stored: CheckpointContents, ranks: int) -> Iterator[RankMatrix]:
    """Every matrix of a checkpoint; experts are one matrix each."""
    for group in stored.matrices():
        together = [[name] for name in group] if EXPERTS in group[0] else [group]
        for names in together:
            parts = [stored.shapes[name][0] for name in names]
            in_features = stored.shapes[names[0]][1]
            yield RankMatrix.of(names[0], parts, in_features, ranks)

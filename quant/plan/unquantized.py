"""The modules that a checkpoint leaves unquantized, under every name that a loader looks them up by.

A loader that is not told so looks for codes in each linear, and transformers leaves a linear whose codes it
does not find uninitialised. vLLM takes the names on disk, transformers those of its modules; a config lists both.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from ..base.errors import BadInput
from ..model.checkpoint import Checkpoint
from ..model.parameters import ModelParameters
from ..request.selection import HEAD

_EXPERTS = ".experts"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def unquantized_modules(checkpoint: Checkpoint, quantized: Collection[str]) -> tuple[str, ...]:
    """All linears, embeddings and fused experts that are not in `quantized`, the output projection first.

    Args:
        quantized: names on disk. The checkpoint itself may be the plain or the quantized one.
    """
    on_disk = dict.fromkeys(_on_disk(checkpoint, quantized))
    in_modules = _in_transformers(checkpoint, quantized)
    names = [name for name in {**on_disk, **in_modules} if name not in quantized]
    head = [] if HEAD in quantized else [HEAD]
    return (*head, *(name for name in names if name != HEAD))


def _on_disk(checkpoint: Checkpoint, quantized: Collection[str]) -> Iterator[str]:
    """Modules with a matrix as `weight`, and experts that are kept in 3-D tensors."""
    for name in checkpoint.names:
        module, _, leaf = name.rpartition(".")
        if module in quantized:
            continue
        dimensions = len(checkpoint.shape(name))
        fused_experts = dimensions == 3 and module.endswith(_EXPERTS)
        if fused_experts or (leaf == "weight" and dimensions == 2):
            yield module


def _in_transformers(checkpoint: Checkpoint, quantized: Collection[str]) -> Mapping[str, None]:
    """The linears of transformers' modules; none where it does not know the model type."""
    try:
        parameters = ModelParameters(
            checkpoint.config,
            checkpoint.folder,
            trust_remote_code=checkpoint.trust_remote_code,
        )
    except BadInput:  # no loader of transformers' either
        return {}
    loaded = parameters.loaded_from(f"{module}.weight" for module in quantized)
    with_codes = {name.removesuffix(".weight") for names in loaded.values() for name in names}
    return dict.fromkeys(name for name in parameters.linears if name not in with_codes)


def by_kind(names: Iterable[str]) -> list[str]:
    """Names with `*` for layers and experts, each with its number: `model.layers.*.mlp.gate (24)`."""
    counts = Counter(_NUMBER.sub("*", name) for name in names)
    return [f"{kind} ({count})" if count > 1 else kind for kind, count in counts.items()]

"""The modules that a checkpoint leaves unquantized, under every name that a loader looks them up by.

A loader that is not told so looks for codes in each linear, and transformers leaves a linear whose codes it
does not find uninitialised. vLLM takes the names on disk, transformers those of its modules: a config lists
both.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator

from ..base.errors import BadInput
from ..model.checkpoint import Checkpoint
from ..model.experts_apart import experts_of
from ..model.parameters import ModelParameters
from ..request.selection import HEAD

_EXPERTS = ".experts"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def model_parameters(checkpoint: Checkpoint) -> ModelParameters | str:
    """The parameters of transformers' model of a checkpoint, or why transformers has none."""
    try:
        return ModelParameters(
            checkpoint.config,
            checkpoint.folder,
            trust_remote_code=checkpoint.trust_remote_code,
            apart=bool(experts_of(_weights(checkpoint))),
        )
    except BadInput as error:
        return str(error)


def _weights(checkpoint: Checkpoint) -> Iterator[str]:
    """A plain weight's name for each module with a weight or codes."""
    for module in {name.rpartition(".")[0] for name in checkpoint.names}:
        yield f"{module}.weight"


def unquantized_modules(
    checkpoint: Checkpoint, quantized: Collection[str], parameters: ModelParameters | str
) -> tuple[str, ...]:
    """All linears, embeddings and fused experts that are not in `quantized`, the output projection first.

    Args:
        checkpoint: the plain or the quantized one.
        quantized: names on disk.
    """
    on_disk = dict.fromkeys(_on_disk(checkpoint, quantized))
    plain = () if isinstance(parameters, str) else plain_linears(parameters, quantized)
    names = [name for name in {**on_disk, **dict.fromkeys(plain)} if name not in quantized]
    head = [] if HEAD in quantized else [HEAD]
    return (*head, *(name for name in names if name != HEAD))


def plain_linears(parameters: ModelParameters, quantized: Collection[str]) -> list[str]:
    """The linears of transformers' modules that have a weight and no codes, or one computed from codes."""
    loaded = parameters.loaded_from(f"{module}.weight" for module in quantized)
    with_codes = {
        name.removesuffix(".weight")
        for each in loaded.values()
        if not each.converted
        for name in each.parameters
    }
    return [name for name in parameters.linears if name not in with_codes]


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


def by_kind(names: Iterable[str]) -> list[str]:
    """Names that differ in layer or expert as one, with their number: `model.layers.*.mlp.gate (24)`."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(_NUMBER.sub("*", name), []).append(name)
    return [
        members[0] if len(members) == 1 else f"{kind} ({len(members)})"
        for kind, members in kinds.items()
    ]

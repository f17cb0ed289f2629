"""Contents of a checkpoint, as far as its loaders are concerned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..base.scheme import Scheme
from ..families.layer_map import fused_name
from ..families.registry import type_of
from ..model.parameters import ModelParameters
from .plan import QuantizePlan
from .selection import Shapes


@dataclass(frozen=True, slots=True)
class CheckpointContents:
    """Facts that compatibility depends on: the model, and every linear.

    Attributes:
        shapes: `(out_features, in_features)` of the quantized linears by full name, by layer.
        plain: the unquantized linears.
        names: of all tensors, `weight` for the codes of a quantized linear.
        parameters: of transformers' model, or why transformers has none.
        text_family: that of the language model where it is wrapped in another; else empty.
    """

    family: str
    shapes: Shapes
    schemes: Mapping[str, Scheme]
    plain: Sequence[str]
    names: Sequence[str]
    parameters: ModelParameters | str
    text_family: str = ""

    def matrices(self) -> list[list[str]]:
        """The fused matrices of servers that are at least partly quantized."""
        groups: dict[str, list[str]] = defaultdict(list)
        for name in (*self.shapes, *self.plain):
            groups[fused_name(name)].append(name)
        return [group for group in groups.values() if group[0] in self.shapes]


def stored(plan: QuantizePlan) -> CheckpointContents:
    """The contents that a plan will write."""
    checkpoint = plan.checkpoint
    wrapped = checkpoint.text_config is not checkpoint.config
    return CheckpointContents(
        plan.architecture.family,
        plan.modules,
        plan.schemes,
        plan.unquantized,
        plan.checkpoint.names,
        plan.parameters,
        type_of(checkpoint.text_config) if wrapped else "",
    )

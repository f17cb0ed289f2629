"""Map of a layer: its linears by the tensor that they read, and where input scales can be folded.

A scale folds only into an operation that is linear in each channel: a norm's weight, rows of a projection,
the `up` half of a gated MLP. Every consumer of the input must be scaled too, routers included. Maps are
discovered (`quant/smoothing`), in the names on disk.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def fused_name(linear: str) -> str:
    """The name of the first of the linears that servers fuse with this one: equal for all of them."""
    parent, dot, leaf = linear.rpartition(".")
    return f"{parent}{dot}{_FUSED.get(leaf, leaf)}"


@dataclass(frozen=True, slots=True)
class Fold:
    """A foldable pair: `source` is divided by the scales, the columns of `targets` are multiplied.

    Attributes:
        source: a norm, or a linear whose rows feed the targets channel by channel.
        targets: all consumers of this input: linears, and routers.
        rows: the rows `[start, stop)` of a fused source that feed the targets; None: all of them.
        norm_offset: constant added to the norm's weight before it multiplies; 1 in Gemma.
        groups, repeats: map of rows to columns: the rows `[groups, width]` feed the columns
            `[groups, repeats, width]`. With grouped-query attention a group is a value head, repeated for the
            query heads that read it; a norm over each head is one group, repeated for every head.
    """

    source: str
    targets: tuple[str, ...]
    rows: tuple[int, int] | None = None
    norm_offset: float = 0.0
    groups: int = 1
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class LayerMap:
    """Linears of a layer by their input, and the foldable pairs among them; names are relative to the layer.

    Attributes:
        shared_inputs: the linears, grouped by their input tensor, in execution order.
        folds: pairs in the order in which they are searched.
        unclipped: linears that AWQ must not clip, because it harms attention scores.
        routers: modules with a float weight `[experts, in]` whose input may be scaled.
    """

    shared_inputs: tuple[tuple[str, ...], ...]
    folds: tuple[Fold, ...]
    unclipped: frozenset[str]
    routers: tuple[str, ...] = ()

    @property
    def linears(self) -> tuple[str, ...]:
        return tuple(name for group in self.shared_inputs for name in group)

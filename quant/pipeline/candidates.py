"""Candidates of a mixed precision: the linears that share one scheme, and the schemes that they may have.

Linears that servers fuse into one matrix (q/k/v, gate/up) are one choice, and so are the experts of a layer;
a GGUF file has a type for each tensor. A candidate is a scheme for all linears of the model, or none: they
stay in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

import torch

from ..base.atomic_io import entry_bytes
from ..base.errors import BadInput
from ..base.scheme import PER_CHANNEL, Scheme
from ..gguf.architecture import architecture_of as gguf_architecture
from ..gguf.architecture import to_gguf
from ..gguf.mix import fitting
from ..kinds.base.kind import EXPERTS, kind_of
from ..kinds.ggml.scheme import GGUF_BLOCKS, GgufScheme
from ..plan.plan import QuantizePlan
from .divergence import round_layer
from .preflight import module_sizes, unquantized_bytes

GROUP_SIZES = (128, 64, 32)


def groups_of(plan: QuantizePlan, prefix: str, linears: Sequence[str]) -> list[tuple[str, ...]]:
    """The full names of linears of a layer, those together that must have one scheme.

    Args:
        linears: that share an input, by their names in the layer.
    """
    architecture = gguf_architecture(plan.checkpoint.config) if is_gguf(plan) else ""
    groups: dict[str, list[str]] = {}
    for linear in linears:
        module = f"{prefix}{linear}"
        if module not in plan.modules:
            continue
        if is_gguf(plan):
            key = to_gguf(module, architecture) or module
        elif EXPERTS in module and not plan.method.transformed:
            key = module.partition(EXPERTS)[0]
        else:
            key = linears[0]
        groups.setdefault(key, []).append(module)
    return [tuple(group) for group in groups.values()]


def is_gguf(plan: QuantizePlan) -> bool:
    """Whether the weights have ggml's block types."""
    return any(isinstance(scheme, GgufScheme) for scheme in plan.schemes.values())


@dataclass(frozen=True, slots=True)
class Search:
    """Candidates under a target, the smallest first; 16 bits are the last.

    Attributes:
        budget: bytes that the linears may take.
        schemes, sizes: of every module under each candidate, and its bytes; a module without a scheme stays
            as it is.
        uniform: the largest candidate within the budget.
    """

    plan: QuantizePlan
    budget: int
    schemes: tuple[dict[str, Scheme], ...]
    sizes: tuple[dict[str, int], ...]
    uniform: int

    def round_uniform(
        self, prefix: str, weights: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """A layer's weights rounded to the uniform scheme, behind which later layers are measured."""
        return round_layer(self.plan, self.schemes[self.uniform], prefix, weights)

    @property
    def num_weights(self) -> int:
        """Weights of all linears."""
        return sum(rows * columns for rows, columns in self.plan.modules.values())

    def bytes_of(self, schemes: Mapping[str, Scheme]) -> int:
        """Bytes of the linears with a choice of schemes, where each is one of the candidates'."""
        kinds = list(zip(self.schemes, self.sizes, strict=True))
        return sum(
            next(sizes[module] for kind, sizes in kinds if kind.get(module) == schemes.get(module))
            for module in self.plan.modules
        )

    def label(self, number: int) -> str:
        """The name of a candidate: its most common scheme."""
        labels = [scheme.label for scheme in self.schemes[number].values()]
        return max(labels, key=labels.count, default="16 bits")


def search_of(plan: QuantizePlan, target_bpw: float | None, target_bytes: int | None) -> Search:
    """The candidates under a target.

    Raises:
        BadInput: the target is too small for every one.
    """
    weights = sum(rows * columns for rows, columns in plan.modules.values())
    if target_bpw is not None:
        budget = int(target_bpw * weights / 8)
    else:
        assert target_bytes is not None
        budget = target_bytes - unquantized_bytes(plan, plan.format) - plan.kv_scale_bytes
    kinds = _candidates(plan, budget)
    fitting = [number for number, (_, size) in enumerate(kinds) if sum(size.values()) <= budget]
    if not fitting:
        least = sum(kinds[0][1].values())
        if target_bytes is None:
            option = f"--target-bpw {ceil(least * 8e3 / weights) / 1e3:g}"
        else:
            option = f"--target-size {ceil((least + target_bytes - budget) / 2**10)}KiB"
        raise BadInput(f"{too_small(budget, least)}; the least is {option}")
    plain = {module: _plain_bytes(plan, module) for module in plan.modules}
    if sum(plain.values()) > budget:  # else nothing would be quantized
        kinds.append(({}, plain))
    schemes, sizes = zip(*kinds, strict=True)
    return Search(plan, budget, schemes, sizes, fitting[-1])


def too_small(budget: int, least: int) -> BadInput:
    """The error of a target below the fewest bytes."""
    return BadInput(
        f"the target is too small: with the fewest bits everywhere the linears take {least:,} "
        f"bytes, and {max(budget, 0):,} are left for them"
    )


def _candidates(plan: QuantizePlan, budget: int) -> list[tuple[dict[str, Scheme], dict[str, int]]]:
    """Schemes and bytes of all modules under each candidate that the formats hold, the smallest first.

    The first tier has what servers have kernels for, or what the solver goes to; the others are tried where
    the target requires them.
    """
    candidates, refusal = [], BadInput("no scheme has other widths")
    for tier in _tiers(plan):
        candidates = []
        for kind in tier:
            try:
                for weight_format in plan.formats:
                    for name, shape in plan.modules.items():
                        weight_format.check_scheme(kind[name])
                        weight_format.check(name, *shape, kind[name])
            except BadInput as error:
                refusal = error
                continue
            candidates.append((kind, module_sizes(replace(plan, schemes=kind), plan.format)))
        candidates.sort(key=lambda pair: sum(pair[1].values()))
        if candidates and sum(candidates[0][1].values()) <= budget:
            break
    if not candidates:
        raise refusal
    return candidates


def _tiers(plan: QuantizePlan) -> Iterator[Iterator[dict[str, Scheme]]]:
    """The schemes of all modules, in tiers; each has those of the tiers before."""
    if is_gguf(plan):
        solved = [b for b in GGUF_BLOCKS if kind_of(GgufScheme(b)).refuses_solver is None]
        yield from (_block_types(plan, blocks) for blocks in (solved, GGUF_BLOCKS))
        return
    for widths in max(scheme.searched_widths for scheme in plan.schemes.values()):
        yield _kinds(plan, widths)


def _plain_bytes(plan: QuantizePlan, module: str) -> int:
    """Bytes of a linear that stays as it is."""
    name = f"{module}.weight"
    return entry_bytes((plan.checkpoint.dtype_name(name), plan.checkpoint.shape(name)))


def _block_types(plan: QuantizePlan, blocks: Iterable[str]) -> Iterator[dict[str, Scheme]]:
    """The schemes of all modules with each of these types, or its fallback for their width."""
    last: list[dict[str, GgufScheme]] = []
    for block in blocks:
        types = {name: fitting(block, shape[1]) for name, shape in plan.modules.items()}
        kind = {name: GgufScheme(found) for name, found in types.items() if found is not None}
        if len(kind) == len(types) and kind not in last:
            last.append(kind)
            yield dict(kind)


def _kinds(plan: QuantizePlan, widths: Sequence[int]) -> Iterator[dict[str, Scheme]]:
    """The schemes of all modules with each width and, for integers, each group size."""
    divided = [
        size
        for size in GROUP_SIZES
        if all(columns % size == 0 for _, columns in plan.modules.values())
    ]
    base = {name: scheme for name, scheme in plan.schemes.items() if scheme.searched_widths}
    sizes = divided or sorted({scheme.scale_group or PER_CHANNEL for scheme in base.values()})
    last = None
    for bits in widths:
        for size in sizes:
            kind = {name: scheme.at_width(bits, size) for name, scheme in base.items()}
            if kind != last:  # without groups all sizes are the same
                yield kind
            last = kind

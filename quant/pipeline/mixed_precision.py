"""Mixed precision: a scheme for each linear, of least expected KL divergence within a number of bytes.

The cost of a candidate is the squared error of its outputs behind the codes of the method's own solver,
weighted by what the model's output feels of it (`sensitivity`). These costs are nats a token, and add up;
`allocate` solves for the least sum. They are measured behind the layers before, rounded to one scheme of the
same size, and the choice must have a smaller KL divergence than that scheme.

HiGHS solves the allocation as a mixed-integer program. Each choice takes one of its candidates; what they
cost adds up, and so do their bytes, which have a bound: the multiple-choice knapsack problem. Its front is
made by sweeping the bound.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..base.errors import BadInput
from ..base.progress import Progress
from ..base.scheme import Scheme
from ..families.layer_map import LayerMap
from ..gguf.mix import mix_of
from ..model.parameters import unquantized_modules
from ..plan.plan import QuantizePlan, check_plan
from ..plan.selection import HEAD
from ..stream.calibration import Images
from ..stream.layer_stream import LayerStream
from .cached_calibration import StatisticsFolder
from .candidates import Search, groups_of, is_gguf, too_small
from .divergence import Solved, divergences, solve_layer
from .quantized_layer import HEAD_FAMILY, LayerStatistics
from .sensitivity import LayerSensitivity, Sensitivities

_POINTS = 16  # of the front


def measure_choices(
    search: Search, sensitivities: Sensitivities, folder: StatisticsFolder, progress: Progress
) -> list[Choice]:
    """Solve every linear for every candidate, and weigh the errors of its outputs."""
    plan, choices = search.plan, []
    progress.start("measuring candidates", plan.num_layers + plan.lm_head, "layers")
    for index, family in enumerate(plan.architecture.layers):
        measured = folder.read(f"layer-{index:05d}", family, plan.device)
        sensitivity = sensitivities.read(index, family)
        prefix = plan.architecture.layer_prefix(index)
        choices += _layer_choices(search, prefix, family, measured, sensitivity)
        plan.checkpoint.release()
        progress.advance()
    if plan.lm_head:
        measured = folder.read("head", HEAD_FAMILY, plan.device)
        sensitivity = sensitivities.read(None, HEAD_FAMILY)
        choices += _layer_choices(search, "", HEAD_FAMILY, measured, sensitivity)
    progress.finish()
    return choices


def _layer_choices(
    search: Search,
    prefix: str,
    family: LayerMap,
    measured: LayerStatistics,
    sensitivity: LayerSensitivity,
) -> list[Choice]:
    """The choices of a layer, or of the output projection, which has no prefix."""
    plan, start = search.plan, f"{prefix}." if prefix else ""
    groups = [group for each in family.shared_inputs for group in groups_of(plan, start, each)]
    members = [module for group in groups for module in group]
    tensors = {
        name.removeprefix(start): tensor
        for name, tensor in plan.checkpoint.tensors(start or f"{HEAD}.")
    }
    wanted = [(name, kind[name]) for kind in search.schemes for name in members if name in kind]
    costs: dict[Solved, float] = {}
    for solved, values in solve_layer(plan, family, prefix, tensors, wanted, measured):
        linear = solved[0].removeprefix(start)
        delta = tensors[f"{linear}.weight"].to(plan.device, torch.float32) - values
        costs[solved] = sensitivity.expected(linear, delta, measured.statistics[linear])
    return [_choice(search, group, costs) for group in groups]


def _choice(search: Search, group: tuple[str, ...], costs: Mapping[Solved, float]) -> Choice:
    """Bytes and cost of each candidate for a group; 16 bits cost nothing."""
    return Choice(
        group,
        tuple(sum(size[module] for module in group) for size in search.sizes),
        tuple(
            sum(costs[module, kind[module]] for module in group if module in kind)
            for kind in search.schemes
        ),
    )


def schemes_of(search: Search, choices: list[Choice], allocation: Allocation) -> dict[str, Scheme]:
    """The schemes of an allocation; modules that stay in 16 bits have none."""
    return {
        module: search.schemes[number][module]
        for choice, number in zip(choices, allocation.chosen, strict=True)
        for module in choice.modules
        if module in search.schemes[number]
    }


def with_schemes(plan: QuantizePlan, schemes: Mapping[str, Scheme]) -> QuantizePlan:
    """The plan with a scheme for each linear that has one; the others stay as they are."""
    modules = {module: shape for module, shape in plan.modules.items() if module in schemes}
    counts = Counter({scheme.ggml_type: 0 for scheme in schemes.values()})
    for module, (rows, columns) in modules.items():
        counts[schemes[module].ggml_type] += rows * columns
    block = counts.most_common(1)[0][0] if counts else None
    return replace(
        plan,
        modules=modules,
        schemes={module: schemes[module] for module in modules},
        ignored=(*plan.ignored, *(name for name in plan.modules if name not in modules)),
        unquantized=unquantized_modules(plan.checkpoint, modules, plan.parameters),
        gguf_type=mix_of(block) if is_gguf(plan) and block else plan.gguf_type,
    )


def _holds(plan: QuantizePlan, schemes: Mapping[str, Scheme]) -> bool:
    """Whether the formats hold these schemes in one file."""
    try:
        check_plan(with_schemes(plan, schemes))
    except BadInput:
        return False
    return True


def mixed_plan(
    search: Search,
    sensitivities: Sensitivities,
    folder: StatisticsFolder,
    stream: LayerStream,
    token_ids: torch.Tensor,
    images: Images,
    progress: Progress,
) -> QuantizePlan:
    """The plan with the schemes of least expected KL divergence under the target, where its KL divergence on
    the samples `token_ids`, with their images, is below that of the uniform scheme; else the uniform plan.

    Where a format holds one scheme a file, all linears have the same.
    """
    plan = search.plan
    choices = measure_choices(search, sensitivities, folder, progress)
    best = allocate(choices, search.budget)
    if not _holds(plan, schemes_of(search, choices, best)):
        best = allocate(choices, search.budget, exclusive=True)
    mixed, uniform = schemes_of(search, choices, best), search.schemes[search.uniform]
    check_plan(with_schemes(plan, mixed))
    pair = mixed, uniform
    losses = divergences(plan, stream, token_ids, pair, progress, images, folder)
    is_mixed = losses[0] < losses[1]
    schemes = mixed if is_mixed else uniform
    sizes = [search.bytes_of(kind) * 8 / search.num_weights for kind in pair]
    counts = Counter(scheme.label for scheme in schemes.values())
    counts["16 bits"] = len(plan.modules) - len(schemes)
    shares = ", ".join(f"{count} {label}" for label, count in sorted(counts.items()) if count)
    label = search.label(search.uniform)
    notes = (
        f"note: {sizes[0 if is_mixed else 1]:.3f} bits per weight of at most "
        f"{search.budget * 8 / search.num_weights:.3f}: {shares}",
        f"note: expected KL {best.cost:.4g}, at most {best.gap:.2%} above the least",
        f"note: KL from the float model on {token_ids.numel():,} tokens: mixed "
        f"{losses[0]:.4g} at {sizes[0]:.3f} bits, {label} everywhere {losses[1]:.4g} at {sizes[1]:.3f}: "
        f"{'mixed' if is_mixed else 'uniform'} is taken",
    )
    record = {
        "kl_tokens": token_ids.numel(),
        "mixed": {"bits_per_weight": sizes[0], "kl": losses[0], "expected_kl": best.cost},
        "uniform": {"scheme": label, "bits_per_weight": sizes[1], "kl": losses[1]},
        "taken": "mixed" if is_mixed else "uniform",
        "gap": best.gap,
        "front": _record(search, front(choices, _POINTS)),
    }
    return replace(with_schemes(plan, schemes), notes=(*plan.notes, *notes), search=record)


def _record(search: Search, allocations: list[Allocation]) -> list[dict[str, Any]]:
    """The front for the manifest."""
    return [
        {"bits_per_weight": each.bytes * 8 / search.num_weights, "expected_kl": each.cost}
        for each in allocations
    ]


_SECONDS = 60.0  # a hundred layers of twenty candidates take less than one
_GAP = 1e-4


@dataclass(frozen=True, slots=True)
class Choice:
    """Linears that share one scheme, with bytes and cost of each candidate.

    Attributes:
        costs: expected KL divergence of the model's output, in nats a token.
    """

    modules: tuple[str, ...]
    bytes: tuple[int, ...]
    costs: tuple[float, ...]

    @property
    def efficient(self) -> list[int]:
        """The candidates that no other beats in both bytes and cost, the smallest first."""
        kept: list[int] = []
        for number in sorted(range(len(self.bytes)), key=lambda n: (self.bytes[n], self.costs[n])):
            if not kept or self.costs[number] < self.costs[kept[-1]]:
                kept.append(number)
        return kept


@dataclass(frozen=True, slots=True)
class Allocation:
    """A candidate for each choice.

    Attributes:
        bytes, cost: of all together.
        gap: how much less the least cost may be at most, as a share of the cost.
    """

    chosen: tuple[int, ...]
    bytes: int
    cost: float
    gap: float


def allocate(choices: Sequence[Choice], budget: int, *, exclusive: bool = False) -> Allocation:
    """The candidates of least total cost within `budget` bytes.

    Args:
        exclusive: all choices take the same candidate, for formats that hold one scheme.

    Raises:
        BadInput: even the smallest candidates are too large.
    """
    if exclusive:
        choices_of_all = _joined(choices)
        found = allocate([choices_of_all], budget)
        return Allocation(found.chosen * len(choices), found.bytes, found.cost, found.gap)
    pairs = [(at, number) for at, choice in enumerate(choices) for number in choice.efficient]
    least = sum(min(choice.bytes) for choice in choices)
    if least > budget:
        raise too_small(budget, least)
    taken, gap = _solved(choices, pairs, budget)
    return Allocation(
        taken,
        sum(choice.bytes[number] for choice, number in zip(choices, taken, strict=True)),
        sum(choice.costs[number] for choice, number in zip(choices, taken, strict=True)),
        gap,
    )


def front(choices: Sequence[Choice], points: int) -> list[Allocation]:
    """Allocations from the fewest bytes to the most that lower the cost, by evenly spaced bounds."""
    low = sum(min(choice.bytes) for choice in choices)
    high = sum(choice.bytes[choice.efficient[-1]] for choice in choices)
    found: dict[int, Allocation] = {}
    for bound in np.linspace(low, high, points):
        allocation = allocate(choices, int(bound))
        found[allocation.bytes] = allocation
    return [found[size] for size in sorted(found)]


def _joined(choices: Sequence[Choice]) -> Choice:
    """All choices as one."""
    return Choice(
        tuple(module for choice in choices for module in choice.modules),
        tuple(map(sum, zip(*(choice.bytes for choice in choices), strict=True))),
        tuple(map(sum, zip(*(choice.costs for choice in choices), strict=True))),
    )


def _solved(
    choices: Sequence[Choice], pairs: Sequence[tuple[int, int]], budget: int
) -> tuple[tuple[int, ...], float]:
    """The candidate of each choice, and the gap to the optimum."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    costs = np.array([choices[at].costs[number] for at, number in pairs])
    sizes = np.array([choices[at].bytes[number] for at, number in pairs], dtype=np.int64)
    # Whole numbers of the largest unit, bounded by half a one more: the solver's tolerances let no more in.
    unit = np.gcd.reduce(sizes)
    sizes, most = sizes // unit, budget // unit + 0.5
    columns = np.arange(len(pairs))
    one_each = csr_array((np.ones(len(pairs)), ([at for at, _ in pairs], columns)))
    scale = costs.max() or 1.0
    with c_prints_on_stderr():
        result = milp(
            costs / scale,
            integrality=np.ones(len(pairs)),
            bounds=Bounds(0, 1),
            constraints=[
                LinearConstraint(one_each, 1, 1),
                LinearConstraint((sizes / sizes.max())[None], ub=most / sizes.max()),
            ],
            options={"time_limit": _SECONDS, "mip_rel_gap": _GAP},
        )
    if result.x is None:
        raise RuntimeError(f"HiGHS found no allocation: {result.message}")
    taken = {at: number for (at, number), on in zip(pairs, result.x > 0.5, strict=True) if on}
    return tuple(taken[at] for at in range(len(choices))), float(result.mip_gap or 0.0)


@contextlib.contextmanager
def c_prints_on_stderr() -> Iterator[None]:
    """HiGHS prints from C where it repairs a rounded solution, and stdout is the result's alone."""
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        with contextlib.suppress(OSError, TypeError):
            ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)

"""Mixed precision: bits per linear from measured sensitivity, under a byte budget.

Linears that servers fuse into one matrix (q/k/v, gate/up) are one choice. For each choice and candidate
(bits and group size) the relative output error on the calibration data is measured; bytes are then spent
greedily where they reduce most error per byte. No gradients are needed: the Gram matrices give the errors.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..base.errors import BadInput
from ..base.progress import Progress
from ..base.scheme import IntScheme, Scheme
from ..layers.cached_calibration import StatisticsFolder
from ..layers.quantized_layer import HEAD_FAMILY, LayerStatistics
from ..methods.base import LayerProblem
from ..methods.rounding import round_weight
from ..plan.plan import Plan, check_plan
from .preflight import module_sizes, unquantized_bytes

# Servers have kernels for 4 and 8 bits; fewer bits are tried only if the target requires them.
SERVED_BITS, ALL_BITS = (4, 8), (2, 3, 4, 8)
GROUP_SIZES = (128, 64, 32)


@dataclass(frozen=True, slots=True)
class Choice:
    """Linears that share one scheme, with bytes and error of each candidate.

    Attributes:
        bytes, errors: of each candidate, by increasing size; errors are the sums of the members'
            relative output errors.
    """

    modules: tuple[str, ...]
    bytes: tuple[int, ...]
    errors: tuple[float, ...]


def measure_choices(
    plan: Plan,
    schemes: Sequence[Mapping[str, Scheme]],
    sizes: Sequence[Mapping[str, int]],
    folder: StatisticsFolder,
    progress: Progress,
) -> list[Choice]:
    """Round every linear to every candidate and measure the output error.

    Args:
        schemes, sizes: of every module under each candidate, and its bytes.
    """
    progress.start("measuring sensitivity", plan.num_layers + plan.lm_head, "layers")
    choices = []
    layers = [
        (plan.architecture.layer_prefix(index) + ".", f"layer-{index:05d}", family)
        for index, family in enumerate(plan.architecture.layers)
    ]
    if plan.lm_head:
        layers.append(("", "head", HEAD_FAMILY))
    for prefix, name, family in layers:
        measured = folder.read(name, family)
        for group in family.shared_inputs:
            linears = tuple(linear for linear in group if prefix + linear in plan.modules)
            if not linears:
                continue
            errors = _errors(plan, schemes, prefix, linears, measured)
            modules = tuple(prefix + linear for linear in linears)
            costs = [sum(size[module] for module in modules) for size in sizes]
            choices.append(Choice(modules, tuple(costs), errors))
        plan.checkpoint.release()
        progress.advance()
    progress.finish()
    return choices


def _errors(
    plan: Plan,
    schemes: Sequence[Mapping[str, Scheme]],
    prefix: str,
    linears: tuple[str, ...],
    measured: LayerStatistics,
) -> tuple[float, ...]:
    """Summed relative output errors of linears that share an input, per candidate."""
    lost = [0.0] * len(schemes)
    for linear in linears:
        module = prefix + linear
        weight = plan.checkpoint.tensor(f"{module}.weight").to(torch.float32)
        statistics = measured.statistics[linear]
        for number, candidate in enumerate(schemes):
            problem = LayerProblem(
                prefix=prefix.rstrip("."),
                family=HEAD_FAMILY,
                schemes={linear: candidate[module]},
                scale_dtypes={linear: plan.scale_dtype(module)},
                weights={linear: weight},
                statistics={linear: statistics},
                norms={},
                with_bias=frozenset(),
            )
            rounded = round_weight(problem, linear, weight).dequantize()
            lost[number] += statistics.relative_error(weight, rounded)
    return tuple(lost)


def spend(choices: Sequence[Choice], budget: int) -> list[int]:
    """Greedy knapsack: one candidate per choice, within `budget` bytes in total.

    Every choice starts at its smallest candidate. Then steps along the choices' convex hulls are taken in
    order of error reduction per byte, until none fits.

    Raises:
        BadInput: even the smallest candidates are too large.
    """
    chosen = [0] * len(choices)
    free = budget - sum(choice.bytes[0] for choice in choices)
    if free < 0:
        raise BadInput(
            f"the target is too small: with the fewest bits everywhere the linears take "
            f"{budget - free:,} bytes, and {max(budget, 0):,} are left for them"
        )
    steps = [(*_best_step(choice, 0), number) for number, choice in enumerate(choices)]
    heapq.heapify(steps)
    while steps:
        _, target, number = heapq.heappop(steps)
        choice, now = choices[number], chosen[number]
        if target == now:
            continue
        price = choice.bytes[target] - choice.bytes[now]
        if price <= free:
            free -= price
            chosen[number] = target
        elif target > now + 1:  # a smaller step may still fit
            heapq.heappush(steps, (*_best_step(choice, now, target - 1), number))
            continue
        else:
            continue
        heapq.heappush(steps, (*_best_step(choice, target), number))
    return chosen


def _best_step(choice: Choice, now: int, last: int | None = None) -> tuple[float, int]:
    """Negative error reduction per byte, and the candidate, of the best step from `now`; `now` if none."""
    stop = len(choice.bytes) if last is None else last + 1
    steps = [
        (-(choice.errors[now] - choice.errors[to]) / (choice.bytes[to] - choice.bytes[now]), to)
        for to in range(now + 1, stop)
        if choice.bytes[to] > choice.bytes[now] and choice.errors[to] < choice.errors[now]
    ]
    return min(steps, default=(0.0, now))


def _candidates(
    plan: Plan, widths: Sequence[int]
) -> list[tuple[dict[str, Scheme], dict[str, int]]]:
    """Schemes and bytes of all modules under each candidate, the smallest first."""
    divided = [
        size
        for size in GROUP_SIZES
        if all(columns % size == 0 for _, columns in plan.modules.values())
    ]
    base = {name: scheme for name, scheme in plan.schemes.items() if isinstance(scheme, IntScheme)}
    found = []
    for bits in widths:
        sizes = divided or sorted({scheme.group_size for scheme in base.values()})
        for group_size in sizes:
            kind: dict[str, Scheme] = {
                name: replace(scheme, bits=bits, group_size=group_size)
                for name, scheme in base.items()
            }
            mixed = replace(plan, schemes=kind)
            for weight_format in plan.formats:
                for name, shape in plan.modules.items():
                    weight_format.check(name, *shape, kind[name])
            found.append((kind, module_sizes(mixed, plan.format)))
    return sorted(found, key=lambda pair: sum(pair[1].values()))


def mixed_plan(
    plan: Plan,
    target_bpw: float | None,
    target_bytes: int | None,
    folder: StatisticsFolder,
    progress: Progress,
) -> Plan:
    """The plan with the bits and group sizes of least error under the target.

    Raises:
        BadInput: the target is too small, or a format cannot mix widths.
    """
    weights = sum(rows * columns for rows, columns in plan.modules.values())
    if target_bpw is not None:
        budget = int(target_bpw * weights / 8)
    else:
        assert target_bytes is not None
        budget = target_bytes - unquantized_bytes(plan) - plan.kv_scale_bytes
    kinds = _candidates(plan, SERVED_BITS)
    if sum(kinds[0][1].values()) > budget:
        kinds = _candidates(plan, ALL_BITS)
    sizes = [size for _, size in kinds]
    kinds = [kind for kind, _ in kinds]
    choices = measure_choices(plan, kinds, sizes, folder, progress)
    chosen = spend(choices, budget)
    schemes = dict(plan.schemes)
    for choice, number in zip(choices, chosen, strict=True):
        schemes |= {module: kinds[number][module] for module in choice.modules}
    mixed = replace(plan, schemes=schemes)
    check_plan(mixed)
    spent = sum(choice.bytes[number] for choice, number in zip(choices, chosen, strict=True))
    counts = Counter(scheme.label for scheme in schemes.values())
    shares = ", ".join(f"{count} {label}" for label, count in sorted(counts.items()))
    note = (
        f"note: {spent * 8 / weights:.3f} bits per weight of at most {budget * 8 / weights:.3f}: "
        f"{shares}"
    )
    return replace(mixed, notes=(*plan.notes, note))

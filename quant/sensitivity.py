"""Mixed precision from measured sensitivity: which linears get more bits under a budget of bytes.

Linears that servers load as one matrix (q/k/v, gate/up) are one choice. For each choice and each
candidate width the output error on the calibration data is measured, relative to the energy of the
output; the bytes are then spent where a byte takes away most error. No gradients are needed: the Gram
matrices say what every rounding costs.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from .errors import BadInput
from .layer_work import HEAD_FAMILY, Measured
from .methods.base import LayerProblem
from .methods.rounding import round_weight
from .plan import Plan, check_plan
from .preflight import module_sizes, unquantized_bytes
from .progress import Progress
from .scheme import Scheme
from .statistics_folder import StatisticsFolder

CANDIDATE_BITS = (2, 3, 4, 8)


@dataclass(frozen=True, slots=True)
class Choice:
    """Linears that get one scheme, and what each candidate costs them.

    Attributes:
        bytes, errors: for each of `CANDIDATE_BITS`; the error is that of the joint output, relative.
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
    """Round every linear to every candidate and measure the error of the output.

    Args:
        schemes, sizes: of every module under each candidate, and the bytes that it then takes.
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
            costs = tuple(sum(size[module] for module in modules) for size in sizes)
            choices.append(Choice(modules, costs, errors))
        plan.checkpoint.release()
        progress.advance()
    progress.finish()
    return choices


def _errors(
    plan: Plan,
    schemes: Sequence[Mapping[str, Scheme]],
    prefix: str,
    linears: tuple[str, ...],
    measured: Measured,
) -> tuple[float, ...]:
    """Error of the joint output of linears with one input, relative to its energy, by candidate."""
    energy, lost = 0.0, [0.0] * len(schemes)
    for linear in linears:
        module = prefix + linear
        weight = plan.checkpoint.tensor(f"{module}.weight").to(torch.float32)
        statistics = measured.statistics[linear]
        energy += float(statistics.row_errors(weight).sum())
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
            lost[number] += float(statistics.row_errors(weight - rounded).sum())
    return tuple(error / energy if energy else 0.0 for error in lost)


def spend(choices: Sequence[Choice], budget: int) -> list[int]:
    """The candidate of each choice, such that all together take at most `budget` bytes.

    Every choice begins at its smallest candidate. Then the step that takes away most error for a byte
    is made, of the steps along the convex hull of each choice, until none fits.

    Raises:
        BadInput: even the smallest candidates are too large.
    """
    chosen = [0] * len(choices)
    free = budget - sum(choice.bytes[0] for choice in choices)
    if free < 0:
        raise BadInput(
            f"the target is too small: with {CANDIDATE_BITS[0]} bits everywhere the linears take "
            f"{budget - free:,} bytes, and {budget:,} are left for them"
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
    """Minus the error taken away per byte, and the candidate, of the best step from `now`; `now` if none."""
    stop = len(choice.bytes) if last is None else last + 1
    steps = [
        (-(choice.errors[now] - choice.errors[to]) / (choice.bytes[to] - choice.bytes[now]), to)
        for to in range(now + 1, stop)
        if choice.bytes[to] > choice.bytes[now] and choice.errors[to] < choice.errors[now]
    ]
    return min(steps, default=(0.0, now))


def mixed_plan(
    plan: Plan,
    target_bpw: float | None,
    target_bytes: int | None,
    folder: StatisticsFolder,
    progress: Progress,
) -> Plan:
    """The plan with the widths that spend the target best; groups and symmetry stay as they are.

    Raises:
        BadInput: the target is too small, or a format cannot mix widths.
    """
    kinds = [
        {name: replace(scheme, bits=bits) for name, scheme in plan.schemes.items()}
        for bits in CANDIDATE_BITS
    ]
    sizes = [module_sizes(replace(plan, schemes=kind), plan.format) for kind in kinds]
    weights = sum(rows * columns for rows, columns in plan.modules.values())
    if target_bpw is not None:
        budget = int(target_bpw * weights / 8)
    else:
        assert target_bytes is not None
        budget = target_bytes - unquantized_bytes(plan) - plan.kv_scale_bytes
    choices = measure_choices(plan, kinds, sizes, folder, progress)
    chosen = spend(choices, budget)
    schemes = dict(plan.schemes)
    for choice, number in zip(choices, chosen, strict=True):
        schemes |= {module: kinds[number][module] for module in choice.modules}
    mixed = replace(plan, schemes=schemes)
    check_plan(mixed)
    spent = sum(choice.bytes[number] for choice, number in zip(choices, chosen, strict=True))
    counts = Counter(scheme.bits for scheme in schemes.values())
    shares = ", ".join(f"{counts[bits]} with {bits}" for bits in sorted(counts))
    note = (
        f"note: {spent * 8 / weights:.3f} bits a weight of at most {budget * 8 / weights:.3f}: "
        f"linears by bits: {shares}"
    )
    return replace(mixed, notes=(*plan.notes, note))

"""Mixed precision: bits per linear from measured sensitivity, under a byte budget.

Linears that servers fuse into one matrix (q/k/v, gate/up) are one choice. For each choice and candidate
(bits and group size) the relative output error on the calibration data is measured; bytes are then spent
greedily where they reduce most error per byte. No gradients are needed: the Gram matrices give the errors.
They are measured behind the layers before, rounded to one scheme of the same size, and the choice must have a
smaller KL divergence than that scheme: float model and candidates walk through the layers together, so that
each layer is loaded once, and logits are computed for a few tokens at a time.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from ..base.errors import BadInput
from ..base.progress import Progress
from ..base.scheme import PER_CHANNEL, Scheme
from ..kinds.base.kind import kind_of
from ..methods.base import LayerProblem
from ..methods.rounding import round_weight
from ..plan.plan import QuantizePlan, check_plan
from ..plan.selection import HEAD
from ..stream.calibration import Images
from ..stream.calls import States
from ..stream.layer_stream import LayerStream
from .cached_calibration import StatisticsFolder
from .preflight import module_sizes, unquantized_bytes
from .quantized_layer import HEAD_FAMILY, LayerStatistics

_LOGITS = 2**24  # values of a matrix of logits
_HEAD_ROWS = 2**13  # of the output projection that are in float32 at a time


def rounded(plan: QuantizePlan, scheme: Scheme, module: str, weight: torch.Tensor) -> torch.Tensor:
    """A float32 weight `[out, in]` after rounding to the nearest values of a scheme, or with the noise of
    trellis codes, whose search takes too long to try widths."""
    if (noisy := kind_of(scheme).noisy(weight, module)) is not None:
        return noisy
    problem = LayerProblem(
        prefix=module,
        family=HEAD_FAMILY,
        schemes={HEAD: scheme},
        scale_dtypes={HEAD: plan.scale_dtype(module)},
        weights={HEAD: weight},
    )
    return round_weight(problem, HEAD, weight).dequantize()


def round_layer(
    plan: QuantizePlan,
    schemes: Mapping[str, Scheme],
    prefix: str,
    weights: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """The weights of a layer that the plan quantizes, rounded; `weights` by name relative to it."""
    return {
        name: rounded(plan, schemes[f"{prefix}.{name}"], f"{prefix}.{name}", weight)
        for name, weight in weights.items()
        if f"{prefix}.{name}" in schemes
    }


def divergences(
    plan: QuantizePlan,
    stream: LayerStream,
    token_ids: torch.Tensor,
    candidates: Sequence[Mapping[str, Scheme]],
    progress: Progress,
    images: Images = (),
) -> list[float]:
    """Mean KL divergence in nats of each candidate, rounded to nearest, from the float model.

    Args:
        token_ids: samples `[samples, length]`.
        candidates: schemes of all quantized linears, by full name.
        images: of each sample; empty for text alone.
    """
    progress.start("checking by KL", stream.num_layers, "layers")
    stream.prepare(token_ids, images)
    plain = stream.embed(token_ids, images)
    states = [stream.embed(token_ids, images) for _ in candidates]
    for index in range(stream.num_layers):
        stream.load(index, stream.tensors(index))
        plain = stream.run(index, plain, in_place=True)
        before = stream.weights(index, stream.family(index).linears)
        for number, schemes in enumerate(candidates):
            stream.substitute(index, round_layer(plan, schemes, stream.prefix(index), before))
            states[number] = stream.run(index, states[number], in_place=True)
        stream.unload(index)
        stream.checkpoint.release()
        progress.advance()
    progress.finish()
    weight, bias = stream.head()
    heads = [weight]
    heads += [
        rounded(plan, schemes[HEAD], HEAD, weight.float()) if HEAD in schemes else weight
        for schemes in candidates
    ]
    return _mean_divergences(stream, [plain, *states], heads, bias)


def _mean_divergences(
    stream: LayerStream,
    states: Sequence[States],
    heads: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
) -> list[float]:
    """Mean KL divergence of every state from the first, over all tokens."""
    sums = torch.zeros(len(states) - 1, dtype=torch.float64)
    num_tokens, step = 0, max(1, _LOGITS // len(heads[0]))
    for batch in zip(*(stream.head_inputs(part) for part in states), strict=True):
        hidden = [part.flatten(0, -2).float() for part in batch]
        num_tokens += len(hidden[0])
        for begin in range(0, len(hidden[0]), step):
            rows = slice(begin, begin + step)
            logs = [
                functional.log_softmax(_logits(stream, part[rows], head, bias), dim=-1)
                for part, head in zip(hidden, heads, strict=True)
            ]
            for number, other in enumerate(logs[1:]):
                sums[number] += float((logs[0].exp() * (logs[0] - other)).sum())
    return (sums / max(1, num_tokens)).tolist()


def _logits(
    stream: LayerStream, hidden: torch.Tensor, head: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Logits with the scale and the soft cap of the config (Granite, Cohere, Gemma)."""
    config = stream.checkpoint.text_config
    logits = torch.cat([hidden @ part.float().T for part in head.split(_HEAD_ROWS)], dim=-1)
    logits = logits if bias is None else logits + bias.float()
    logits = (
        logits * float(config.get("logit_scale") or 1) / float(config.get("logits_scaling") or 1)
    )
    cap = config.get("final_logit_softcapping")
    return logits if not cap else cap * torch.tanh(logits / cap)


# Servers have kernels for 4 and 8 bits; fewer bits are tried only if the target requires them.
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
    plan: QuantizePlan,
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
    plan: QuantizePlan,
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
            values = rounded(plan, candidate[module], module, weight)
            lost[number] += statistics.relative_error(weight, values)
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
    plan: QuantizePlan, widths: Sequence[int]
) -> list[tuple[dict[str, Scheme], dict[str, int]]]:
    """Schemes and bytes of all modules under each candidate, the smallest first."""
    candidates = []
    for kind in _kinds(plan, widths):
        mixed = replace(plan, schemes=kind)
        for weight_format in plan.formats:
            for name, shape in plan.modules.items():
                weight_format.check(name, *shape, kind[name])
        candidates.append((kind, module_sizes(mixed, plan.format)))
    return sorted(candidates, key=lambda pair: sum(pair[1].values()))


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


@dataclass(frozen=True, slots=True)
class Search:
    """Candidate schemes under a target: one scheme for all linears, each the smallest first.

    Attributes:
        budget: bytes that the linears may take.
        schemes, sizes: of every module under each candidate, and its bytes.
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

    def bits_per_weight(self, schemes: Mapping[str, Scheme]) -> float:
        """Mean bits of a choice, where each scheme is one of the candidates'."""
        weights = sum(rows * columns for rows, columns in self.plan.modules.values())
        spent = 0
        for module, scheme in schemes.items():
            kinds = zip(self.schemes, self.sizes, strict=True)
            spent += next(sizes[module] for kind, sizes in kinds if kind.get(module) == scheme)
        return spent * 8 / weights


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
        budget = target_bytes - unquantized_bytes(plan) - plan.kv_scale_bytes
    served, *more = max(scheme.searched_widths for scheme in plan.schemes.values())
    kinds = _candidates(plan, served)
    if more and sum(kinds[0][1].values()) > budget:
        kinds = _candidates(plan, more[0])
    fitting = [number for number, (_, size) in enumerate(kinds) if sum(size.values()) <= budget]
    if not fitting:
        least = sum(kinds[0][1].values())
        raise BadInput(
            f"the target is too small: with the fewest bits everywhere the linears take {least:,} "
            f"bytes, and {max(budget, 0):,} are left for them"
        )
    schemes, sizes = zip(*kinds, strict=True)
    return Search(plan, budget, schemes, sizes, fitting[-1])


def mixed_plan(
    search: Search,
    folder: StatisticsFolder,
    stream: LayerStream,
    token_ids: torch.Tensor,
    images: Images,
    progress: Progress,
) -> QuantizePlan:
    """The plan with the bits and group sizes of least error under the target, where its KL divergence on
    the samples `token_ids`, with their images, is below that of the uniform scheme; else the uniform plan.

    Raises:
        BadInput: a format cannot mix widths.
    """
    plan = search.plan
    choices = measure_choices(plan, search.schemes, search.sizes, folder, progress)
    chosen = spend(choices, search.budget)
    mixed, uniform = dict(plan.schemes), dict(plan.schemes) | search.schemes[search.uniform]
    for choice, number in zip(choices, chosen, strict=True):
        mixed |= {module: search.schemes[number][module] for module in choice.modules}
    check_plan(replace(plan, schemes=mixed))
    losses = divergences(plan, stream, token_ids, (mixed, uniform), progress, images)
    is_mixed = losses[0] < losses[1]
    schemes = mixed if is_mixed else uniform
    sizes = [search.bits_per_weight(kind) for kind in (mixed, uniform)]
    weights = sum(rows * columns for rows, columns in plan.modules.values())
    counts = Counter(scheme.label for scheme in schemes.values())
    shares = ", ".join(f"{count} {label}" for label, count in sorted(counts.items()))
    label = next(iter(search.schemes[search.uniform].values())).label
    notes = (
        f"note: {sizes[0 if is_mixed else 1]:.3f} bits per weight of at most "
        f"{search.budget * 8 / weights:.3f}: {shares}",
        f"note: KL from the float model on {token_ids.numel():,} tokens, rounded to nearest: mixed "
        f"{losses[0]:.4g} at {sizes[0]:.3f} bits, {label} everywhere {losses[1]:.4g} at {sizes[1]:.3f}: "
        f"{'mixed' if is_mixed else 'uniform'} is taken",
    )
    record = {
        "kl_tokens": token_ids.numel(),
        "mixed": {"bits_per_weight": sizes[0], "kl": losses[0]},
        "uniform": {"scheme": label, "bits_per_weight": sizes[1], "kl": losses[1]},
        "taken": "mixed" if is_mixed else "uniform",
    }
    return replace(plan, schemes=schemes, notes=(*plan.notes, *notes), search=record)

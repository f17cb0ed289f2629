"""Candidates of a mixed precision: linears that share one scheme, schemes that they may have, and costs.

Linears that servers fuse into one matrix (q/k/v, gate/up) are one choice, and so are the experts of a layer;
a GGUF file has a type for each tensor. A candidate is a scheme for all linears of the model, or none: they
stay in 16 bits. It costs bytes, and the KL divergence that is expected with the codes of the method's own
solver. The folder of statistics keeps the latter by content (solver, linear, scheme), so that a search for
another target, another set of candidates or a resumed one solves nothing twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

import torch

from ...base.atomic_io import entry_bytes
from ...base.errors import BadInput
from ...base.progress import Progress
from ..base.scheme import PER_CHANNEL, SUPPORTED_BITS, Scheme
from ..families.layer_map import LayerMap
from ..gguf.architecture import gguf_architecture, to_gguf
from ..gguf.assemble import table_names
from ..gguf.container import data_bytes
from ..gguf.mix import fitting
from ..kinds.base.kind import EXPERTS, kind_of
from ..kinds.ggml.scheme import GGUF_BLOCKS, GgufScheme
from ..kinds.integer.scheme import IntScheme
from ..kinds.registry import scheme_record
from ..methods.options import SchemeOptions
from ..methods.registry import METHODS
from ..plan.plan import QuantizePlan
from ..plan.selection import HEAD, Shapes, check_widths
from .cached_calibration import StatisticsFolder, StoredNumbers
from .divergence import Solved, rounded, rounded_table, solve_layer, solver_facts
from .preflight import module_sizes, unquantized_bytes
from .quantized_layer import HEAD_FAMILY
from .sensitivity import Sensitivities

GROUP_SIZES = (128, 64, 32)
_INTEGERS = {f"int{bits}": bits for bits in SUPPORTED_BITS}
_ASYMMETRIC = "-asym"
_FLOATS = ("fp8", "nvfp4", "mxfp4")  # methods whose schemes go into one file with integers
_SOLVED_LAYERS, _SOLVED_SHARE, _SOLVED_ROWS = 6, 0.4, 192
"""Layers that are solved for every scheme, at most and as a share of all, and rows of a linear that are
solved at least. Elsewhere `nearest` to `_ANCHOR_BITS` is solved: in layer 3 of SmolLM2-135M the costs of all
schemes have the same ratios to it in all linears, within 5 % as a rule."""
_ANCHOR_BITS = 4.0


def groups_of(plan: QuantizePlan, prefix: str, linears: Sequence[str]) -> list[tuple[str, ...]]:
    """The full names of linears that share an input, by groups that must have one scheme."""
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
    return any(isinstance(scheme, GgufScheme) for scheme in plan.schemes.values())


@dataclass(frozen=True, slots=True)
class Search:
    """Candidates under a budget of bytes, the smallest first and 16 bits last, by schemes and bytes of all
    modules, where a module without a scheme stays; `uniform` is the largest within the budget. `num_weights`
    are those with a choice, and `rest_bytes` the bytes of all other tensors."""

    plan: QuantizePlan
    budget: int
    schemes: tuple[dict[str, Scheme], ...]
    sizes: tuple[dict[str, int], ...]
    uniform: int
    num_weights: int
    rest_bytes: int

    def round_uniform(
        self, prefix: str, weights: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The weights of a layer that have a choice, by relative name, rounded to `uniform`."""
        schemes, named = self.schemes[self.uniform], ((n, f"{prefix}.{n}") for n in weights)
        return {
            name: rounded(self.plan, schemes[module], module, weights[name])
            for name, module in named
            if module in schemes
        }

    def bytes_of(self, schemes: Mapping[str, Scheme]) -> int:
        """Bytes of the linears with a choice of schemes, where each is one of the candidates'."""
        kinds = list(zip(self.schemes, self.sizes, strict=True))
        return sum(
            next(sizes[module] for kind, sizes in kinds if kind.get(module) == schemes.get(module))
            for module in self.sizes[0]
        )

    def nearest(self, bits: float) -> int:
        """The candidate nearest to some bits per weight, without that of 16 bits."""
        kinds = [number for number, schemes in enumerate(self.schemes) if schemes]
        size = bits * self.num_weights / 8
        return min(kinds, key=lambda number: abs(sum(self.sizes[number].values()) - size))

    def label(self, number: int) -> str:
        labels = [scheme.label for scheme in self.schemes[number].values()]
        return max(labels, key=labels.count, default="16 bits")


def search_of(
    plan: QuantizePlan,
    target_bpw: float | None,
    target_bytes: int | None,
    names: Sequence[str] = (),
) -> Search:
    """The candidates under a target, without one under 16 bits everywhere, by `names` as `--candidates` takes
    them (none: see `_tiers`); BadInput where the target is too small, or no format holds a kind."""
    if is_gguf(plan) and target_bpw is None:  # bits per weight are those of the linears
        names_left = [name for name in table_names(plan.checkpoint) if name not in plan.modules]
        plan = replace(plan, gguf_tables=dict.fromkeys(names_left, ""))
    plain = {module: _plain_bytes(plan, module) for module in _shapes(plan)}
    tables = sum(plain[name] for name in plan.gguf_tables)
    rest = unquantized_bytes(plan, plan.format) - tables
    weights = sum(rows * columns for rows, columns in _shapes(plan).values())
    budget = sum(plain.values())
    if target_bpw is not None:
        budget = int(target_bpw * weights / 8)
    elif target_bytes is not None:
        budget = target_bytes - rest
    kinds = _candidates(plan, budget, names)
    fitting = [number for number, (_, size) in enumerate(kinds) if sum(size.values()) <= budget]
    if not fitting:
        least = sum(kinds[0][1].values())
        if target_bytes is None:
            option = f"--target-bpw {ceil(least * 8e3 / weights) / 1e3:g}"
        else:
            option = f"--target-size {ceil((least + target_bytes - budget) / 2**10)}KiB"
        raise BadInput(f"{too_small(budget, least)}; the least is {option}")
    open_ended = target_bpw is None and target_bytes is None
    if open_ended or sum(plain.values()) > budget:  # else nothing would be quantized
        kinds.append(({}, plain))
    schemes, sizes = zip(*kinds, strict=True)
    whole = [number for number in fitting if len(schemes[number]) == len(plain)]
    return Search(plan, budget, schemes, sizes, (whole or fitting)[-1], weights, rest)


def _shapes(plan: QuantizePlan) -> Shapes:
    """Shapes of the linears, and of the embedding and the output head where they have a choice."""
    tables = ((name, plan.checkpoint.shape(f"{name}.weight")) for name in plan.gguf_tables)
    return plan.modules | {name: (shape[0], shape[1]) for name, shape in tables}


def too_small(budget: int, least: int) -> BadInput:
    """The error of a target below the fewest bytes."""
    return BadInput(
        f"the target is too small: with the fewest bits everywhere the linears take {least:,} "
        f"bytes, and {max(budget, 0):,} are left for them"
    )


Schemes = dict[str, Scheme]
"""The scheme of every module that a candidate fits."""


def _candidates(
    plan: QuantizePlan, budget: int, names: Sequence[str]
) -> list[tuple[Schemes, dict[str, int]]]:
    """Schemes and bytes of all modules under each candidate that the formats hold, the smallest first.

    The first tier has what servers have kernels for, or what the solver goes to; the others are tried where
    the target requires them.
    """
    kinds: list[Schemes] = []
    if names:
        kinds = [kind for name in names for kind in _held(plan, _named(plan, name))]
    refusal = BadInput("no scheme has other widths")
    for tier in () if names else _tiers(plan):
        try:
            kinds = _held(plan, tier)
        except BadInput as error:
            refusal = error
            continue
        if min(sum(_sizes(plan, kind).values()) for kind in kinds) <= budget:
            break
    if not kinds:
        raise refusal
    distinct = [kind for number, kind in enumerate(kinds) if kind not in kinds[:number]]
    candidates = [(kind, _sizes(plan, kind)) for kind in distinct]
    return sorted(candidates, key=lambda pair: sum(pair[1].values()))


def _sizes(plan: QuantizePlan, kind: Schemes) -> dict[str, int]:
    """Bytes of all modules; a module that a kind does not fit stays in 16 bits."""
    modules = {name: shape for name, shape in plan.modules.items() if name in kind}
    sizes = module_sizes(replace(plan, modules=modules, schemes=kind), plan.format)
    shapes = _shapes(plan)
    sizes |= {
        name: data_bytes(str(kind[name].ggml_type), shapes[name])
        for name in plan.gguf_tables
        if name in kind
    }
    return {name: sizes.get(name) or _plain_bytes(plan, name) for name in shapes}


def _held(plan: QuantizePlan, kinds: Iterable[Schemes]) -> list[Schemes]:
    """The candidates that all formats hold; BadInput, with the last reason, where there is none."""
    candidates, refusal, shapes = [], None, _shapes(plan)
    for kind in kinds:
        try:
            check_widths(plan.formats, {name: shapes[name] for name in kind}, kind)
        except BadInput as error:
            refusal = error
            continue
        if kind:
            candidates.append(kind)
    if not candidates and refusal is not None:
        raise refusal
    return candidates


def _named(plan: QuantizePlan, name: str) -> Iterator[Schemes]:
    """The schemes that `--candidates` means by a name, such as `int4-asym` or `Q4_K`; BadInput for none."""
    if is_gguf(plan):
        if name.upper() not in GGUF_BLOCKS:
            raise BadInput(f"--candidates {name}: GGUF has {', '.join(GGUF_BLOCKS)}")
        yield from _block_types(plan, [name.upper()])
        return
    base = next(iter(plan.schemes.values()))
    if not isinstance(base, IntScheme):
        widths = {f"{base.kind_name}{bits}": bits for bits in max(base.searched_widths)}
        if name not in widths:
            raise _unknown(name, base, widths)
        yield from _kinds(plan, [widths[name]])
    elif name in _FLOATS:  # weights alone: what is felt of rounded inputs is not measured
        scheme = METHODS[name].scheme(SchemeOptions(activations="none"))
        block = scheme.scale_group or 1
        yield {name: scheme for name, (_, columns) in plan.modules.items() if not columns % block}
    elif (width := name.removesuffix(_ASYMMETRIC)) in _INTEGERS:
        grid = base if width == name else replace(base, symmetric=False)
        for size in GROUP_SIZES:
            yield {
                module: grid.at_width(_INTEGERS[width], size if not columns % size else PER_CHANNEL)
                for module, (_, columns) in plan.modules.items()
                if not columns % size or columns % GROUP_SIZES[-1]
            }
    else:
        known = (*_INTEGERS, *(f"{width}{_ASYMMETRIC}" for width in _INTEGERS), *_FLOATS)
        raise _unknown(name, base, known)


def _unknown(name: str, base: Scheme, known: Iterable[str]) -> BadInput:
    """The error of a name that `--candidates` does not have for such weights."""
    return BadInput(
        f"--candidates {name}: {base.kind_name} weights are mixed of {', '.join(known)}"
    )


def _tiers(plan: QuantizePlan) -> Iterator[Iterator[Schemes]]:
    """The schemes of all modules, in tiers; each has those of the tiers before."""
    if is_gguf(plan):
        solved = [b for b in GGUF_BLOCKS if kind_of(GgufScheme(b)).refuses_solver is None]
        yield from (_block_types(plan, blocks) for blocks in (solved, GGUF_BLOCKS))
        return
    for widths in max(scheme.searched_widths for scheme in plan.schemes.values()):
        yield _kinds(plan, widths)


def _plain_bytes(plan: QuantizePlan, module: str) -> int:
    return entry_bytes(plan.checkpoint.entry(f"{module}.weight"))


def _block_types(plan: QuantizePlan, blocks: Iterable[str]) -> Iterator[Schemes]:
    """The schemes of all modules with each of these types, or its fallback for their width."""
    last: list[dict[str, GgufScheme]] = []
    for block in blocks:
        types = {name: fitting(block, shape[1]) for name, shape in _shapes(plan).items()}
        kind = {
            name: GgufScheme(block_type)
            for name, block_type in types.items()
            if block_type is not None
        }
        if len(kind) == len(types) and kind not in last:
            last.append(kind)
            yield dict(kind)


def _kinds(plan: QuantizePlan, widths: Sequence[int]) -> Iterator[Schemes]:
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
class Choice:
    """Linears that share a scheme, with bytes and expected KL divergence (nats a token) by candidate."""

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


def measure_choices(
    search: Search, sensitivities: Sensitivities, folder: StatisticsFolder, progress: Progress
) -> list[Choice]:
    """Weigh the errors of the outputs of every linear under every candidate, after the solver's codes.

    A few layers are solved for all schemes. In the others one scheme is, and the costs of the rest have the
    ratios to it that they have in the nearest of those layers. The folder keeps the solved costs, layer by
    layer: no linear is solved for a scheme again.
    """
    plan, costs = search.plan, dict[Solved, float]()
    progress.start("measuring candidates", plan.num_layers + plan.lm_head, "layers")
    layers: list[tuple[int | None, str, LayerMap]] = [
        (index, f"{plan.architecture.layer_prefix(index)}.", family)
        for index, family in enumerate(plan.architecture.layers)
    ]
    if plan.lm_head:  # it has no number and no start of names
        layers.append((None, "", HEAD_FAMILY))
    last = plan.num_layers - 1
    count = max(2, min(_SOLVED_LAYERS, ceil(_SOLVED_SHARE * plan.num_layers)))
    whole = {round(last * n / (count - 1)) for n in range(count)}
    groups: dict[int | None, list[tuple[str, ...]]] = {}
    for index, start, family in sorted(layers, key=lambda layer: layer[0] not in {*whole, None}):
        groups[index] = [
            group for linears in family.shared_inputs for group in groups_of(plan, start, linears)
        ]
        modules = [module for group in groups[index] for module in group]
        wanted = dict.fromkeys(
            (module, kind[module])
            for kind in search.schemes
            for module in modules
            if module in kind
        )
        ratios = {}
        if index is not None and index not in whole:
            nearest = sorted(whole, key=lambda other, at=index: abs(other - at))
            ratios = _ratios(search, index, nearest, wanted, costs)
        solved = [pair for pair in wanted if pair not in ratios]
        costs |= _costs(search, index, start, family, solved, sensitivities, folder)
        costs |= {pair: ratio * costs[anchor] for pair, (anchor, ratio) in ratios.items()}
        progress.advance()
    choices = [
        Choice(
            group,
            tuple(sum(sizes[module] for module in group) for sizes in search.sizes),
            tuple(  # 16 bits cost nothing
                sum(costs[module, kind[module]] for module in group if module in kind)
                for kind in search.schemes
            ),
        )
        for index, _, _ in layers
        for group in groups[index]
    ]
    choices += [_table_choice(search, name, sensitivities, folder) for name in plan.gguf_tables]
    progress.finish()
    return choices


def _ratios(
    search: Search,
    index: int,
    nearest: Sequence[int],
    wanted: Iterable[Solved],
    costs: Mapping[Solved, float],
) -> dict[Solved, tuple[Solved, float]]:
    """The costs of a layer that need no solving: the pair to solve in its place, and the ratio of their costs
    in the nearest layer that has both."""
    prefix = search.plan.architecture.layer_prefix
    anchors = search.schemes[search.nearest(_ANCHOR_BITS)]
    ratios: dict[Solved, tuple[Solved, float]] = {}
    for module, scheme in wanted:
        anchor = anchors.get(module)
        if anchor is None or anchor == scheme:
            continue
        for other in nearest:
            twin = module.replace(prefix(index), prefix(other), 1)
            if (cost := costs.get((twin, scheme))) and (base := costs.get((twin, anchor))):
                ratios[module, scheme] = (module, anchor), cost / base
                break
    return ratios


def _table_choice(
    search: Search, name: str, sensitivities: Sensitivities, folder: StatisticsFolder
) -> Choice:
    """Bytes and cost of each type for the embedding or the output head, which are rounded to nearest."""
    checkpoint = search.plan.checkpoint
    tied = HEAD not in table_names(checkpoint)
    use = {"embedding": name != HEAD, "head": name == HEAD or tied}
    store = StoredNumbers(folder.folder / f"costs-{name}.json", use)
    types = {str(kind[name].ggml_type) for kind in search.schemes if name in kind}
    if missing := sorted(block for block in types if block not in store):
        sensitivity = sensitivities.read_tables()
        rows = sensitivity.felt(**use)
        table = checkpoint.tensor(f"{name}.weight")[rows].float()
        for block in missing:
            delta = table - rounded_table(table, block)
            store[block] = sensitivity.expected(rows, delta, **use)
        store.write()
    return Choice(
        (name,),
        tuple(sizes[name] for sizes in search.sizes),
        tuple(store[str(kind[name].ggml_type)] if name in kind else 0.0 for kind in search.schemes),
    )


def _costs(
    search: Search,
    index: int | None,
    start: str,
    family: LayerMap,
    wanted: Sequence[Solved],
    sensitivities: Sensitivities,
    folder: StatisticsFolder,
) -> dict[Solved, float]:
    """Costs of linears of a layer under schemes, measured where the folder has none, by some of their rows:
    what the solver leaves of a row's energy differs little between rows."""
    plan = search.plan
    name = "head" if index is None else f"layer-{index:05d}"
    modules = sorted({module for module, _ in wanted})
    store = StoredNumbers(folder.folder / f"costs-{name}.json", solver_facts(plan, modules))
    keys = {pair: [pair[0], scheme_record(pair[1])] for pair in wanted}
    if missing := [pair for pair in wanted if keys[pair] not in store]:
        measured = folder.read(name, family, plan.device)
        sensitivity = sensitivities.read(index, family)
        tensors = {
            name.removeprefix(start): tensor
            for name, tensor in plan.checkpoint.tensors(start or f"{HEAD}.")
        }
        samples: dict[str, slice] = {}
        factors: dict[str, float] = {}
        for linear in {module.removeprefix(start) for module, _ in missing}:
            weight = tensors[f"{linear}.weight"].to(plan.device, torch.float32)
            step = 1 if plan.method.transformed else max(1, len(weight) // _SOLVED_ROWS)
            rows = samples[linear] = slice(None, None, step)
            tensors[f"{linear}.weight"] = weight[rows]
            seen = measured.statistics[linear]
            energies = [
                sensitivity.expected(linear, weight[part], seen, part)
                for part in (slice(None), rows)
            ]
            factors[linear] = energies[0] / energies[1] if energies[1] else 1.0
        prefix = start.removesuffix(".")
        for pair, values in solve_layer(plan, family, prefix, tensors, missing, measured):
            linear = pair[0].removeprefix(start)
            delta, rows = tensors[f"{linear}.weight"] - values, samples[linear]
            cost = sensitivity.expected(linear, delta, measured.statistics[linear], rows)
            store[keys[pair]] = factors[linear] * cost
        store.write()
        plan.checkpoint.release()
    return {pair: store[keys[pair]] for pair in wanted}

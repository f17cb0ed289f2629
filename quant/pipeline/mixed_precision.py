"""Mixed precision: a scheme for each linear, of least expected KL divergence within a number of bytes.

The cost of a candidate is the squared error of its outputs with the codes of the method's own solver,
weighted by what the model's output feels of it (`sensitivity`). These costs are nats a token, and add up;
`allocate` solves for the least sum. They are measured after the layers before, rounded to one scheme of the
same size, and the choice must have a smaller KL divergence than that scheme. Errors are felt more the more
there are of others: the program is solved again with costs that are scaled by block of layers, the more the
larger all together are. The choice of less measured KL divergence is taken.

HiGHS solves the allocation as a mixed-integer program. Each choice takes one of its candidates; what they
cost adds up, and so do their bytes, which have a bound: the multiple-choice knapsack problem. Its front is
made by sweeping the bound.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ...base.errors import BadInput
from ...base.progress import Progress
from ..base.scheme import Scheme
from ..gguf.mix import mix_of
from ..kinds.registry import scheme_record
from ..model.parameters import unquantized_modules
from ..plan.journal import sha256_of
from ..plan.plan import QuantizePlan, check_plan
from ..stream.calibration import Images
from ..stream.layer_stream import LayerStream
from .cached_calibration import StatisticsFolder, StoredNumbers
from .candidates import Choice, Search, is_gguf, too_small
from .divergence import divergences, solver_facts

_log = logging.getLogger(__name__)
_POINTS = 16  # of the front
_BLOCKS = 10  # of layers, each with a scale of its costs
_SCALED_BITS = 4.0  # of the kind by which scales are measured
_LARGEST = 4.0  # scale
_CLEARLY = 0.8
"""Share of the uniform scheme's expected KL divergence below which a mixture is taken unmeasured, where codes
are solved by stored statistics: solving both to compare them takes as long as the codes."""
SCALE_TOKENS = 8192
"""Tokens by which scales are measured: of fewer they are noise, and costs stay as they are."""


def with_schemes(plan: QuantizePlan, schemes: Mapping[str, Scheme]) -> QuantizePlan:
    """The plan with a scheme for each linear that has one; the others stay as they are."""
    modules = {module: shape for module, shape in plan.modules.items() if module in schemes}
    counts = Counter({schemes[module].ggml_type: 0 for module in modules})
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
        gguf_tables={
            module: str(schemes[module].ggml_type) if module in schemes else ""
            for module in plan.gguf_tables
        },
    )


@dataclass(frozen=True, slots=True)
class Lane:
    """The candidates of one file format with their costs, of which any mixture is made under any bound.

    Attributes:
        search: candidates; `budget` is the largest bound.
        folder: folder of the solver's statistics.
        samples: token ids and images on which mixtures are measured.
        excess: factor, less one, by which the errors of each choice are felt more where all cost `level`; see
            `scaled`.
    """

    search: Search
    choices: list[Choice]
    folder: StatisticsFolder
    stream: LayerStream
    samples: tuple[torch.Tensor, Images]
    excess: tuple[float, ...] = ()
    level: float = 0.0

    def allocate(self, bytes_bound: int) -> Allocation:
        return min(self.proposals(bytes_bound), key=lambda allocation: allocation.cost)

    def proposals(self, bytes_bound: int) -> list[Allocation]:
        """The mixtures of least expected KL divergence by plain costs and by scaled ones, if they differ."""
        allocations = [self._allocated(self.choices, bytes_bound)]
        if self.excess:
            scales = self._scales(allocations[0].cost)
            felt = [
                replace(choice, costs=tuple(scale * cost for cost in choice.costs))
                for choice, scale in zip(self.choices, scales, strict=True)
            ]
            allocations.append(self._allocated(felt, bytes_bound))
        by_choice = {a.chosen: replace(a, cost=self.expected(a.chosen)) for a in allocations}
        return [*by_choice.values()]

    def _allocated(self, choices: Sequence[Choice], bytes_bound: int) -> Allocation:
        """The least sum of costs that the formats hold in one file."""
        best = allocate(choices, bytes_bound)
        if schemes := self.schemes_of(best):
            mixed = with_schemes(self.search.plan, schemes)
            try:  # a check of the plan would read the tokenizer for each mixture
                for weight_format in mixed.formats:
                    mixed.config_in(weight_format)
            except BadInput:
                return allocate(choices, bytes_bound, exclusive=True)
        return best

    def schemes_of(self, allocation: Allocation) -> dict[str, Scheme]:
        """The schemes of an allocation; modules that stay in 16 bits have none."""
        return {
            module: self.search.schemes[number][module]
            for choice, number in zip(self.choices, allocation.chosen, strict=True)
            for module in choice.modules
            if module in self.search.schemes[number]
        }

    def target_bytes(self, allocation: Allocation) -> int:
        """The `--target-size` by which `quantize --method auto` finds the same mixture again."""
        return allocation.bound + self.search.rest_bytes

    def expected(self, chosen: Sequence[int]) -> float:
        """Expected KL divergence of the model's output under a candidate for each choice, in nats a token."""
        costs = [c.costs[number] for c, number in zip(self.choices, chosen, strict=True)]
        pairs = zip(costs, self._scales(sum(costs)), strict=True)
        return sum(cost * (1 + scale) / 2 for cost, scale in pairs)  # together half of what is last

    def _scales(self, cost: float) -> list[float]:
        """How much more the errors of each choice are felt, where all together cost so much."""
        share = cost / self.level if self.level else 0.0
        excess = self.excess or [0.0] * len(self.choices)
        return [min(max(1 + share * more, 1 / _LARGEST), _LARGEST) for more in excess]

    def scaled(self, progress: Progress) -> Lane:
        """Measure how much more the errors of each block of layers are felt after and before others.

        That is what leaving the block in 16 bits spares one kind everywhere, measured over expected. The kind
        is the same under every target: a mixture is found again by its bytes.
        """
        token_ids, images = self.samples
        if token_ids.numel() < SCALE_TOKENS:
            return self
        number = self.search.nearest(_SCALED_BITS)
        kind, count = self.search.schemes[number], self.search.plan.num_layers
        starts = [f"{self.search.plan.architecture.layer_prefix(at)}." for at in range(count)]
        blocks: list[int | str] = []
        for module, *_ in (choice.modules for choice in self.choices):
            layer = next((at for at, start in enumerate(starts) if module.startswith(start)), None)
            blocks.append(module if layer is None else layer * min(_BLOCKS, count) // count)
        expected, without = dict.fromkeys(blocks, 0.0), {block: dict(kind) for block in blocks}
        for block, choice in zip(blocks, self.choices, strict=True):
            expected[block] += choice.costs[number]
            for module in choice.modules:
                without[block].pop(module, None)
        few = max(1, SCALE_TOKENS // token_ids.shape[1])
        part = replace(self, samples=(token_ids[:few], images[:few]))
        whole, *less = part.divergences([kind, *without.values()], progress)
        excess = {
            block: (whole - rest) / expected[block] - 1 if expected[block] else 0.0
            for block, rest in zip(without, less, strict=True)
        }
        return replace(
            self, excess=tuple(excess[block] for block in blocks), level=sum(expected.values())
        )

    def divergences(
        self, mixtures: Sequence[Mapping[str, Scheme]], progress: Progress
    ) -> list[float]:
        """KL divergence of mixtures from the float model, by the solver's codes; the folder keeps them."""
        plan = self.search.plan
        tokens = sha256_of(self.samples[0].numpy().tobytes())
        facts = [*solver_facts(plan, plan.modules), tokens]
        store = StoredNumbers(self.folder.folder / "divergences.json", facts)
        keys = [{name: scheme_record(s) for name, s in schemes.items()} for schemes in mixtures]
        if missing := [number for number, key in enumerate(keys) if key not in store]:
            wanted = [mixtures[number] for number in missing]
            token_ids, images = self.samples
            losses = divergences(
                plan, self.stream, token_ids, wanted, progress, images, self.folder
            )
            for number, loss in zip(missing, losses.mean(dim=1).tolist(), strict=True):
                store[keys[number]] = loss
            store.write()
        return [store[key] for key in keys]


def mixed_plan(lane: Lane, progress: Progress) -> QuantizePlan:
    """The plan with the schemes of least expected KL divergence under the target, by plain or scaled costs,
    whichever has less KL divergence on the samples; the uniform plan where its is least."""
    search = lane.search
    plan, num_tokens = search.plan, lane.samples[0].numel()
    proposals = lane.proposals(search.budget)
    mixtures = [lane.schemes_of(allocation) for allocation in proposals]
    for schemes in mixtures:
        check_plan(with_schemes(plan, schemes))
    uniform = search.schemes[search.uniform]
    costs = [proposal.cost for proposal in proposals]
    expected = lane.expected([search.uniform] * len(lane.choices))
    least, measured, is_mixed = costs.index(min(costs)), (None, None), True
    compared, losses = "expected KL", (min(costs), expected)
    if plan.options.true_sequential or min(costs) > _CLEARLY * expected:
        *divergences, of_uniform = lane.divergences([*mixtures, uniform], progress)
        least = divergences.index(min(divergences))
        measured = losses = divergences[least], of_uniform
        is_mixed = divergences[least] < of_uniform
        compared = f"KL from the float model on {num_tokens:,} tokens"
    best, mixed = proposals[least], mixtures[least]
    schemes = mixed if is_mixed else uniform
    sizes = [search.bytes_of(kind) * 8 / search.num_weights for kind in (mixed, uniform)]
    counts = Counter(scheme.label for scheme in schemes.values())
    counts["16 bits"] = len(search.sizes[0]) - len(schemes)
    shares = ", ".join(f"{count} {label}" for label, count in sorted(counts.items()) if count)
    label = search.label(search.uniform)
    notes = (
        f"note: {sizes[0 if is_mixed else 1]:.3f} bits per weight of at most "
        f"{search.budget * 8 / search.num_weights:.3f}: {shares}",
        f"note: expected KL {best.cost:.4g}, at most {best.gap:.2%} above the least",
        f"note: {compared}: mixed "
        f"{losses[0]:.4g} at {sizes[0]:.3f} bits, {label} everywhere {losses[1]:.4g} at {sizes[1]:.3f}: "
        f"{'mixed' if is_mixed else 'uniform'} is taken",
    )
    record = {
        "kl_tokens": num_tokens if any(measured) else 0,
        "mixed": {"bits_per_weight": sizes[0], "kl": measured[0], "expected_kl": best.cost},
        "uniform": {"scheme": label, "bits_per_weight": sizes[1], "kl": measured[1]},
        "taken": "mixed" if is_mixed else "uniform",
        "gap": best.gap,
        "front": [
            {"bits_per_weight": a.bytes * 8 / search.num_weights, "expected_kl": a.cost}
            for a in front(lane.choices, _POINTS, lane.allocate)
        ],
    }
    return replace(with_schemes(plan, schemes), notes=(*plan.notes, *notes), search=record)


_SECONDS = 60.0  # a hundred layers of twenty candidates take less than one
_GAP = 1e-4
_TRIES = 8  # with bounds that the solver's tolerances do not break


@dataclass(frozen=True, slots=True)
class Allocation:
    """A candidate for each choice; the least cost may be less by a share `gap` at most."""

    chosen: tuple[int, ...]
    bytes: int
    cost: float
    gap: float
    bound: int


def allocate(choices: Sequence[Choice], budget: int, *, exclusive: bool = False) -> Allocation:
    """The candidates of least total cost within `budget` bytes, all the same if `exclusive`; BadInput where
    the fewest bytes are more."""
    if exclusive:
        modules = tuple(module for choice in choices for module in choice.modules)
        sizes = tuple(map(sum, zip(*(choice.bytes for choice in choices), strict=True)))
        costs = tuple(map(sum, zip(*(choice.costs for choice in choices), strict=True)))
        allocation = allocate([Choice(modules, sizes, costs)], budget)
        return replace(allocation, chosen=allocation.chosen * len(choices))
    least = sum(min(choice.bytes) for choice in choices)
    if least > budget:
        raise too_small(budget, least)
    taken, gap = _solved(choices, budget)
    return Allocation(
        taken,
        sum(choice.bytes[number] for choice, number in zip(choices, taken, strict=True)),
        sum(choice.costs[number] for choice, number in zip(choices, taken, strict=True)),
        gap,
        budget,
    )


def front(
    choices: Sequence[Choice], points: int, solve: Callable[[int], Allocation]
) -> list[Allocation]:
    """Allocations from the fewest bytes to the most that lower the cost, under evenly spaced bounds."""
    low = sum(min(choice.bytes) for choice in choices)
    high = sum(choice.bytes[choice.efficient[-1]] for choice in choices)
    allocations: dict[int, Allocation] = {}
    for bound in np.linspace(low, high, points):
        allocation = solve(int(bound))
        allocations[allocation.bytes] = allocation
    return [allocations[size] for size in sorted(allocations)]


def _solved(choices: Sequence[Choice], budget: int) -> tuple[tuple[int, ...], float]:
    """The candidate of each choice, and the gap to the optimum."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    pairs = [(at, number) for at, choice in enumerate(choices) for number in choice.efficient]
    costs = np.array([choices[at].costs[number] for at, number in pairs])
    sizes = np.array([choices[at].bytes[number] for at, number in pairs], dtype=np.int64)
    # Bytes are whole numbers of the largest unit, bounded by half a one more for the solver's rounding.
    unit = np.gcd.reduce(sizes)
    most, scale = budget // unit * unit + unit / 2, sizes.max() or 1
    one_each = csr_array((np.ones(len(pairs)), ([at for at, _ in pairs], np.arange(len(pairs)))))
    for _ in range(_TRIES):
        with c_prints_logged():
            result = milp(
                costs / (costs.max() or 1.0),
                integrality=np.ones(len(pairs)),
                bounds=Bounds(0, 1),
                constraints=[
                    LinearConstraint(one_each, 1, 1),
                    LinearConstraint(sizes[None] / scale, ub=most / scale),
                ],
                options={"time_limit": _SECONDS, "mip_rel_gap": _GAP},
            )
        if result.x is None:
            raise RuntimeError(f"HiGHS found no allocation: {result.message}")
        over = sizes @ (result.x > 0.5) - budget
        if over <= 0:
            taken = dict(pair for pair, on in zip(pairs, result.x > 0.5, strict=True) if on)
            return tuple(taken[at] for at in range(len(choices))), float(result.mip_gap or 0.0)
        most -= over  # many small choices go beyond a bound within its tolerances
    raise RuntimeError(f"HiGHS keeps to no bound of {budget:,} bytes for such candidates")


@contextlib.contextmanager
def c_prints_logged() -> Iterator[None]:
    """Log what C prints on stdout, for `--debug`: HiGHS prints where it repairs a rounded solution."""
    kept = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            yield
        finally:
            with contextlib.suppress(OSError, TypeError):
                ctypes.CDLL(None).fflush(None)
            os.dup2(kept, 1)
            os.close(kept)
            file.seek(0)
            for line in file.read().decode(errors="replace").splitlines():
                _log.debug("%s", line)

"""Search over deployments: parallel sizes, weight and KV dtypes, batch limits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from ...base.errors import BadInput
from ...quant.families.shapes import ModelShape
from .cache_size import kv_dtype
from .devices import Device
from .engine_rules import engine_rule
from .memory import Deployment, EvictedCache, Reserve
from .offload import SYSTEM_BYTES, placements
from .setup import PlannedWorkload, Setup
from .weights import WeightRecipe, check_groups, lighter_recipes

RANKS = (1, 2, 4, 8)  # tensor parallelism, within one machine
STAGES = (2, 4, 8)  # pipeline parallelism, across machines
FEWER_SEQUENCES = 256

Constraint = Literal["weights", "kv_cache", "max_num_seqs"]


@dataclass(frozen=True, slots=True)
class Relaxation:
    """One change of options, and the concurrent sequences that it allows at the workload's context."""

    change: str
    max_concurrent_sequences: int
    gained_sequences: int
    kv_budget_bytes: int
    gpus: int


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    """The least reduced dtypes with which the workload fits on `gpus` devices; None if none do."""

    gpus: int
    weights: str | None
    kv_dtype: str | None


class Solver:
    """Plans one workload of one model on any device; caches deployments, which are device-independent."""

    def __init__(
        self, shape: ModelShape, recipe: WeightRecipe, workload: PlannedWorkload, setup: Setup
    ) -> None:
        self._shape, self._recipe, self._setup = shape, recipe, setup
        self.workload = workload
        self._lighter_recipes = lighter_recipes(recipe, shape, recipe.plain_bytes)
        self._deployments: dict[tuple[str, str, int, int], Deployment | None] = {}

    def deployment(
        self, tp: int, pp: int, recipe: WeightRecipe | None = None, kv: str | None = None
    ) -> Deployment | None:
        """The deployment with these parallel sizes and dtypes; None if heads or layers do not divide."""
        recipe, kv = recipe or self._recipe, kv or self.workload.kv_dtype
        key = (recipe.label, kv, tp, pp)
        if key not in self._deployments:
            try:
                self._deployments[key] = self._build(tp, pp, recipe, kv)
            except BadInput:
                self._deployments[key] = None
        return self._deployments[key]

    def _build(self, tp: int, pp: int, recipe: WeightRecipe, kv: str) -> Deployment:
        if self._setup.engine in ("vllm", "sglang"):
            check_groups(self._shape, recipe, tp, self._setup.engine)
        return Deployment(
            self._shape,
            recipe,
            kv_dtype(kv).bytes_per_element(self._shape),
            self.workload.block_size,
            tp,
            pp,
            engine_rule(self._setup.engine),
            self._setup.ep,
            self._setup.attention_dp,
        )

    @cached_property
    def arrangements(self) -> list[tuple[int, int]]:
        """Valid (tp, pp), fewest devices first: tensor parallelism within a machine, then pipeline stages."""
        single = [(tp, 1) for tp in RANKS if self.deployment(tp, 1)]
        if not single:  # raises with the reason
            self._build(1, 1, self._recipe, self.workload.kv_dtype)
        widest = single[-1][0]
        several = [(widest, pp) for pp in STAGES if self.deployment(widest, pp)]
        return [*single, *several]

    def machine_arrangements(self) -> Iterator[Deployment]:
        """The deployments on up to a machine's devices, fewest first: tensor parallelism; a mixture of
        experts also with whole experts on each device, and with attention data parallelism too."""
        for ranks in RANKS:
            sizes = [(ranks, 1, 1)]
            if self._shape.experts is not None and ranks > 1:
                sizes += [(ranks, ranks, 1), (1, ranks, ranks)]
            for tp, ep, attention_dp in sizes:
                deployment = self.deployment(tp, 1)
                with suppress(BadInput):  # experts that do not divide
                    if deployment is not None:
                        yield replace(deployment, ep=ep, attention_dp=attention_dp)

    def choose(self, device: Device) -> tuple[Deployment, int | None]:
        """The deployment on this device, and the least number of devices that fits the workload (None: more
        than were tried). Requested sizes are kept; otherwise the fewest devices that fit the workload, or one
        full machine if none do. Raises BadInput: the heads or layers do not divide as requested."""
        tp, pp = self._setup.tp, self._setup.pp
        if self._setup.host is not None and not device.is_unified:
            return self._with_ram(device)
        if device.is_single:
            tp, pp = tp or 1, pp or 1
        if tp is not None or pp is not None:
            # Not self.deployment: an invalid request must raise with its reason.
            requested = self._build(tp or 1, pp or 1, self._recipe, self.workload.kv_dtype)
            tried = [(requested.tp, requested.pp), *self.arrangements]
            if device.is_single:
                tried = tried[:1]
            elif tp is None:
                tried = [(ranks, requested.pp) for ranks in RANKS]
        else:
            tried = self.arrangements
        candidates = [
            deployment
            for arrangement in tried
            if (deployment := self.deployment(*arrangement)) is not None
        ]
        fitting = (candidate for candidate in candidates if self.holds(candidate, device))
        least = min(fitting, key=lambda candidate: candidate.gpus, default=None)
        needed = None if least is None else least.gpus
        if tp is not None:
            return self._build(tp, pp or 1, self._recipe, self.workload.kv_dtype), needed
        if least is not None:
            return least, needed
        one_machine = [candidate for candidate in candidates if candidate.pp == (pp or 1)]
        return one_machine[-1], None

    def _with_ram(self, device: Device) -> tuple[Deployment, int | None]:
        """The deployment on one device with the least of its weights in RAM that fits the workload; without
        one that fits, the one with the most in RAM."""
        host = self._setup.host
        assert host is not None
        plain = deployment = self._build(1, 1, self._recipe, self.workload.kv_dtype)
        if self.holds(plain, device):
            return plain, 1
        chunk = self.reserve(plain, device).chunk_tokens
        for offload in placements(self._shape, self._recipe, host, self._setup.engine, chunk):
            cached = offload.cache_share * plain.kv_bytes(self.workload.context)
            needed = offload.weight_bytes + self.workload.sequences * cached
            if needed > host.ram_bytes - SYSTEM_BYTES:
                break
            deployment = replace(plain, offload=offload)
            if self.holds(deployment, device):
                return deployment, 1
        return deployment, None

    def holds(self, deployment: Deployment, device: Device) -> bool:
        return self.sequences(deployment, device) >= self.workload.sequences

    def sequences(
        self, deployment: Deployment, device: Device, reserve: Reserve | None = None
    ) -> int:
        """Concurrent sequences at the workload's context."""
        chosen, work = reserve or self.reserve(deployment, device), self.workload
        if (evicted := self.evicted(deployment, chosen)) is not None:
            return evicted.max_sequences(device.memory_bytes)
        return deployment.max_sequences(device.memory_bytes, chosen, work.context)

    def evicted(self, deployment: Deployment, reserve: Reserve) -> EvictedCache | None:
        """The KV cache of a sequence under the workload's budget; None: it has none."""
        work = self.workload
        if work.eviction is None:
            return None
        tokens = work.prompt_tokens, work.context
        return EvictedCache(work.eviction, deployment, reserve, *tokens)

    def reserve(self, deployment: Deployment, device: Device) -> Reserve:
        return self._setup.reserve(device, deployment.weight_bytes)

    def constraint(self, deployment: Deployment, device: Device) -> Constraint:
        """The binding constraint: what prevents one more sequence."""
        reserve = self.reserve(deployment, device)
        if deployment.kv_budget(device.memory_bytes, reserve) <= 0:
            return "weights"
        if self.sequences(deployment, device) == deployment.attention_dp * reserve.max_num_seqs:
            return "max_num_seqs"
        return "kv_cache"

    def relaxations(self, deployment: Deployment, device: Device) -> list[Relaxation]:
        """Changes that allow more sequences, cheapest first: a limit, the KV dtype, the weight dtype, more
        devices."""
        now = self.sequences(deployment, device)
        relaxations = []
        for change, other, reserve in self._changes(deployment, device):
            count = self.sequences(other, device, reserve)
            if count > now:
                budget = max(0, other.kv_budget(device.memory_bytes, reserve))
                relaxations.append(Relaxation(change, count, count - now, budget, other.gpus))
        return relaxations

    def _changes(
        self, deployment: Deployment, device: Device
    ) -> Iterator[tuple[str, Deployment, Reserve]]:
        reserve = self.reserve(deployment, device)
        limit = None
        if self.constraint(deployment, device) == "max_num_seqs":
            limit = 2 * reserve.max_num_seqs
        elif reserve.max_num_seqs > max(FEWER_SEQUENCES, self.workload.sequences):
            limit = FEWER_SEQUENCES
        if limit is not None:
            yield f"--max-num-seqs {limit}", deployment, replace(reserve, max_num_seqs=limit)
        tp, pp = deployment.tp, deployment.pp
        for recipe, kv in self._ladder():
            other = self.deployment(tp, pp, recipe, kv)
            if other is None:
                continue
            changed = []
            if kv != self.workload.kv_dtype:
                changed.append(f"--kv-dtype {kv}")
            if recipe is not self._recipe:
                changed.append(f"--weights {recipe.name}")
            if len(changed) == 1:
                yield changed[0], other, self.reserve(other, device)
        if not device.is_single:
            for more in ((2 * tp, pp), (tp, 2 * pp)):
                if (wider := self.deployment(*more)) is not None:
                    option = f"--tp {more[0]}" if more[0] != tp else f"--pp {more[1]}"
                    yield option, wider, self.reserve(wider, device)
                    return

    def dtypes_that_fit(self, device: Device) -> list[DtypeChoice]:
        """For every number of devices, the least reduced dtypes with which the workload fits."""
        choices = []
        for tp, pp in [(1, 1)] if device.is_single else self.arrangements:
            fitting = (
                (recipe, kv)
                for recipe, kv in self._ladder(include_current=True)
                if (candidate := self.deployment(tp, pp, recipe, kv))
                and self.holds(candidate, device)
            )
            recipe, kv = next(fitting, (None, None))
            choices.append(DtypeChoice(tp * pp, recipe and recipe.label, kv))
        return choices

    def _ladder(self, include_current: bool = False) -> Iterator[tuple[WeightRecipe, str]]:
        """Dtype pairs from least to most reduced: every KV dtype before the next weight dtype."""
        kv = self.workload.kv_dtype
        caches = [kv, "fp8"] if kv in ("bf16", "float32") else [kv]
        for recipe in (self._recipe, *self._lighter_recipes):
            for cache in caches:
                if include_current or (recipe, cache) != (self._recipe, kv):
                    yield recipe, cache

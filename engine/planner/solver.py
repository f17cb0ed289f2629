"""Search over deployments: parallel sizes, weight and KV dtypes, batch limits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

from ...base.errors import BadInput
from .cache_size import kv_dtype
from .catalog import PlannedModel
from .devices import Device
from .engine_rules import engine_rule
from .expected import Expectation
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


@dataclass(frozen=True, slots=True)
class Solver:
    """One workload of one model on one kind of device, with the weights as `recipe` has them in memory.
    Solvers that differ in the device share their deployments, which do not depend on it."""

    model: PlannedModel
    recipe: WeightRecipe
    workload: PlannedWorkload
    setup: Setup
    device: Device
    _deployments: dict[tuple[WeightRecipe, str, int, int], Deployment | None] = field(
        default_factory=dict, compare=False, repr=False
    )

    def deployment(
        self, tp: int, pp: int, recipe: WeightRecipe | None = None, kv: str | None = None
    ) -> Deployment | None:
        """The deployment with these parallel sizes and dtypes; None if heads or layers do not divide."""
        key = recipe or self.recipe, kv or self.workload.kv_dtype, tp, pp
        if key not in self._deployments:
            self._deployments[key] = None
            with suppress(BadInput):
                self._deployments[key] = self._build(tp, pp, *key[:2])
        return self._deployments[key]

    def _build(
        self, tp: int, pp: int, recipe: WeightRecipe | None = None, kv: str | None = None
    ) -> Deployment:
        shape, recipe, setup = self.model.shape, recipe or self.recipe, self.setup
        if setup.engine in ("vllm", "sglang"):
            check_groups(shape, recipe, tp, setup.engine)
        element = kv_dtype(kv or self.workload.kv_dtype).bytes_per_element(shape)
        sizes, rule = (self.workload.block_size, tp, pp), engine_rule(setup.engine)
        return Deployment(shape, recipe, element, *sizes, rule, setup.ep, setup.attention_dp)

    def expected(self, deployment: Deployment) -> Expectation:
        return Expectation.of(deployment, self.device, self.model.name, self.setup)

    @property
    def arrangements(self) -> list[tuple[int, int]]:
        """Valid (tp, pp), fewest devices first: tensor parallelism within a machine, then pipeline stages."""
        single = [(tp, 1) for tp in RANKS if self.deployment(tp, 1)]
        if not single:  # raises with the reason
            self._build(1, 1)
        widest = single[-1][0]
        several = [(widest, pp) for pp in STAGES if self.deployment(widest, pp)]
        return [*single, *several]

    def machine_arrangements(self) -> Iterator[Deployment]:
        """The deployments on up to a machine's devices, fewest first: tensor parallelism; a mixture of
        experts also with whole experts on each device, and with attention data parallelism too."""
        for ranks in RANKS:
            sizes = [(ranks, 1, 1)]
            if self.model.shape.experts is not None and ranks > 1:
                sizes += [(ranks, ranks, 1), (1, ranks, ranks)]
            for tp, ep, attention_dp in sizes:
                deployment = self.deployment(tp, 1)
                with suppress(BadInput):  # experts that do not divide
                    if deployment is not None:
                        yield replace(deployment, ep=ep, attention_dp=attention_dp)

    def choose(self) -> tuple[Deployment, int | None]:
        """The deployment on this device, and the least number of devices that fits the workload (None: more
        than were tried). Requested sizes are kept; otherwise the fewest devices that fit the workload, or one
        full machine if none do. Raises BadInput: the heads or layers do not divide as requested."""
        tp, pp = self.setup.tp, self.setup.pp
        if self.setup.host is not None and not self.device.is_unified:
            return self._with_ram()
        if self.device.is_single:
            tp, pp = tp or 1, pp or 1
        tried = requested = None
        if tp is not None or pp is not None:
            # Not self.deployment: an invalid request must raise with its reason.
            requested = self._build(tp or 1, pp or 1)
            tried = [(requested.tp, requested.pp)]
            if tp is None:
                tried = [(ranks, requested.pp) for ranks in RANKS]
            elif not self.device.is_single:
                tried += self.arrangements
        candidates = [
            *filter(None, (self.deployment(*sizes) for sizes in tried or self.arrangements))
        ]
        least = min(filter(self.holds, candidates), key=lambda fit: fit.gpus, default=None)
        if requested is not None and tp is not None:
            return requested, least and least.gpus
        one_machine = [candidate for candidate in candidates if candidate.pp == (pp or 1)]
        return (one_machine[-1], None) if least is None else (least, least.gpus)

    def _with_ram(self) -> tuple[Deployment, int | None]:
        """The deployment on one device with the least of its weights in RAM that fits the workload; without
        one that fits, the one with the most in RAM."""
        host = self.setup.host
        assert host is not None
        plain = deployment = self._build(1, 1)
        if self.holds(plain):
            return plain, 1
        chunk = self.reserve(plain).chunk_tokens
        for offload in placements(self.model.shape, self.recipe, host, self.setup.engine, chunk):
            cached = offload.cache_share * plain.kv_bytes(self.workload.context)
            needed = offload.weight_bytes + self.workload.sequences * cached
            if needed > host.ram_bytes - SYSTEM_BYTES:
                break
            deployment = replace(plain, offload=offload)
            if self.holds(deployment):
                return deployment, 1
        return deployment, None

    def holds(self, deployment: Deployment) -> bool:
        return self.sequences(deployment) >= self.workload.sequences

    def sequences(self, deployment: Deployment, reserve: Reserve | None = None) -> int:
        """Concurrent sequences at the workload's context."""
        chosen, work = reserve or self.reserve(deployment), self.workload
        if (evicted := self.evicted(deployment, chosen)) is not None:
            return evicted.max_sequences(self.device.memory_bytes)
        return deployment.max_sequences(self.device.memory_bytes, chosen, work.context)

    def evicted(self, deployment: Deployment, reserve: Reserve) -> EvictedCache | None:
        """The KV cache of a sequence under the workload's budget; None: it has none."""
        work = self.workload
        if work.eviction is None:
            return None
        tokens = work.prompt_tokens, work.context
        return EvictedCache(work.eviction, deployment, reserve, *tokens)

    def reserve(self, deployment: Deployment) -> Reserve:
        return self.setup.reserve(self.device, deployment.weight_bytes)

    def constraint(self, deployment: Deployment) -> Constraint:
        """The binding constraint: what prevents one more sequence."""
        reserve = self.reserve(deployment)
        if deployment.kv_budget(self.device.memory_bytes, reserve) <= 0:
            return "weights"
        if self.sequences(deployment) == deployment.attention_dp * reserve.max_num_seqs:
            return "max_num_seqs"
        return "kv_cache"

    def relaxations(self, deployment: Deployment) -> list[Relaxation]:
        """Changes that allow more sequences, cheapest first: a limit, the KV dtype, the weight dtype, more
        devices."""
        now = self.sequences(deployment)
        relaxations = []
        for change, other, reserve in self._changes(deployment):
            count = self.sequences(other, reserve)
            if count > now:
                budget = max(0, other.kv_budget(self.device.memory_bytes, reserve))
                relaxations.append(Relaxation(change, count, count - now, budget, other.gpus))
        return relaxations

    def _changes(self, deployment: Deployment) -> Iterator[tuple[str, Deployment, Reserve]]:
        reserve = self.reserve(deployment)
        limit = None
        if self.constraint(deployment) == "max_num_seqs":
            limit = 2 * reserve.max_num_seqs
        elif reserve.max_num_seqs > max(FEWER_SEQUENCES, self.workload.sequences):
            limit = FEWER_SEQUENCES
        if limit is not None:
            yield f"--max-num-seqs {limit}", deployment, replace(reserve, max_num_seqs=limit)
        tp, pp = deployment.tp, deployment.pp
        for recipe, kv in self._ladder():
            changed = [f"--kv-dtype {kv}"] if kv != self.workload.kv_dtype else []
            changed += [f"--weights {recipe.name}"] if recipe is not self.recipe else []
            other = self.deployment(tp, pp, recipe, kv)
            if other is not None and len(changed) == 1:
                yield changed[0], other, self.reserve(other)
        if not self.device.is_single:
            for more in ((2 * tp, pp), (tp, 2 * pp)):
                if (wider := self.deployment(*more)) is not None:
                    option = f"--tp {more[0]}" if more[0] != tp else f"--pp {more[1]}"
                    yield option, wider, self.reserve(wider)
                    return

    def dtypes_that_fit(self) -> list[DtypeChoice]:
        """For every number of devices, the least reduced dtypes with which the workload fits."""
        choices, ladder = [], [*self._ladder()]
        for tp, pp in [(1, 1)] if self.device.is_single else self.arrangements:
            fitting = (
                (recipe, kv)
                for recipe, kv in ladder
                if (candidate := self.deployment(tp, pp, recipe, kv)) and self.holds(candidate)
            )
            recipe, kv = next(fitting, (None, None))
            choices.append(DtypeChoice(tp * pp, recipe and recipe.label, kv))
        return choices

    def _ladder(self) -> Iterator[tuple[WeightRecipe, str]]:
        """Dtype pairs from least to most reduced, the planned ones first: every KV dtype before the next
        weight dtype."""
        recipe, kv = self.recipe, self.workload.kv_dtype
        caches = [kv, "fp8"] if kv in ("bf16", "float32") else [kv]
        for lighter in (recipe, *lighter_recipes(recipe, self.model.shape, recipe.plain_bytes)):
            for cache in caches:
                yield lighter, cache

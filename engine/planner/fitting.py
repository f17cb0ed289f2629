"""Options with which a workload fits devices that it does not fit as asked: searched, and each verified.

Levers that cost nothing come first (memory utilization, the limits of a batch), then either a shorter context
or smaller dtypes, the least reduced ones that suffice; what is not needed is left out again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from ...quant.base.errors import BadInput
from ..base.units import format_tokens
from .catalog import PlannedModel
from .devices import Device
from .engine_rules import engine_rule
from .setup import PlannedWorkload, Setup
from .solver import Solver
from .weights import WeightRecipe, recipe_for

HIGH_UTILIZATION = 0.95
SMALL_STEP_TOKENS = 2048
LEAST_CONTEXT = 1024
CONTEXTS = sorted({step << power for step in (1024, 1536) for power in range(12)}, reverse=True)
"""Round contexts: powers of two, and half as much again."""
_LEVERS = ("max_num_batched_tokens", "max_num_seqs", "utilization")


@dataclass(frozen=True, slots=True)
class Change:
    """Options, all together, with which the workload fits on `gpus` devices, and the sequences that it then
    holds at once."""

    gpu: str
    gpus: int
    options: tuple[str, ...]
    sequences: int


@dataclass(frozen=True, slots=True)
class _Trial:
    """A plan's inputs that the search varies."""

    recipe: WeightRecipe
    workload: PlannedWorkload
    setup: Setup


class FitSearch:
    """Searches for options for one model and workload on one kind of device."""

    def __init__(
        self,
        model: PlannedModel,
        recipe: WeightRecipe,
        workload: PlannedWorkload,
        setup: Setup,
        device: Device,
    ) -> None:
        self._model, self._device = model, device
        self._asked = _Trial(recipe, workload, setup)

    def changes(self, tp: int, pp: int) -> list[Change]:
        """Up to two ways to fit `tp` x `pp` devices: by a shorter context, and by smaller dtypes."""
        work = self._asked.workload
        if work.eviction is not None:
            return []
        asked = replace(self._asked, setup=replace(self._asked.setup, tp=tp, pp=pp))
        with suppress(BadInput):
            if self._held(asked) >= work.sequences:
                return []
            found = [self._with_levers(asked)]
            if found == [None]:
                found = [self._shorter(asked), self._lighter(asked)]
            if found == [None, None]:
                found = [self._shorter(trial) for trial in [*self._dtypes(asked)][-1:]]
            return [self._change(trial) for trial in found if trial is not None]
        return []

    def _solver(self, trial: _Trial) -> Solver:
        return Solver(self._model.shape, trial.recipe, trial.workload, trial.setup)

    def _held(self, trial: _Trial) -> int:
        """Sequences that run at once."""
        solver = self._solver(trial)
        deployment = solver.deployment(trial.setup.tp or 1, trial.setup.pp or 1)
        return 0 if deployment is None else solver.sequences(deployment, self._device)

    def _fits(self, trial: _Trial) -> bool:
        return self._held(trial) >= trial.workload.sequences

    def _pulled(self, trial: _Trial, levers: tuple[str, ...] = _LEVERS) -> _Trial:
        """The trial with the levers pulled that the user left alone."""
        asked, sequences = trial.setup, trial.workload.sequences
        values = {
            "utilization": HIGH_UTILIZATION,
            "max_num_seqs": sequences,
            "max_num_batched_tokens": max(SMALL_STEP_TOKENS, sequences),
        }
        if self._device.kind == "cpu":
            del values["utilization"]
        changed = {
            name: value
            for name, value in values.items()
            if name in levers and getattr(asked, name) is None
        }
        return replace(trial, setup=replace(asked, **changed))

    def _with_levers(self, trial: _Trial) -> _Trial | None:
        """The trial with as few levers pulled as it needs; None: all of them are not enough."""
        if not self._fits(self._pulled(trial)):
            return None
        kept = _LEVERS
        for lever in _LEVERS:
            fewer = tuple(name for name in kept if name != lever)
            if self._fits(self._pulled(trial, fewer)):
                kept = fewer
        return self._roomier(self._pulled(trial, kept), kept)

    def _roomier(self, trial: _Trial, levers: tuple[str, ...]) -> _Trial:
        """The trial with the limit of sequences raised to what then fits."""
        while "max_num_seqs" in levers:
            limit = trial.setup.max_num_seqs or 1
            raised = replace(trial, setup=replace(trial.setup, max_num_seqs=2 * limit))
            held = self._held(raised)
            if held <= limit:
                break
            trial = replace(trial, setup=replace(trial.setup, max_num_seqs=held))
        return trial

    def _shorter(self, trial: _Trial) -> _Trial | None:
        """The longest round context that fits; None: none does, or the lengths of a load are given."""
        work = trial.workload
        if work.load is not None:
            return None
        for context in CONTEXTS:
            if not LEAST_CONTEXT <= context < work.context:
                continue
            with suppress(BadInput):  # a prompt, images or an answer that it has no room for
                shorter = replace(trial, workload=replace(work, context=context))
                if (found := self._with_levers(shorter)) is not None:
                    return found
        return None

    def _lighter(self, trial: _Trial) -> _Trial | None:
        """The least reduced dtypes that fit."""
        found = map(self._with_levers, self._dtypes(trial))
        return next((one for one in found if one is not None), None)

    def _dtypes(self, trial: _Trial) -> Iterator[_Trial]:
        """Smaller dtypes, least reduced first: those of the cache before those of the weights."""
        work, stored = trial.workload, engine_rule(trial.setup.engine).kv_dtypes
        small = next((name for name in ("fp8", "int8", "q8_0") if name in stored), work.kv_dtype)
        caches = [work.kv_dtype]
        if work.kv_dtype in ("bf16", "f16", "float32") and small != work.kv_dtype:
            caches.append(small)
        recipes = [trial.recipe]
        for name in ("fp8", "int4"):
            with suppress(BadInput):
                recipe = recipe_for(name, self._model.shape, plain_bytes=self._model.plain_bytes)
                recipes += [recipe] if recipe.bits < trial.recipe.bits else []
        for recipe in recipes:
            for cache in caches:
                if (recipe, cache) != (trial.recipe, work.kv_dtype):
                    yield replace(trial, recipe=recipe, workload=replace(work, kv_dtype=cache))

    def _change(self, trial: _Trial) -> Change:
        asked, work, setup = self._asked, trial.workload, trial.setup
        options = []
        if trial.recipe is not asked.recipe:
            options.append(f"--weights {trial.recipe.name}")
        if work.kv_dtype != asked.workload.kv_dtype:
            options.append(f"--kv-dtype {work.kv_dtype}")
        if work.context != asked.workload.context:
            options.append(f"--ctx {format_tokens(work.context).replace(',', '')}")
        names = {"utilization": "gpu-memory-utilization"}
        for name in reversed(_LEVERS):
            value = getattr(setup, name)
            if value != getattr(asked.setup, name):
                options.append(f"--{names.get(name, name).replace('_', '-')} {value:g}")
        gpus = (setup.tp or 1) * (setup.pp or 1)
        return Change(self._device.name, gpus, tuple(options), self._held(trial))

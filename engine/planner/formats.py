"""Weight formats at one load: which of them gives the most tokens per second to few clients, and to many.

A format that only stores fewer bits (W4A16) wins where reading weights takes the time. It loses where
computing does, because it is multiplied in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil

from ...base.errors import BadInput
from .expected import Loop
from .plan import DeploymentPlan, DevicePlan
from .weights import WeightRecipe, recipe_for

COMPARED = ("bf16", "fp8", "int4")


@dataclass(frozen=True, slots=True)
class FormatSpeed:
    """Tokens per second of a weight format on one deployment, in closed form: with `clients`, and with all
    `places` taken."""

    weights: str
    clients: int
    tokens_per_second: float
    places: int
    tokens_per_second_full: float


def format_speeds(plan: DeploymentPlan, device: DevicePlan) -> list[FormatSpeed]:
    """The planned format and other ones on the same GPUs, the fastest with the plan's clients first; none
    where the speed is not known from the fit."""
    is_fitted = plan.setup.measured is None and device.expectation is not None
    if not is_fitted or device.device.kind == "cpu" or device.deployment.offload is not None:
        return []
    speeds = [_speed_of(plan, device, recipe) for recipe in _recipes(plan)]
    return sorted(filter(None, speeds), key=lambda speed: -speed.tokens_per_second)


def _recipes(plan: DeploymentPlan) -> Iterator[WeightRecipe]:
    """The planned format, and those of `COMPARED` that suit the model's widths and have other bits."""
    yield plan.recipe
    for name in COMPARED:
        with suppress(BadInput):
            recipe = recipe_for(name, plan.model.shape, plain_bytes=plan.model.plain_bytes)
            if recipe.bits != plan.recipe.bits:
                yield recipe


def _speed_of(plan: DeploymentPlan, device: DevicePlan, recipe: WeightRecipe) -> FormatSpeed | None:
    """The speed of a format on the division of the plan; None where it does not hold the clients."""
    work = plan.workload
    (solver,) = plan.solvers([device.device], recipe)
    deployment = replace(device.deployment, recipe=solver.recipe)
    places = solver.sequences(deployment)
    # The mean number in flight, which may be a hair above or below the clients of a closed loop.
    in_flight = work.sequences if device.predicted is None else device.predicted.clients
    clients = max(1, round(in_flight))
    if places < clients:
        return None
    expected = solver.expected(deployment)
    prompt, output, cached = work.prompt_tokens, work.answer_tokens, work.cached_tokens
    if work.load is not None:
        prompt, output = map(ceil, work.load.load.mean_lengths())
        cached = work.load.load.cached_tokens(prompt)
    few, full = (
        expected.loaded(Loop(prompt, output, count, places, cached)).throughput
        for count in (clients, places)
    )
    return FormatSpeed(recipe.name, clients, few, places, full)

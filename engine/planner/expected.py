"""Expected times of a plan: step model, loaded means and error band of a deployment.

Without a measured machine the operators are those fitted to measured deployments; with one (`--measured`)
steps reach its shares of the roofs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .devices import Device
from .error_bands import ErrorBand, Likeness, batch_regime, error_band
from .memory import Deployment, Reserve
from .setup import Setup
from .speed import Efficiency, StepTime, decode_time, prefill_time
from .steady_state import SteadyState, steady_state
from .step_model import (
    Loads,
    StepModel,
    StepWork,
    generation,
    weight_dtype,
)
from .step_parameters import Deployed, measured_parameters, parameter_file, resolve

_FIXED = ("norms and activations", "launches", "host")
_LINKS = ("all-reduce", "all-to-all")


@dataclass(frozen=True, slots=True)
class Expectation:
    """Steps of a deployment as they are expected to run: by the step model, or by the shares of the roofs
    that a machine reached."""

    deployment: Deployment
    device: Device
    steps: StepModel
    measured: Efficiency | None = None

    @classmethod
    def of(cls, deployment: Deployment, device: Device, model: str, setup: Setup) -> Expectation:
        """The expectation for a model of that name."""
        steps = step_model(deployment, device, setup, model)
        return cls(deployment, device, steps, setup.measured)

    @property
    def efficiency(self) -> Efficiency:
        """Shares of the roofs, measured or as fitted for the linear layers."""
        return self.measured or fitted_efficiency(self.steps.parameters.values)

    def decode(self, sequences: int, context: int, tokens_per_sequence: int = 1) -> StepTime:
        """Time of a decode step; with several tokens per sequence, of one that verifies draft tokens."""
        if self.measured is not None:
            return decode_time(
                self.deployment, self.device, sequences, context, self.measured, tokens_per_sequence
            )
        micro_batch = -(-sequences // self.deployment.pp)
        work = StepWork(micro_batch * tokens_per_sequence, micro_batch * context)
        return self._step_time(work, 0.0)

    def prefill(self, prompt: int, reserve: Reserve) -> StepTime:
        """TTFT of one prompt on an idle engine."""
        if self.measured is not None:
            return prefill_time(self.deployment, self.device, prompt, reserve, self.measured)
        work = StepWork.of(0, 0, prompt)
        whole = steady_state(self.steps, prompt, 1, 1).ttft_seconds
        return self._step_time(work, whole - self.steps.seconds(work))

    def loaded(self, prompt: int, output: int, clients: int, resident: int) -> SteadyState:
        """Means of a closed loop of that many clients, of which the cache holds `resident` at once."""
        return steady_state(self.steps, prompt, output, clients, resident=max(1, resident))

    def band(self, clients: int) -> ErrorBand | None:
        """The error of deployments like this one; None where none was measured."""
        return None if self.measured is not None else error_band(self.likeness(clients))

    def likeness(self, clients: int) -> Likeness:
        """Properties that its error depends on. Its model is known where the fit has a correction of it."""
        steps = self.steps
        key = Deployed(steps.model, steps.engine, weight_dtype(steps.recipe)).keys[0]
        has_correction = key in parameter_file()["corrections"]["tpot"]
        known = "model measured" if has_correction else "model not measured"
        kind = "mixture" if steps.shape.experts else "dense"
        return Likeness(steps.engine, generation(self.device), known, kind, batch_regime(clients))

    def _step_time(self, work: StepWork, outside: float) -> StepTime:
        """The step's time, with `outside` seconds of a request beside it."""
        loads, p = self.steps.loads(work), self.steps.parameters.values
        operators = self.steps.operators(work)
        seconds = {name: part for name, part, _ in operators}
        moving, computing = _roofline_seconds(loads, self.steps.roofs, p)
        fixed = sum(seconds.get(name, 0.0) for name in _FIXED) + outside
        flops = loads.linear_flops + loads.expert_flops + loads.cache_flops + loads.pair_flops
        if outside:
            operators = (*operators, ("request", outside, "fit"))
        return StepTime(
            sum(part for _, part, _ in operators),
            "bandwidth" if moving >= computing else "compute",
            moving,
            computing,
            fixed,
            sum(seconds.get(name, 0.0) for name in _LINKS),
            loads.linear_bytes + loads.expert_bytes + loads.cache_bytes + loads.state_bytes,
            flops * self.steps.parallel.tp * self.steps.parallel.attention_dp,
            operators,
        )


def step_model(deployment: Deployment, device: Device, setup: Setup, model: str) -> StepModel:
    """The step model of a deployment of a model of that name."""
    parameters, share = None, setup.measured
    if share is not None:
        parameters = measured_parameters(
            share.bandwidth, share.compute, share.seconds_per_layer, share.source
        )
    return StepModel.build(
        deployment.shape,
        deployment.recipe,
        device,
        model=model,
        engine=setup.engine,
        parallel=deployment.parallel,
        kv_bytes_per_element=float(deployment.kv_bytes_per_element),
        parameters=parameters,
    )


def fitted_efficiency(values: Mapping[str, float] | None = None) -> Efficiency:
    """Shares of the roofs that linear layers reach, and the fixed times, as fitted; of no deployment in
    particular without its parameters."""
    chosen = resolve(parameter_file()["parameters"], ()) if values is None else values
    return Efficiency(
        chosen["linear.bandwidth"],
        chosen["linear.compute"],
        chosen["layer.seconds"],
        chosen["all_reduce.latency"],
        f"fitted to {parameter_file()['fitted_configurations']:,} measured deployments",
    )


def _roofline_seconds(loads: Loads, roofs: Any, p: Any) -> tuple[float, float]:
    """Seconds of all memory traffic, and of all FLOP, at the shares that each operator reaches."""
    moving = sum(
        getattr(loads, f"{load}_bytes") / (roofs.bandwidth * p[f"{operator}.bandwidth"])
        for load, operator in (
            ("linear", "linear"),
            ("expert", "experts"),
            ("cache", "attention"),
            ("state", "states"),
        )
    )
    computing = (
        loads.linear_flops / (roofs.linear_peak * p["linear.compute"])
        + loads.expert_flops / (roofs.expert_peak * p["experts.compute"])
        + loads.cache_flops / (roofs.attention_peak * p["attention.compute"])
        + loads.pair_flops / (roofs.attention_peak * p["prefill.compute"])
    )
    return moving, computing

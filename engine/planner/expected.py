"""Expected times of a plan: a closed loop in its steady state by the step model, and the error of such plans.

Each of `concurrency` clients sends its next request when the last one ends. While a request decodes, the
other residents are prefilled once each; a prompt waits for the step in flight, for prompts before it, for its
share of the clients' first burst, and where the cache holds fewer sequences than there are clients, for a
place in it. The event simulation refines these means. Operators are those fitted to measured deployments;
with a measured machine (`--measured`) steps reach its shares of the roofs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .devices import Device
from .error_bands import (
    ErrorBand,
    Known,
    Likeness,
    batch_regime,
    error_band,
    narrowed_band,
    unlike_band,
)
from .load import Prediction
from .memory import Deployment, Reserve
from .offload import Offload
from .setup import PlannedWorkload, Setup, Speculation
from .speed import Efficiency, StepTime, decode_time, prefill_time
from .step_model import Loads, StepModel, StepWork, TimesSteps, generation, weight_dtype
from .step_parameters import OwnRows, level, measured_parameters, parameter_file, resolve

CHUNK_TOKENS = 8192


class LoopTimes(NamedTuple):
    """Seconds of the steps that a closed loop consists of: a decode of its residents, the same with one
    prompt in it, and a prompt's part of a step that is full of prompts."""

    decode: Any
    mixed: Any
    packed: Any


class Loop(NamedTuple):
    """A closed loop: prompt and output tokens, clients, the sequences that are resident at once, and the
    prompt tokens that the prefix cache holds."""

    prompt: Any
    output: Any
    concurrency: Any
    resident: Any
    cached: Any = 0


class LoopWorks(NamedTuple):
    """Works whose seconds are `LoopTimes`; `packed` holds `packed_prompts`."""

    decode: StepWork
    mixed: StepWork
    packed: StepWork
    packed_prompts: int


def loop_works(loop: Loop, chunk_tokens: int = CHUNK_TOKENS) -> LoopWorks:
    """Steps of a loop. A prompt longer than a chunk counts as one step."""
    context = loop.prompt + loop.output / 2
    computed = loop.prompt - loop.cached
    prompts = max(1, min(loop.concurrency, chunk_tokens // computed))
    attended = prompts * computed * (loop.cached + (computed + 1) / 2)
    return LoopWorks(
        StepWork.of(loop.resident, context),
        StepWork.of(loop.resident, context, computed, loop.cached),
        StepWork(0, 0, prompts * computed, attended, prompts),
        prompts,
    )


def closed_loop(loop: Loop, times: LoopTimes, p: Mapping[str, Any]) -> tuple[Any, Any]:
    """TTFT and TPOT in seconds of a loop; of numbers or columns."""
    added = times.mixed - times.decode
    others = loop.resident - 1
    tpot = times.decode + p["load.interference"] * others / loop.output * added
    prefilling = loop.resident * added
    busy = prefilling / (prefilling + loop.output * times.decode)
    queued = p["load.queue"] * busy / (1 - busy + 1 / (loop.resident + 1)) * added
    burst = p["load.burst"] * (loop.concurrency - 1) / 2 * times.packed
    turns = loop.concurrency / loop.resident - 1
    ttft = (
        p["load.fixed"]
        + p["load.arrival"] * (loop.concurrency - 1)
        + p["load.prompt"] * added
        + (1 + p["load.steps"] * others / loop.resident) * times.decode
        + queued
        + burst
        + turns * loop.output * tpot
    )
    return ttft, tpot


def throughput(loop: Loop, ttft: Any, tpot: Any) -> Any:
    return loop.concurrency * loop.output / (ttft + (loop.output - 1) * tpot)


def steady_state(
    model: StepModel, loop: Loop, *, speculation: Speculation | None = None, at_once: bool = True
) -> Prediction:
    """Means of a loop. Each stage of a pipeline computes a batch of its own, of an equal share of the
    clients. `at_once` is False if the first requests do not arrive in one burst."""
    clients = max(1.0, loop.concurrency / model.parallel.pp)
    resident = min(clients, max(1.0, loop.resident / model.parallel.pp))
    share = loop._replace(concurrency=clients, resident=resident)
    works, known = loop_works(share), model.parameters
    decode, mixed, packed = map(model.plain_seconds, works[:3])
    times = LoopTimes(decode, mixed, packed / works.packed_prompts)
    if speculation is not None:
        verified = model.plain_seconds(_verification(works.decode, speculation))
        token = speculation.token_seconds(times.decode, verified)
        times = times._replace(decode=token, mixed=token + times.mixed - times.decode)
    values = known.values if at_once else {**known.values, "load.burst": 0.0}
    ttft, tpot = closed_loop(share, times, values)
    ttft *= known.ttft_factor
    tpot *= known.tpot_factor
    return Prediction(loop.concurrency, ttft, tpot, throughput(loop, ttft, tpot))


def _verification(decode: StepWork, speculation: Speculation) -> StepWork:
    tokens = speculation.draft_tokens + 1
    return decode._replace(decode_sequences=tokens * decode.decode_sequences)


@dataclass(frozen=True, slots=True)
class SpeculativeSteps:
    """Seconds of steps for each token that speculation is expected to give a sequence, not each step: a step
    gives several, and the prompts in it take their time once."""

    model: StepModel
    speculation: Speculation

    def seconds(self, work: StepWork) -> float:
        """Seconds of one step's share."""
        whole = self.model.seconds(work)
        if not work.decode_sequences:
            return whole
        decode = StepWork(work.decode_sequences, work.decode_context_tokens)
        plain = self.model.seconds(decode)
        verified = self.model.seconds(_verification(decode, self.speculation))
        return whole - plain + self.speculation.token_seconds(plain, verified)


_FIXED = ("norms and activations", "launches", "host")
_LINKS = ("all-reduce", "all-to-all")


@dataclass(frozen=True, slots=True)
class Expectation:
    """Steps of a deployment as they are expected to run: by the step model, or by the shares of the roofs
    that a machine reached."""

    deployment: Deployment
    device: Device
    steps: StepModel
    setup: Setup

    @classmethod
    def of(cls, deployment: Deployment, device: Device, model: str, setup: Setup) -> Expectation:
        return cls(deployment, device, step_model(deployment, device, setup, model), setup)

    @property
    def clock(self) -> TimesSteps:
        """Times of a simulation's steps. Models of equal times are to be equal: the memory of the device and
        the bytes of a stored checkpoint are left out."""
        steps = replace(
            self.steps,
            recipe=replace(self.steps.recipe, stored_bytes=None),
            device=replace(self.device, memory_bytes=0),
        )
        draft = self.setup.speculation
        return steps if draft is None else SpeculativeSteps(steps, draft)

    @property
    def efficiency(self) -> Efficiency:
        return self.setup.measured or fitted_efficiency(self.steps.parameters.values)

    def decode(self, sequences: int, context: int, tokens_per_sequence: int = 1) -> StepTime:
        """Time of a decode step; with several tokens per sequence, of one that verifies draft tokens."""
        if (shares := self.setup.measured) is not None:
            work = sequences, context, shares, tokens_per_sequence
            return decode_time(self.deployment, self.device, *work)
        micro_batch = -(-sequences // self.deployment.pp)
        work = StepWork(micro_batch * tokens_per_sequence, micro_batch * context)
        return self._step_time(work, 0.0)

    def prefill(self, prompt: int, reserve: Reserve, cached: int = 0) -> StepTime:
        """TTFT of one prompt on an idle engine whose prefix cache holds `cached` of its tokens."""
        computed = prompt - cached
        if (shares := self.setup.measured) is not None:
            return prefill_time(self.deployment, self.device, computed, reserve, shares)
        return self._step_time(StepWork.of(0, 0, computed, cached), self.floor(prompt, cached))

    def floor(self, prompt: int, cached: int = 0) -> float:
        """Seconds that an idle engine's first token takes beyond its prefill: the host's, mostly."""
        whole = steady_state(self.steps, Loop(prompt, 1, 1, 1, cached)).ttft_seconds
        return max(0.0, whole - self.steps.seconds(StepWork.of(0, 0, prompt - cached, cached)))

    def loaded(self, loop: Loop, at_once: bool = True) -> Prediction:
        """Prediction for a closed loop, of which the cache holds one sequence at least."""
        loop = loop._replace(resident=max(1, loop.resident))
        means = steady_state(self.steps, loop, speculation=self.setup.speculation, at_once=at_once)
        return replace(means, band=self.band(loop.concurrency))

    def loaded_by(self, work: PlannedWorkload, clients: int, resident: int) -> Prediction:
        lengths = work.prompt_tokens, work.answer_tokens
        return self.loaded(Loop(*lengths, clients, resident, work.cached_tokens))

    def band(self, clients: float) -> ErrorBand | None:
        """The error of deployments like this one, narrowed by rows of the machine; None without either."""
        if self.deployment.offload is not None:
            return offload_band(self.deployment.offload)
        # On a CPU the bands are of plans that take the shares of a run; on a GPU, of fitted ones.
        is_alike = (self.device.kind == "cpu") == (self.setup.measured is not None)
        known = error_band(self.likeness(clients)) if is_alike else None
        own = own_of(self.device, self.setup)
        return known if own is None else narrowed_band(own, known or unlike_band())

    def likeness(self, clients: float) -> Likeness:
        """Properties that its error depends on. Its model is known where the fit had rows of it."""
        steps = self.steps
        file = parameter_file()
        key = f"{steps.engine}|{steps.model}|{weight_dtype(steps.recipe)}"
        known: Known = "model measured" if key in file["fitted_models"] else "model not measured"
        if self.device.kind != "cpu" and self.device.name not in file["fitted_gpus"]:
            known = "GPU not measured"
        kind = "mixture" if steps.shape.experts else "dense"
        where = "cpu" if self.device.kind == "cpu" else generation(self.device)
        return Likeness(steps.engine, where, known, kind, batch_regime(clients))

    def _step_time(self, work: StepWork, outside: float) -> StepTime:
        """The step's time, with `outside` seconds of a request added."""
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


def offload_band(offload: Offload) -> ErrorBand | None:
    """The widest errors of published llama.cpp set-ups, each predicted without its own machine, rounded
    outwards (docs/measured/offload.md)."""
    if offload.engine != "llama.cpp":
        return None
    tpot, ttft = (0.8, 1.6), (0.5, 2.0)
    throughput = 1 / tpot[1], 1 / tpot[0]
    return ErrorBand(tpot, ttft, throughput, 15, "llama.cpp with weights in RAM")


def own_of(device: Device, setup: Setup) -> OwnRows | None:
    own = setup.own
    return own if own and (own.gpu, own.engine) == (device.name, setup.engine) else None


def step_model(deployment: Deployment, device: Device, setup: Setup, model: str) -> StepModel:
    parameters, share = None, setup.measured
    if share is not None:
        parameters = measured_parameters(
            share.bandwidth, share.compute, share.seconds_per_layer, share.source
        )
        if (own := own_of(device, setup)) is not None:
            parameters = replace(parameters, tpot_log=level(own.tpot), ttft_log=level(own.ttft))
    return StepModel.build(
        deployment.shape,
        deployment.recipe,
        device,
        model=model,
        engine=setup.engine,
        version=setup.engine_version,
        parallel=deployment.parallel,
        kv_bytes_per_element=float(deployment.kv_bytes_per_element),
        parameters=parameters,
        offload=deployment.offload,
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

"""In-process target: drives the engine directly, in one loop and on one clock; and its decode steps by phase.

A hook can stretch a phase, to test that a comparison detects a slowdown. Phases of decode steps come from a
short extra pass, as timing them on a GPU synchronises.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import TYPE_CHECKING, Any, Literal

from ...base.errors import BadInput
from ...engine.base.image_input import NO_IMAGES, Images
from ...engine.base.sampling_params import SamplingParams
from ...engine.execution.step import Phase
from ...engine.execution.step_loop import StepRecorder, StepTrace
from ..metrics.step_words import PARTS
from ..metrics.trace import RequestTrace, StepRecord
from ..workloads.workload import Workload, WorkloadItem
from .load import Chunk, Target, drive

if TYPE_CHECKING:
    from ...engine.core.engine import Engine
    from ...engine.multimodal.encoder import EncoderCache
    from ...engine.scheduling.outputs import RequestOutput


# Polling interval of the idle wait: negligible cost, and an interrupt takes effect at once.
LONGEST_NAP_SECONDS = 0.05


@dataclass(slots=True)
class _InFlightRequest:
    prompt_len: int
    num_tokens: int = 0


class InProcessTarget:
    """Drives `Engine.add_request` and `Engine.step`, of exactly the requested lengths (`ignore_eos`)."""

    name = "in-process"

    def __init__(
        self,
        engine: Engine,
        *,
        ignore_eos: bool = True,
        temperature: float = 0.0,
        seed: int = 0,
        adapter: Callable[[str], str | None] = lambda _: None,
    ):
        self._engine = engine
        self._ignore_eos = ignore_eos
        self.adapter = adapter
        self._params = SamplingParams(
            temperature=temperature, ignore_eos=ignore_eos, seed=seed if temperature > 0 else None
        )
        self._flights: dict[str, _InFlightRequest] = {}
        self._refused: list[Chunk] = []
        self._steps: list[StepRecord] = []
        self.images = ImagePreparation()

    def send(self, item: WorkloadItem) -> None:
        params = replace(
            self._params,
            max_tokens=item.output_len,
            min_tokens=item.output_len if self._ignore_eos else 0,
        )
        try:
            prompt, images = self.images.prepared(item, self._engine)
            lora = self.adapter(item.request_id)
            self._engine.add_request(item.request_id, prompt, params, lora=lora, images=images)
        except BadInput as refusal:
            now = time.perf_counter()
            self._refused.append(Chunk(item.request_id, now, 0, finished=True, error=str(refusal)))
            return
        self._flights[item.request_id] = _InFlightRequest(len(prompt))

    def receive(self, until: float | None) -> list[Chunk]:
        if self._refused:
            refused, self._refused = self._refused, []
            return refused
        if not self._engine.has_unfinished():
            if until is not None:
                time.sleep(max(0.0, min(until - time.perf_counter(), LONGEST_NAP_SECONDS)))
            return []
        start = time.perf_counter()
        computed = self._engine.stats.num_computed_tokens
        outputs = self._engine.step()
        end = time.perf_counter()
        computed = self._engine.stats.num_computed_tokens - computed
        self._note_step(start, end, outputs, computed)
        return [self._chunk(output, end) for output in outputs]

    def cancel(self, request_id: str | None = None) -> None:
        for name in list(self._flights) if request_id is None else [request_id]:
            self._engine.abort(name)
            self._flights.pop(name, None)

    def take_steps(self, origin: float) -> list[StepRecord]:
        steps, self._steps = self._steps, []
        return [replace(step, start=step.start - origin, end=step.end - origin) for step in steps]

    def _note_step(
        self, start: float, end: float, outputs: list[RequestOutput], computed_tokens: int
    ) -> None:
        in_step = {output.request_id for output in outputs}
        active = [self._flights[name] for name in in_step]
        num_first = sum(flight.num_tokens == 0 for flight in active)
        step = StepRecord(
            start,
            end,
            num_sequences=len(in_step),
            num_first=num_first,
            decode_only=bool(in_step) and in_step == self._flights.keys() and not num_first,
            context_tokens=sum(flight.prompt_len + flight.num_tokens for flight in active),
            computed_tokens=computed_tokens,
        )
        self._steps.append(step)

    def _chunk(self, output: RequestOutput, now: float) -> Chunk:
        flight = self._flights[output.request_id]
        flight.num_tokens += len(output.new_token_ids)
        finished = output.finish_reason is not None
        if finished:
            del self._flights[output.request_id]
        # The end token is left out: the chat template writes it.
        tokens = output.new_token_ids
        at_end = output.finish_reason == "stop" and tokens[-1:]
        return Chunk(
            output.request_id,
            now,
            len(output.new_token_ids),
            output.new_text,
            finished,
            "the engine aborted it" if output.finish_reason == "abort" else "",
            output.num_cached_tokens,
            tokens[:-1] if at_end and tokens[-1] in self._engine.eos_token_ids else tokens,
        )


@dataclass(slots=True)
class ImagePreparation:
    """Counts and seconds of the images that were prepared."""

    num_requests: int = 0
    num_images: int = 0
    num_tokens: int = 0
    seconds: float = 0.0

    def prepared(self, item: WorkloadItem, engine: Engine) -> tuple[Sequence[int], Images]:
        """Token ids and images, after the text, of a request. BadInput: no images taken, or one is broken."""
        if not item.images:
            return item.prompt_token_ids, NO_IMAGES
        from ...engine.base.image_input import MediaLimits

        began, processor = time.perf_counter(), engine.images.required()
        from ...engine.multimodal.media import load_images

        images = load_images(item.images, MediaLimits())
        placeholder = engine.tokenizer.convert_tokens_to_ids(processor.image_token)
        text = item.prompt_token_ids
        prepared = processor.prepare([*text, *[placeholder] * len(images)], images)
        self.num_requests += 1
        self.num_images += len(images)
        self.num_tokens += len(prepared.token_ids) - len(text)
        self.seconds += time.perf_counter() - began
        return prepared.token_ids, prepared.images


def images_part(
    preparation: ImagePreparation, encoders: EncoderCache | None, traces: Sequence[RequestTrace]
) -> dict[str, Any] | None:
    """Images of a pass, or None, and milliseconds of mean TTFT in decoding (`prepare`), tower, prefill."""
    count = preparation.num_requests
    if encoders is None or not count:
        return None
    stats = encoders.stats
    ttfts = [trace.ttft for trace in traces if trace.success]
    prepare, encode = 1e3 * preparation.seconds / count, 1e3 * stats.encode_seconds / count
    prefill = 1e3 * mean(ttfts) - prepare - encode if ttfts else None
    return {
        "num_requests": count,
        "num_images": preparation.num_images,
        "image_tokens": preparation.num_tokens,
        "encoder_cache_hits": stats.num_hits,
        "encode_seconds": stats.encode_seconds,
        "mean_ttft_parts_ms": {"prepare": prepare, "encode": encode, "prefill": prefill},
    }


def spin(seconds: float) -> None:
    """Busy-wait: costs CPU time, and leaves the core awake for the following phase."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


@dataclass(frozen=True, slots=True)
class InjectedDelay:
    """Engine hook that stretches a phase, or steps, by `factor`: by `spin`, or `time.sleep` without CPU."""

    phase: Literal["sample", "step"]
    factor: float
    wait: Callable[[float], None] = spin

    def __call__(self, phase: str, seconds: float) -> None:
        if phase == self.phase:
            self.wait(seconds * (self.factor - 1))


def injected_delay(factor: float, where: Literal["step", "sampler"]) -> InjectedDelay | None:
    if factor == 1.0:
        return None
    return InjectedDelay("sample" if where == "sampler" else "step", factor)


MAX_REQUESTS = 16
PART_OF: Mapping[Phase, str] = {
    "schedule": "scheduling",
    "prepare_inputs": "preparing",
    "draft": "drafting",
    "forward": "kernels",
    "sample": "sampling",
    "fetch_tokens": "sampling",
    "update": "scheduling",
    "detokenize": "detokenizing",
}


def step_split(
    engine: Engine, target: Target, workload: Workload, limit: int | None
) -> dict[str, Any] | None:
    """Milliseconds of a decode step by phase, and sum, of the first requests again; or None."""
    items = tuple(
        replace(item, arrival_seconds=0.0, turns=()) for item in workload.items[:MAX_REQUESTS]
    )
    few = Workload(workload.name, workload.source, items)
    engine.reset_prefix_cache()
    recorder = engine.recorder = StepRecorder(engine.scheduler, phases=True)
    try:
        # Under async scheduling the phases overlap.
        with engine.computing_serially():
            seen = drive(target, few, limit, description="step phases")
    finally:
        engine.recorder = None
    steps = [step for step in recorder.steps if step.decode_only]
    return None if seen.interrupted or not steps else mean_split(steps)


def mean_split(steps: Sequence[StepTrace]) -> dict[str, Any]:
    """Mean phase times of steps taken without async scheduling."""
    split = dict.fromkeys((part for part in PARTS if part != "rest"), 0.0)
    for step in steps:
        for phase, seconds in step.phases.items():
            part = PART_OF[phase]
            split[part] = split.get(part, 0.0) + 1000 * seconds / len(steps)
    step_ms = 1000 * sum(step.step_seconds for step in steps) / len(steps)
    return {
        "num_steps": len(steps),
        "replayed_steps": sum(step.replayed for step in steps),
        "step_ms": step_ms,
        "parts_ms": split | {"rest": step_ms - sum(split.values())},
    }

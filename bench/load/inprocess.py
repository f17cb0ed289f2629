"""In-process target: drives the engine directly, without transport, in one loop and on one clock.

Images are decoded and processed when their request is sent, and timed. A hook can stretch a phase of the
engine's steps, to test that a comparison detects a slowdown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import TYPE_CHECKING, Any, Literal

from ...engine.base.image_input import NO_IMAGES, Images
from ...engine.base.sampling_params import SamplingParams
from ...quant.base.errors import BadInput
from ..metrics.trace import RequestTrace, StepRecord
from ..workloads.workload import WorkloadItem
from .load import Chunk

if TYPE_CHECKING:
    from ...engine.engine import Engine
    from ...engine.execution.prompt_pass import PromptPass
    from ...engine.multimodal.encoder import EncoderCache
    from ...engine.scheduling.outputs import RequestOutput

# Polling interval of the idle wait: negligible cost, and an interrupt takes effect at once.
LONGEST_NAP_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class WithAdapter:
    """Prompt scorer over an engine with a fixed LoRA adapter, or none."""

    engine: Engine
    lora: str | None

    def prompt_pass(self) -> PromptPass:
        return self.engine.prompt_pass(self.lora)


@dataclass(slots=True)
class _InFlightRequest:
    """A request in flight."""

    prompt_len: int
    num_tokens: int = 0


class InProcessTarget:
    """Drives `Engine.add_request` and `Engine.step`; a chunk's time is when its step returned.

    Args:
        engine: anything with the engine's `add_request`, `step`, `abort`, `has_unfinished`
            and `stats`.
        ignore_eos: generate exactly the requested output length, so that two checkpoints do equal work.
        temperature: 0 is greedy.
        adapter: the LoRA adapter of a request id; None: the model itself.
    """

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
        flights = self._flights
        in_step = {output.request_id for output in outputs}
        decode_only = bool(in_step) and all(
            flight.num_tokens > 0 and name in in_step for name, flight in flights.items()
        )
        self._steps.append(
            StepRecord(
                start,
                end,
                num_sequences=len(in_step),
                num_first=sum(flights[name].num_tokens == 0 for name in in_step),
                new_tokens=sum(len(output.new_token_ids) for output in outputs),
                decode_only=decode_only,
                context_tokens=sum(flights[n].prompt_len + flights[n].num_tokens for n in in_step),
                computed_tokens=computed_tokens,
            )
        )

    def _chunk(self, output: RequestOutput, now: float) -> Chunk:
        flight = self._flights[output.request_id]
        flight.num_tokens += len(output.new_token_ids)
        finished = output.finish_reason is not None
        if finished:
            del self._flights[output.request_id]
        return Chunk(
            output.request_id,
            now,
            len(output.new_token_ids),
            output.new_text,
            finished,
            "the engine aborted it" if output.finish_reason == "abort" else "",
            output.num_cached_tokens,
            self._spoken(output),
        )

    def _spoken(self, output: RequestOutput) -> tuple[int, ...]:
        """The new tokens, without the end token that stopped the request: the chat template writes it."""
        tokens = output.new_token_ids
        at_end = output.finish_reason == "stop" and tokens[-1:]
        return tokens[:-1] if at_end and tokens[-1] in self._engine.eos_token_ids else tokens


@dataclass(slots=True)
class ImagePreparation:
    """Counts and seconds of the images that were prepared."""

    num_requests: int = 0
    num_images: int = 0
    num_tokens: int = 0
    seconds: float = 0.0

    def prepared(self, item: WorkloadItem, engine: Engine) -> tuple[Sequence[int], Images]:
        """Token ids and images of a request, which stand behind its text.

        Raises:
            BadInput: the model takes no images, or one is broken.
        """
        if not item.images:
            return item.prompt_token_ids, NO_IMAGES
        from ...engine.base.image_input import MediaLimits
        from ...engine.multimodal.media import load_images

        began, support = time.perf_counter(), engine.images
        if support.processor is None:
            support.refuse()
        images = load_images(item.images, MediaLimits())
        placeholder = engine.tokenizer.convert_tokens_to_ids(support.processor.image_token)
        text = item.prompt_token_ids
        prepared = support.prepare([*text, *[placeholder] * len(images)], images)
        self.num_requests += 1
        self.num_images += len(images)
        self.num_tokens += len(prepared.token_ids) - len(text)
        self.seconds += time.perf_counter() - began
        return prepared.token_ids, prepared.images


def images_part(
    preparation: ImagePreparation,
    encoders: EncoderCache | None,
    traces: Sequence[RequestTrace],
) -> dict[str, Any] | None:
    """The images of a pass, and the parts of the mean TTFT in milliseconds; None without images.

    `prepare` is decoding and the image processor, `encode` the vision tower (a step's encoding is shared
    among its images), `prefill` the rest, queueing included.
    """
    count = preparation.num_requests
    if encoders is None or not count:
        return None
    stats = encoders.stats
    ttfts = [trace.ttft for trace in traces if trace.success]
    prepare, encode = (
        1e3 * seconds / count for seconds in (preparation.seconds, stats.encode_seconds)
    )
    return {
        "num_requests": count,
        "num_images": preparation.num_images,
        "image_tokens": preparation.num_tokens,
        "encoder_cache_hits": stats.num_hits,
        "encode_seconds": stats.encode_seconds,
        "mean_ttft_parts_ms": {
            "prepare": prepare,
            "encode": encode,
            "prefill": 1e3 * mean(ttfts) - prepare - encode if ttfts else None,
        },
    }


def spin(seconds: float) -> None:
    """Busy-wait: costs CPU time, and leaves the core awake for the following phase."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


@dataclass(frozen=True, slots=True)
class InjectedDelay:
    """Engine phase hook: stretches one phase, or whole steps, by `factor`.

    Attributes:
        wait: passes the added seconds: `spin`, or `time.sleep` for a delay that CPU time does not see.
    """

    phase: Literal["sample", "step"]
    factor: float
    wait: Callable[[float], None] = spin

    def __call__(self, phase: str, seconds: float) -> None:
        if phase == self.phase:
            self.wait(seconds * (self.factor - 1))


def injected_delay(factor: float, where: Literal["step", "sampler"]) -> InjectedDelay | None:
    """The hook for the options `slowdown` and `slowdown_where`; None for a factor of 1."""
    if factor == 1.0:
        return None
    return InjectedDelay("sample" if where == "sampler" else "step", factor)

"""In-process target: drives the engine directly, without transport, in one loop and on one clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...engine.base.sampling_params import SamplingParams
from ...quant.base.errors import BadInput
from ..metrics.trace import StepRecord
from ..workloads.workload import WorkloadItem
from .image_preparation import ImagePreparation
from .target import Chunk

if TYPE_CHECKING:
    from ...engine.engine import Engine
    from ...engine.execution.prompt_pass import PromptPass
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
        self._images = ImagePreparation()

    @property
    def image_preparation(self) -> ImagePreparation:
        """What the images of the requests cost before the engine had them."""
        return self._images

    def send(self, item: WorkloadItem) -> None:
        params = replace(
            self._params,
            max_tokens=item.output_len,
            min_tokens=item.output_len if self._ignore_eos else 0,
        )
        try:
            prompt = self._images.prepared(item, self._engine)
            self._engine.add_request(
                item.request_id,
                prompt.token_ids,
                params,
                lora=self.adapter(item.request_id),
                images=prompt.images,
            )
        except BadInput as refusal:
            now = time.perf_counter()
            self._refused.append(Chunk(item.request_id, now, 0, finished=True, error=str(refusal)))
            return
        self._flights[item.request_id] = _InFlightRequest(len(prompt.token_ids))

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

    def cancel(self) -> None:
        for request_id in list(self._flights):
            self._engine.abort(request_id)
        self._flights.clear()

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

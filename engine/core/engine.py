"""The engine core: `step()` schedules, executes and processes outputs, for `LLM`, server and benchmark."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch

from ...base.errors import BadInput
from ..base.image_input import NO_IMAGES, Images
from ..base.sampling_params import PoolingParams, SamplingParams
from ..cache.kv_cache import (
    KvCache,
    check_fits_memory,
    check_stored_dtype,
    kv_block_bytes,
    stored_dtype,
    stored_name,
)
from ..config.adapters import adapter_salt
from ..config.compatibility import refuse
from ..config.config import EngineConfig
from ..execution.lora_manager import LoraManager
from ..execution.output_processor import BestOf, OutputProcessor
from ..execution.prompt_pass import PromptPass, plan_steps
from ..execution.start_up import explaining_out_of_memory
from ..execution.step import UNTIMED, PhaseTimer, StepHook, StepTimer
from ..execution.step_loop import InFlightStep, SerialLoop, StepLoop, StepRecorder
from ..model.layers.lora import AdapterParts
from ..multimodal.encoder import EncodingError
from ..scheduling.block_pool import BlockPool
from ..scheduling.outputs import EngineStats, RequestOutput
from ..scheduling.request import Request, RequestTimes
from .build import build_engine


class Engine:
    """A model, its KV cache, and the requests that share them. Not thread-safe: one thread drives it.

    If set, `recorder` records every step, and `hook` is called at the end of each phase and step. Raises
    BadInput: the checkpoint is missing, broken or of a kind that is not supported, or the options contradict
    the model or the machine.
    """

    def __init__(self, config: EngineConfig) -> None:
        loaded, runner, scheduler, loop, memory = build_engine(config)
        self.config = config
        self.folder, self.model_config = loaded.folder, loaded.config
        self.device, self.dtype = loaded.device, loaded.dtype
        self.tokenizer, self.eos_token_ids = loaded.tokenizer, loaded.eos_token_ids
        self.activation_bits = loaded.activation_bits
        self.vocab_size, self.max_model_len = loaded.model.vocab_size, loaded.max_model_len
        self.workers = loaded.workers
        self.images, self._image_rules = loaded.images, loaded.image_rules
        self.runner, self.scheduler, self.memory = runner, scheduler, memory
        self._loop: StepLoop = loop
        self.loras = LoraManager(config, loaded.model, scheduler)
        self._takes_loras = loaded.model.lora_bank is not None
        self._in_flight: InFlightStep | None = None
        self._finishing: InFlightStep | None = None
        self._failed: dict[str, None] = {}
        self.output_processor = OutputProcessor(self.scheduler, self.tokenizer)
        self.recorder: StepRecorder | None = None
        self.hook: StepHook | None = None
        self._random = random.Random(config.seed)
        self._next_order = 0
        self._counted = EngineStats()

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        arrival_seconds: float | None = None,
        priority: int = 0,
        turn: int = 0,
        cache_salt: bytes = b"",
        lora: str | None = None,
        pooling: PoolingParams | None = None,
        images: Images = NO_IMAGES,
    ) -> None:
        """Queue a prompt, as text or as token ids.

        `arrival_seconds` is on the clock of `time.perf_counter`, now by default. A smaller `priority`
        is served first under the priority policy, a smaller `turn` under first come first served. `lora`
        names an adapter that is loaded. With `pooling` nothing is generated: the only output is a vector of
        the prompt's hidden states. `images` are those of a prepared prompt, whose token ids then are the
        prompt.

        Raises BadInput: an empty prompt, a token outside the vocabulary, an id in use, an unknown adapter, a
        request that can never fit, hidden states that are not known, or images that the model or an option
        does not take.
        """
        adapter = None if lora is None else self.loras.loaded.key(lora)
        if pooling is not None:
            self._check_pooling(pooling)
        if any(r.request_id == request_id for r in self.scheduler.requests()):
            raise BadInput(f"request id {request_id!r} is in use")
        token_ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._check_tokens(token_ids, params)
        if images:
            self._check_images(images, len(token_ids))
        best_of = BestOf(params) if params.num_sequences > params.n else None
        max_tokens = params.max_tokens
        if max_tokens is None:
            limits, num_blocks = self.scheduler.config, self.scheduler.pool.num_usable
            max_tokens = max(1, limits.longest(num_blocks, len(token_ids)) - len(token_ids))
        request = Request(
            sequence_id=f"{request_id}/0",
            request_id=request_id,
            index=0,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            max_tokens=max_tokens,
            params=params if best_of is None else BestOf.scored(params),
            seed=self._random.getrandbits(62) if params.seed in (None, -1) else params.seed,
            order=self._next_order,
            times=RequestTimes(time.perf_counter() if arrival_seconds is None else arrival_seconds),
            priority=priority,
            turn=turn,
            num_completions=params.num_sequences,
            cache_salt=cache_salt if adapter is None else adapter_salt(adapter, cache_salt),
            lora=adapter,
            pooling=pooling,
            images=images,
        )
        if images:
            request.rope_positions = self._image_rules.rope_positions(token_ids, images)
            request.bidirectional_images = self._image_rules.bidirectional(images)
        self.scheduler.add(request)
        if pooling is not None:
            self.output_processor.add_pooled()
        if best_of is not None:
            self.output_processor.best_of[request_id] = best_of
        self._next_order += params.num_sequences

    def abort(self, request_id: str) -> bool:
        members = [r for r in self.scheduler.requests() if r.request_id == request_id]
        for request in members:
            self.scheduler.abort(request.sequence_id)
        self.output_processor.forget(request_id, members)
        self.scheduler.waiting.resume(request_id)
        self._release_loras()
        return bool(members)

    def load_lora(
        self,
        name: str,
        folder: Path,
        weights: AdapterParts | None = None,
        *,
        load_inplace: bool = False,
    ) -> None:
        """Load a LoRA adapter, by its PEFT folder; `weights` are what `loras.read` read of it. With
        `load_inplace` it takes the place of the adapter of that name, for later requests. Raises BadInput: it
        does not fit the model, its name is taken, or there are `max_loras` already."""
        weights = self.loras.read(folder) if weights is None else weights
        self._wait_for_thread()
        self.loras.load(name, folder, weights, load_inplace=load_inplace)

    def unload_lora(self, name: str) -> None:
        """Unload an adapter; requests that use it go on with it. BadInput: it is not loaded."""
        self._wait_for_thread()
        self.loras.unload(name)

    def _release_loras(self) -> None:
        # Rarely, because it ends the overlap of steps.
        if self._takes_loras and self.loras.releasable:
            self._wait_for_thread()
            self.loras.release()

    def close(self) -> None:
        """End the step loop's thread and the tensor-parallel workers, if any; the engine is unusable then."""
        self._loop.close()
        if self.workers is not None:
            self.workers.close()

    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished()

    def has_work(self) -> bool:
        """True if a step has something to do: not where every sequence waits for its reader."""
        scheduler = self.scheduler
        in_flight = self._in_flight is not None and scheduler.has_unfinished()
        return in_flight or len(scheduler.requests()) > scheduler.waiting.num_held

    def step(self) -> list[RequestOutput]:
        """Schedule, execute, process outputs; returns the outputs, possibly none.

        With async scheduling they are those of the previous step, while the new one is in flight. If the next
        step depends on the previous one's samples, it is not scheduled until that is processed. After an
        exception the known tokens remain, and the next step recomputes the sequences, unless
        `abort_failed` ends them.
        """
        try:
            return self._step()
        except BaseException as error:
            self._drop_in_flight(error)
            raise

    def abort_failed(self) -> list[str]:
        """Abort the requests of the steps that the last exception of `step` ended; returns their ids. The
        other requests stay in the queue, and the engine is as after any step. Raises AssertionError: the
        scheduler's state contradicts itself, so that no step may follow."""
        failed, self._failed = list(self._failed), {}
        for request_id in failed:
            self.abort(request_id)
        self.scheduler.check_integrity()
        return failed

    def _step(self) -> list[RequestOutput]:
        begun, before = time.perf_counter(), self._in_flight
        if before is not None and before.plan.blocks_next_step:
            self._in_flight = None
            return self._finish_step(before, begun)
        step = self._launch()
        if self._loop.is_overlapped:
            self._in_flight, step = step, before
        return [] if step is None else self._finish_step(step, begun)

    def _launch(self) -> InFlightStep | None:
        start, timer = time.perf_counter(), self._step_timer()
        with timer("schedule"):
            plan = self.scheduler.schedule(start)
        if not plan.rows:
            return None
        scheduled, pool = time.perf_counter(), self.scheduler.pool
        kv_blocks_used = pool.num_usable - pool.num_free
        wait = self._loop.launch(plan, timer)
        return InFlightStep(plan, start, scheduled, kv_blocks_used, timer, wait)

    def _step_timer(self) -> StepTimer:
        """A phase timer if a recorder or a hook needs one; a hook alone does not synchronize the device."""
        recorded = self.recorder is not None and self.recorder.records_phases
        if not recorded and self.hook is None:
            return UNTIMED
        on_gpu = self.device.type == "cuda"
        return PhaseTimer(self.device if recorded and on_gpu else None, self.hook)

    def _finish_step(self, step: InFlightStep, begun: float) -> list[RequestOutput]:
        """Wait for a step and process its outputs, in an `Engine.step` that started at `begun`."""
        plan, timer = step.plan, step.timer
        self._finishing = step
        computed = step.wait()
        known = time.perf_counter()
        result = computed.result
        with timer("update"):
            self.output_processor.keep(plan, result)
            tokens = self.scheduler.update(
                plan, result.tokens, self.eos_token_ids, known, result.draft_depths
            )
        counted = self._counted
        counted.num_steps += 1
        counted.num_computed_tokens += plan.num_tokens
        if drafts := result.num_draft_tokens:
            counted.num_drafts += sum(count > 0 for count in drafts.values())
            counted.num_draft_tokens += sum(drafts.values())
            counted.num_computed_tokens += sum(drafts.values())
            counted.num_accepted_tokens += sum(len(result.tokens[name]) - 1 for name in drafts)
        if self.scheduler.pace is not None:
            self.scheduler.pace.note(plan.rows, computed.ended - computed.started)
        with timer("detokenize"):
            outputs = self.output_processor.outputs(plan, result, tokens)
            outputs = self.output_processor.shown(outputs)
        counted.num_generated_tokens += sum(len(output.new_token_ids) for output in outputs)
        ended = time.perf_counter()
        if self.hook is not None:
            self.hook("step", ended - begun)
        if self.recorder is not None:
            self.recorder.note(step, computed, ended - known)
        self._finishing = None
        self._release_loras()
        return outputs

    def _drop_in_flight(self, error: BaseException) -> None:
        """Drop the steps in flight after an exception, and note whose they were, finished ones too: they may
        lack their last output. Of an image that cannot be encoded, only those that need it now."""
        self._wait_for_thread()
        steps = [step for step in (self._finishing, self._in_flight) if step is not None]
        rows = [row for step in steps for row in step.plan.rows]
        if isinstance(error, EncodingError):
            rows = [row for row in rows if row.needs_image(error.content_hash)]
        names = [row.sequence_id for row in rows] or [
            request.sequence_id for request in self.scheduler.running
        ]
        self._failed = dict.fromkeys(name.rpartition("/")[0] for name in names)
        self._finishing = self._in_flight = None
        self.scheduler.reset_in_flight()

    def _wait_for_thread(self) -> None:
        """Wait until the runner is idle; `step` raises the error of the in-flight step, if any."""
        if self._in_flight is not None:
            with suppress(Exception):
                self._in_flight.wait()

    @contextmanager
    def computing_serially(self) -> Iterator[None]:
        """A context without async scheduling; for an engine without unfinished requests."""
        assert not self.has_unfinished()
        self._wait_for_thread()
        before, self._loop = self._loop, SerialLoop(self.runner)
        self._in_flight = None
        try:
            yield
        finally:
            self._loop = before

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text))

    def prompt_logits(self, token_ids: Sequence[int], lora: str | None = None) -> torch.Tensor:
        """Logits after each token, float32 [tokens, vocab]; for many tokens take slices of `hidden_states`.
        BadInput: no or unknown tokens, more than fit in the free cache, or an unknown adapter."""
        return self.runner.decoder.logits(self.hidden_states(token_ids, lora))

    def hidden_states(self, token_ids: Sequence[int], lora: str | None = None) -> torch.Tensor:
        self._check_tokens(token_ids, SamplingParams())
        with self.prompt_pass(lora) as prompts:
            prompts.check_fits(len(token_ids))
            steps = plan_steps([len(token_ids)], [prompts])
            return torch.cat([prompts.hidden(step, [token_ids]) for step in steps])

    def prompt_pass(self, lora: str | None = None) -> PromptPass:
        """Prefill of prompts outside the scheduler, while no step runs. BadInput: an unknown adapter."""
        adapter = None if lora is None else self.loras.loaded.key(lora)
        self._wait_for_thread()
        scheduler = self.scheduler
        return PromptPass(self.runner, scheduler.pool, scheduler.config, adapter, scheduler.states)

    def unrounded_prompt_pass(self, num_tokens: int, lora: str | None = None) -> PromptPass | None:
        """Prefill on a KV cache of its own in the dtype of computation, of at least `num_tokens`, freed with
        the pass. None where this engine's cache rounds nothing, where layers keep a constant state, and with
        workers. Raises BadInput: an unknown adapter, or not enough memory for that cache."""
        if self.runner.cache.dtype == self.dtype or not self.takes_other_caches:
            return None
        return self.prompt_pass_on(None, num_tokens, lora)

    @property
    def takes_other_caches(self) -> bool:
        """True if `prompt_pass_on` serves: no layer keeps a constant state, and there are no workers."""
        return not self.runner.cache.states and self.workers is None

    def prompt_pass_on(
        self, kv_dtype: str | None, num_tokens: int, lora: str | None = None
    ) -> PromptPass:
        """Prefill on a KV cache of its own of at least `num_tokens`, freed with the pass; in the dtype of
        computation if `kv_dtype`, a name of `--kv-cache-dtype`, is None. Raises BadInput: as
        `unrounded_prompt_pass`, or a dtype that this device does not have."""
        dtype = self.dtype
        if kv_dtype is not None:
            config = replace(self.config, kv_cache_dtype=kv_dtype)
            dtype = stored_dtype(config, self.device, self.dtype)
            check_stored_dtype(dtype, self.device)
        scheduler = self.scheduler
        adapter = None if lora is None else self.loras.loaded.key(lora)
        size = scheduler.config.block_size
        num_blocks = 1 + -(-num_tokens // size)
        layouts = self.runner.decoder.kv_layouts
        check_fits_memory(num_blocks * kv_block_bytes(layouts, dtype, size), self.device)
        with explaining_out_of_memory("another KV cache", self.device):
            cache = KvCache(layouts, num_blocks, size, self.device, dtype)
        runner = self.runner.on_cache(cache)
        return PromptPass(runner, BlockPool(num_blocks), scheduler.config, adapter)

    def reset_prefix_cache(self) -> None:
        self.scheduler.cache.reset()

    @property
    def stats(self) -> EngineStats:
        scheduler, pool, compactor = self.scheduler, self.scheduler.pool, self.scheduler.compactor
        size, used = scheduler.config.block_size, pool.num_usable - pool.num_free
        return replace(
            self._counted,
            num_preemptions=scheduler.num_preemptions,
            num_swaps=scheduler.swap.num_swaps,
            prefix_cache_queries=scheduler.cache.num_queried_tokens,
            prefix_cache_hits=scheduler.cache.num_hit_tokens,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_blocks_total=pool.num_usable,
            kv_blocks_used=used,
            num_kept_tokens=0 if compactor is None else compactor.num_kept_tokens,
            num_evicted_tokens=0 if compactor is None else compactor.num_evicted_tokens,
            kv_dtype=stored_name(self.runner.cache.dtype),
            kv_bytes=self.memory.kv_cache_bytes,
            kv_tokens_total=pool.num_usable * size,
            kv_slots_used=used * size,
            kv_slots_unfilled=sum(
                len(request.block_ids) * size - request.num_slots for request in scheduler.running
            ),
        )

    def _check_pooling(self, pooling: PoolingParams) -> None:
        if self.runner.decoder.hidden_size is None and not pooling.token_ids:
            raise BadInput(
                "this model runs through transformers' modules, which give no hidden states to pool"
            )
        for token in pooling.token_ids:
            if not 0 <= token < self.vocab_size:
                raise BadInput(f"token id {token} is outside the vocabulary of {self.vocab_size}")

    def _check_images(self, images: Images, num_tokens: int) -> None:
        if self.images.encoders is None:  # without a processor a program may prepare images itself
            raise BadInput(f"images are not taken: {self.images.reason}")
        refuse({*self.config.features, "images"})
        begin = 0
        for image in images:
            if not begin <= image.offset < image.end <= num_tokens:
                raise BadInput(
                    f"an image takes the tokens {image.offset} to {image.end} of a prompt of {num_tokens}: "
                    "spans are in order, do not overlap, and lie in the prompt"
                )
            begin = image.end

    def _check_tokens(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        if not token_ids:
            raise BadInput("the prompt is empty: it needs at least one token")
        vocab = self.vocab_size
        if params.token_mask is not None and not (self.eos_token_ids or params.stop_token_ids):
            raise BadInput(
                "a token mask needs a token that ends the sequence: the model names none, so give "
                "stop_token_ids"
            )
        named = [*params.stop_token_ids, *(params.logit_bias or {})]
        for token in (*token_ids, *named):
            if not 0 <= token < vocab:
                raise BadInput(f"token id {token} is outside the vocabulary of {vocab}")

"""The model runner: executes step plans, from input tensors over the forward pass to sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch

from ..base.device import packed
from ..cache.compaction import Evictor
from ..cache.kv_cache import KvCache
from ..cache.step_inputs import Run, embedded_rows, step_inputs
from ..model.adapter.open import CausalModel
from ..model.layers.attention import StepInputs
from ..model.layers.lora import rows_by_adapter
from ..model.layers.projection import AdapterRows
from ..multimodal.encoder import EncoderCache
from ..sampling.rowwise import sampling_rows
from ..sampling.sampler import Draw, Sampler, rows_per_slice, sliced_logprobs
from ..scheduling.step_plan import DecodeBatch, DecodeRows, ScheduledRow, StepPlan, is_plain_decode
from ..speculation.proposer import CachedProposer, Proposer
from .decode_graphs import StepGraphs
from .graph_setting import Forward
from .pooling import pooled_rows
from .speculative_step import SpeculativeDecoding
from .step import UNTIMED, LaunchedStep, SampledTokens, StepLayout, StepResult, StepTimer
from .token_graphs import TokenGraphs, capture_all


def _by_name(rows: DecodeRows, tokens: Iterable[int]) -> dict[str, list[int]]:
    return dict(zip(rows.batch.names, [[token] for token in tokens], strict=True))


def _fetch_samples(
    rows: Sequence[ScheduledRow], draw: Draw, result: StepResult, timer: StepTimer
) -> StepResult:
    with timer("fetch_tokens"):
        samples = draw.result()
    result.add_samples(rows, *samples)
    return result


class ModelRunner:
    """Owns the model, its KV cache, the sampler and the proposer of draft tokens."""

    def __init__(
        self,
        decoder: CausalModel,
        cache: KvCache,
        device: torch.device,
        dtype: torch.dtype,
        eos_token_ids: frozenset[int],
        proposer: Proposer | None = None,
        *,
        graphs: StepGraphs,
        token_graphs: TokenGraphs | None = None,
        by_rejection: bool = False,
        evictor: Evictor | None = None,
        encoders: EncoderCache | None = None,
    ) -> None:
        self.decoder = decoder
        self.cache = cache
        self._device = device
        self._dtype = dtype
        self.eos_token_ids = eos_token_ids
        self._sampler = Sampler()
        self._graphs, self._token_graphs = graphs, token_graphs
        self.evictor = evictor
        self.encoders = encoders
        self._proposer = proposer
        self._aux_layers = () if proposer is None else proposer.aux_hidden_state_layers
        self._speculation: SpeculativeDecoding | None = None
        if proposer is not None:
            self._speculation = SpeculativeDecoding(
                proposer, self._sampler, eos_token_ids, by_rejection=by_rejection
            )

    @property
    def caches(self) -> tuple[KvCache, ...]:
        return (self.cache, *(() if self._proposer is None else self._proposer.caches))

    def capture_graphs(self) -> None:
        capture_all(self._graphs, self._token_graphs, self._aux_layers)
        proposer = self._proposer
        if isinstance(proposer, CachedProposer):
            proposer.capture_all()

    def execute(self, plan: StepPlan, timer: StepTimer = UNTIMED) -> StepResult:
        return self.launch(plan, timer=timer).wait()

    def reads_placeholders(self, plan: StepPlan) -> bool:
        """True if the host reads tokens for which the plan has output placeholders."""
        drafts = self._speculation is not None
        if isinstance(plan.rows, DecodeRows):
            return plan.rows.has_placeholders and (drafts or plan.rows.batch.reads_tokens)
        return any(
            row.tokens.has_placeholder
            and (drafts or (row.num_samples > 0 and row.params.reads_tokens))
            for row in plan.rows
        )

    def launch(
        self, plan: StepPlan, sampled: SampledTokens | None = None, timer: StepTimer = UNTIMED
    ) -> LaunchedStep:
        """Launch a step, resolved if it `reads_placeholders`; `sampled`: the previous step's tokens."""
        speculation = self._speculation
        if plan.compactions or plan.copies or speculation is not None:
            with timer("prepare_inputs"), torch.inference_mode():
                if self.evictor is not None:
                    self.evictor.compact(plan.compactions)
                for cache in self.caches:
                    cache.copy(plan.copies)
        if speculation is not None:
            result = speculation.run(plan.rows, self.cache, self._compute, timer)
            return LaunchedStep(lambda: result)
        rows = self._decode_rows(plan.rows)
        forward = None
        if rows is not None:
            with timer("prepare_inputs"):
                forward = self._prepare_decode(rows, sampled)
        if rows is None or forward is None:
            layout = StepLayout.of(plan.rows, {})
            _, logits, result = self._compute(layout, timer, sampled)
            self._save_states(plan)
            if rows is None:
                rows = layout.sampled_rows
        else:
            result = StepResult(replayed=True)
            with timer("forward"):
                logits = forward.run()
            self._save_states(plan)
            if forward.sample is not None:
                with timer("sample"):
                    tokens = forward.sample()
                with timer("fetch_tokens"):
                    result.tokens = _by_name(rows, tokens)
                return LaunchedStep(lambda: result)
        if logits is None:
            return LaunchedStep(lambda: result)
        with timer("sample"):
            return self._draw(rows, logits, result, timer)

    def _save_states(self, plan: StepPlan) -> None:
        if self.cache.states is not None and (checkpoints := plan.checkpoints):
            with torch.inference_mode():
                self.cache.states.copy(checkpoints)

    def _decode_rows(self, rows: Sequence[ScheduledRow]) -> DecodeRows | None:
        """Rows of a step in which only positions, blocks and tokens are new; None for another step."""
        if isinstance(rows, DecodeRows):
            return rows
        plain = self.evictor is None and all(map(is_plain_decode, rows))
        if not plain or len({row.has_placeholder for row in rows}) > 1:
            return None
        batch = DecodeBatch(tuple(rows), tuple(r.block_ids for r in rows), self.cache.block_size)
        if rows[0].has_placeholder:
            return DecodeRows(batch, 0, has_placeholders=True)
        token_ids = [row.token_ids[0] for row in rows]
        return DecodeRows(batch, 0, has_placeholders=False, sampled=token_ids)

    def _prepare_decode(self, rows: DecodeRows, sampled: SampledTokens | None) -> Forward | None:
        """Captured decode step; None if it is not captured, or an adapter is in no slot."""
        placed = None
        if sampled is not None and rows.has_placeholders:
            placed = sampled.of(rows.batch)
        slots = self._adapter_slots(rows.batch.rows) if rows.batch.has_adapters else []
        return None if slots is None else self._graphs.prepare(rows, placed, slots)

    @torch.inference_mode()
    def _compute(
        self, layout: StepLayout, timer: StepTimer, sampled: SampledTokens | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None, StepResult]:
        """Hidden states [tokens, hidden], logits [ends, vocab] if any row samples, and a result with the
        logprobs of prompts."""
        with timer("prepare_inputs"):
            forward = self._prepare(layout, sampled)
            run = forward.run if isinstance(forward, Forward) else forward
            # Indices of the hidden states whose logits are needed, int64 [ends]; None: of all, in order.
            indices, ends = layout.ends, None
            if indices != [*range(layout.num_tokens)]:
                ends = packed([indices], self._device)[0]
        result = StepResult(replayed=isinstance(forward, Forward))
        with timer("forward"):
            hidden = run()
            self._score_prompts(layout, hidden, result)
            if any(row.pooling is not None for row in layout.rows):
                width = self.decoder.hidden_size
                result.pooled = pooled_rows(layout, hidden, width, self.decoder.logits)
            logits = None
            if layout.sampled_rows:
                states = hidden if ends is None else hidden.index_select(0, ends)
                logits = self.decoder.logits(states)
        return hidden, logits, result

    @torch.inference_mode()
    def hidden(self, runs: Sequence[Run], lora: str | None = None) -> torch.Tensor:
        """Final normed hidden states, [tokens, hidden], of `runs`, whose blocks the caller has allocated."""
        adapters = rows_by_adapter([(lora, len(run.token_ids)) for run in runs], self._device)
        inputs = replace(self._inputs_of(runs), adapters=adapters)
        return self.decoder.forward(inputs, self.cache.layers)

    def on_cache(self, cache: KvCache) -> ModelRunner:
        """A runner of the same model whose `hidden` reads and writes another KV cache."""
        other = copy(self)
        other.cache = cache
        return other

    def _inputs_of(self, runs: Sequence[Run]) -> StepInputs:
        states = () if self.cache.states is None else self.cache.states.tensors
        inputs = step_inputs(runs, self.cache.block_size, self._device, self._dtype, states)
        if self.encoders is None:
            return inputs
        return replace(inputs, embedded=embedded_rows(runs, self.encoders, self._device))

    def _prepare(
        self, layout: StepLayout, sampled: SampledTokens | None
    ) -> Forward | Callable[[], torch.Tensor]:
        """Captured step with its inputs in place, or the model's own forward pass."""
        slots, tokens = self._adapter_slots(layout.rows), self._token_graphs
        fill = captured = None
        has_spans = layout.num_tokens > len(layout.runs)  # several tokens of some sequence
        if sampled is not None and (placeholders := layout.placeholders):
            fill = partial(sampled.fill_placeholders, placeholders=placeholders)
        if slots is not None and has_spans and tokens is not None and self.evictor is None:
            captured = tokens.prepare(layout.runs, self._aux_layers, fill, slots)
            if captured is not None:
                return captured
        inputs = self._inputs_of(layout.runs)
        if fill is not None:
            fill(inputs.token_ids)
        adapters: AdapterRows = {}  # not `NO_ADAPTERS`: tensor-parallel ranks receive it by pickle
        if any(row.lora for row in layout.rows):
            pairs = zip(layout.rows, layout.runs, strict=True)
            loras = [(row.lora, len(run.token_ids)) for row, run in pairs]
            adapters = rows_by_adapter(loras, self._device)
        scored = () if self.evictor is None else self.evictor.spans(layout.rows, layout.begins)
        aux = self._aux_layers
        inputs = replace(inputs, adapters=adapters, aux_hidden_state_layers=aux, scored=scored)
        if slots is not None and not has_spans:
            captured = self._graphs.prepare(inputs, adapter_slots=slots)
        return captured or partial(self.decoder.forward, inputs, self.cache.layers)

    def _adapter_slots(self, rows: Sequence[ScheduledRow]) -> list[int] | None:
        """Slot of each row's adapter, [] without adapters; None if an adapter is in no slot."""
        bank = self.decoder.lora_bank
        if bank is None or not any(row.lora for row in rows):
            return []
        return bank.slots_of(row.lora for row in rows) if bank.has_slots else None

    @torch.inference_mode()
    def _draw(
        self,
        rows: DecodeRows | Sequence[ScheduledRow],
        logits: torch.Tensor,
        result: StepResult,
        timer: StepTimer,
    ) -> LaunchedStep:
        if isinstance(rows, DecodeRows) and rows.batch.takes_largest:
            draw = self._sampler.largest(logits)

            def wait() -> StepResult:
                with timer("fetch_tokens"):
                    tokens, _ = draw.result()
                result.tokens = _by_name(rows, tokens)
                return result

            return LaunchedStep(wait, SampledTokens(draw.tokens, rows.batch.places))
        sampling = [sample for row in rows for sample in sampling_rows(row, self.eos_token_ids)]
        draw = self._sampler.begin(logits, sampling)
        places = accumulate((row.num_samples for row in rows), initial=0)
        names = (row.sequence_id for row in rows)
        sampled = SampledTokens(draw.tokens, dict(zip(names, places, strict=False)))
        return LaunchedStep(partial(_fetch_samples, rows, draw, result, timer), sampled)

    def _score_prompts(self, layout: StepLayout, hidden: torch.Tensor, result: StepResult) -> None:
        """Logprobs of the step's prompt tokens, from slices of logits over all rows that request them."""
        indices: list[int] = []
        token_ids: list[int] = []
        spans: list[tuple[ScheduledRow, range]] = []
        for row, begin in zip(layout.rows, layout.begins, strict=True):
            # The row at position p scores the token at p + 1, which must be part of the prompt.
            count = min(row.end, row.num_prompt_tokens - 1) - row.start
            if row.params.prompt_logprobs is None or count <= 0:
                continue
            positions = range(row.start + 1, row.start + count + 1)
            indices += range(begin, begin + count)
            token_ids += row.tokens[positions.start : positions.stop]
            spans.append((row, positions))
        if not spans:
            return
        num_top = max(row.params.prompt_logprobs or 0 for row, _ in spans)
        (rows,) = packed([indices], self._device)
        states, num_rows = hidden.index_select(0, rows), rows_per_slice(self.decoder.vocab_size)
        scored = iter(sliced_logprobs(self.decoder.logits, states, token_ids, num_top, num_rows))
        for row, positions in spans:
            num_logprobs = row.params.prompt_logprobs or 0
            result.prompt_logprobs[row.sequence_id] = [
                (position, next(scored).with_top(num_logprobs)) for position in positions
            ]

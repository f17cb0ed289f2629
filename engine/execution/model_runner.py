"""The model runner: executes step plans, from input tensors over the forward pass to sampled tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch

from ..base.device import packed
from ..cache.compaction import Evictor
from ..cache.kv_cache import KvCache
from ..cache.step_inputs import Run, embedded_rows, step_inputs
from ..model.layers.attention import StepInputs
from ..model.layers.lora import rows_by_adapter
from ..model.open import CausalModel
from ..multimodal.encoder import EncoderCache
from ..sampling.rowwise import SamplingRow, sampling_row, sampling_rows
from ..sampling.sampler import Draw, Sampler, rows_per_slice, sliced_logprobs
from ..scheduling.step_plan import DecodeRows, ScheduledRow, StepPlan
from ..speculation.draft_model import DraftModel
from ..speculation.eagle import EagleProposer
from ..speculation.proposer import Proposer
from .decode_graphs import StepGraphs
from .graph_setting import Forward
from .pooling import pooled_rows
from .speculative_step import CoupledVerification, RejectionVerification, Verification
from .step import UNTIMED, LaunchedStep, SampledTokens, StepLayout, StepResult, StepTimer
from .token_graphs import TokenGraphs


def _fetch_tokens(rows: DecodeRows, draw: Draw, result: StepResult, timer: StepTimer) -> StepResult:
    """Wait for the tokens of a decode step, one of each row and without logprobs."""
    with timer("fetch_tokens"):
        tokens, _ = draw.result()
    result.tokens = _by_name(rows, tokens)
    return result


def _by_name(rows: DecodeRows, tokens: Iterable[int]) -> dict[str, list[int]]:
    return dict(zip(rows.batch.names, [[token] for token in tokens], strict=True))


def _fetch_samples(
    rows: Sequence[ScheduledRow], draw: Draw, result: StepResult, timer: StepTimer
) -> StepResult:
    """Wait for the sampled tokens of rows, and put them into `result`."""
    with timer("fetch_tokens"):
        tokens, logprobs = draw.result()
    begin = 0
    for row in rows:
        name, end = row.sequence_id, begin + row.num_samples
        result.tokens[name], result.logprobs[name] = tokens[begin:end], logprobs[begin:end]
        begin = end
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
        self._proposer = proposer
        self._graphs, self._token_graphs = graphs, token_graphs
        self.evictor = evictor
        self.encoders = encoders
        rule = RejectionVerification if by_rejection else CoupledVerification
        self._verification: Verification = rule(self._sampler, eos_token_ids)

    @property
    def _aux_hidden_state_layers(self) -> tuple[int, ...]:
        return () if self._proposer is None else self._proposer.aux_hidden_state_layers

    @property
    def caches(self) -> tuple[KvCache, ...]:
        """The model's KV cache, and those of the proposer."""
        return (self.cache, *(() if self._proposer is None else self._proposer.caches))

    def capture_graphs(self) -> None:
        """Capture the graphs of decode steps and of steps of few tokens, before the first step."""
        self._graphs.capture_all(self._aux_hidden_state_layers)
        if self._token_graphs is not None:
            if self._graphs.gave_up:  # so would these
                self._token_graphs.give_up()
            else:
                self._token_graphs.capture_all(self._aux_hidden_state_layers)
        if isinstance(self._proposer, DraftModel | EagleProposer):
            self._proposer.capture_all()

    def execute(self, plan: StepPlan, timer: StepTimer = UNTIMED) -> StepResult:
        """Run one step without output placeholders."""
        return self.launch(plan, timer=timer).wait()

    def reads_placeholders(self, plan: StepPlan) -> bool:
        """Whether the host reads tokens for which the plan has output placeholders."""
        drafts = self._proposer is not None
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
        """Launch a step. If the plan has output placeholders, `sampled` are the tokens of the previous step.

        A plan of which it `reads_placeholders` must be resolved first.
        """
        if isinstance(plan.rows, DecodeRows) and self._takes_batch(plan, plan.rows):
            launched = self._launch_batch(plan.rows, sampled, timer)
            if launched is not None:
                return launched
        return self._launch(plan, sampled, timer)

    def _takes_batch(self, plan: StepPlan, rows: DecodeRows) -> bool:
        """Whether only the rows' positions, blocks and tokens are new to it."""
        plain = self._proposer is None and self.evictor is None
        return plain and not (plan.copies or plan.compactions)

    def _launch_batch(
        self, rows: DecodeRows, sampled: SampledTokens | None, timer: StepTimer
    ) -> LaunchedStep | None:
        """Launch a captured decode step; None: it is not captured."""
        batch = rows.batch
        with timer("prepare_inputs"):
            placed = None if sampled is None else sampled.of(batch)
            slots = self._adapter_slots(batch.rows) if batch.has_adapters else []
            forward = None
            if slots is not None:
                forward = self._graphs.prepare_batch(rows, placed, slots)
        if forward is None:
            return None
        result = StepResult(replayed=True)
        with timer("forward"):
            logits = forward.run()
        if forward.tokens is not None:
            with timer("fetch_tokens"):
                result.tokens = _by_name(rows, forward.tokens)
            return LaunchedStep(lambda: result)
        with timer("sample"):
            if not batch.takes_largest:
                return self._sample(rows, logits, result, timer)
            draw = self._sampler.largest(logits)
            wait = partial(_fetch_tokens, rows, draw, result, timer)
            return LaunchedStep(wait, SampledTokens(draw.tokens, batch.places))

    @torch.inference_mode()
    def _sample(
        self, rows: DecodeRows, logits: torch.Tensor, result: StepResult, timer: StepTimer
    ) -> LaunchedStep:
        return self._begin_draw(rows, logits, result, timer)

    @torch.inference_mode()
    def _launch(
        self, plan: StepPlan, sampled: SampledTokens | None, timer: StepTimer
    ) -> LaunchedStep:
        """Launch a step of any rows."""
        with timer("prepare_inputs"):
            if self.evictor is not None:
                self.evictor.compact(plan.compactions)
            for cache in self.caches:
                cache.copy(plan.copies)
        if self._proposer is not None:
            result = self._speculate(plan, self._proposer, timer)
            return LaunchedStep(lambda: result)
        layout = StepLayout.of(plan.rows, {})
        _, logits, result = self._forward(layout, sampled, timer)
        self.cache.states.copy(plan.checkpoints)
        if logits is None:
            return LaunchedStep(lambda: result)
        with timer("sample"):
            return self._begin_draw(layout.sampled_rows, logits, result, timer)

    def _forward(
        self, layout: StepLayout, sampled: SampledTokens | None, timer: StepTimer
    ) -> tuple[torch.Tensor, torch.Tensor | None, StepResult]:
        """Hidden states [tokens, hidden], logits [ends, vocab] of the layout's `ends` if any row samples, and
        a result with the prompts' logprobs."""
        with timer("prepare_inputs"):
            forward = self._prepare(layout, sampled)
            ends = self._ends(layout)
        result = StepResult(replayed=forward.is_replay)
        with timer("forward"):
            hidden = forward.run()
            self._score_prompts(layout, hidden, result)
            width = self.decoder.hidden_size
            result.pooled = pooled_rows(layout, hidden, width, self.decoder.logits)
            logits = None
            if layout.sampled_rows:
                states = hidden if ends is None else hidden.index_select(0, ends)
                logits = self.decoder.logits(states)
        return hidden, logits, result

    def _speculate(self, plan: StepPlan, proposer: Proposer, timer: StepTimer) -> StepResult:
        """Run a speculative step: propose, forward, verify, compact KV slots, and update the proposer."""
        with timer("draft"):
            generating = [row for row in plan.rows if row.pooling is None]
            drafts = proposer.propose(generating, self._sampling_row) if generating else {}
        layout = StepLayout.of(plan.rows, drafts)
        hidden, logits, result = self._forward(layout, None, timer)
        if logits is not None:
            with timer("sample"):
                self._verification.draw(layout, logits, result)
        with timer("draft"):
            moved: list[tuple[int, int]] = []
            for name, row in layout.speculative.items():
                result.num_draft_tokens[name] = len(row.draft.token_ids)
                result.draft_depths[name] = row.draft.tree.depth
                moved += row.moved_slots(self.cache.block_size)
            self.cache.copy_slots(moved)
            if generating:
                proposer.observe(layout.target_states(hidden, result))
        return result

    @torch.inference_mode()
    def hidden(self, runs: Sequence[Run], lora: str | None = None) -> torch.Tensor:
        """Final normed hidden states, [tokens, hidden], of `runs`, whose blocks the caller has allocated."""
        adapters = rows_by_adapter([(lora, len(run.token_ids)) for run in runs], self._device)
        inputs = replace(self._inputs_of(runs), adapters=adapters)
        return self.decoder.forward(inputs, self.cache.layers)

    def _inputs(self, layout: StepLayout, sampled: SampledTokens | None = None) -> StepInputs:
        inputs = self._inputs_of(layout.runs)
        if sampled is not None and (placeholders := layout.placeholders):
            sampled.fill_placeholders(inputs.token_ids, placeholders)
        lengths = [len(run.token_ids) for run in layout.runs]
        loras = zip((row.lora for row in layout.rows), lengths, strict=True)
        return replace(
            inputs,
            adapters=rows_by_adapter(list(loras), self._device),
            aux_hidden_state_layers=self._aux_hidden_state_layers,
            scored=() if self.evictor is None else self.evictor.spans(layout.rows, layout.begins),
        )

    def _inputs_of(self, runs: Sequence[Run]) -> StepInputs:
        states = self.cache.states.tensors
        inputs = step_inputs(runs, self.cache.block_size, self._device, self._dtype, states)
        if self.encoders is None:
            return inputs
        return replace(inputs, embedded=embedded_rows(runs, self.encoders, self._device))

    def _prepare(self, layout: StepLayout, sampled: SampledTokens | None) -> Forward:
        """The forward pass with its inputs in place."""
        plain = sampled is None and self._proposer is None and self.evictor is None
        slots = self._adapter_slots(layout.rows)
        if slots is not None:
            forward = self._graphs.prepare_decode(layout.runs, slots) if plain else None
            forward = forward or self._prepare_tokens(layout, sampled, slots)
            if forward is not None:
                return forward
        return self._graphs.prepare(self._inputs(layout, sampled), slots)

    def _adapter_slots(self, rows: Sequence[ScheduledRow]) -> list[int] | None:
        """The slot of each row's adapter, none where no row has one; None: some adapter is in no slot."""
        bank = self.decoder.lora_bank
        if bank is None or not any(row.lora for row in rows):
            return []
        return bank.slots_of(row.lora for row in rows) if bank.has_slots else None

    def _prepare_tokens(
        self, layout: StepLayout, sampled: SampledTokens | None, slots: Sequence[int]
    ) -> Forward | None:
        """A captured step in which some sequence has several tokens; None: it is none."""
        graphs = self._token_graphs
        if graphs is None or self.evictor is not None:
            return None
        if layout.num_tokens == len(layout.runs):
            return None
        fill = None
        if sampled is not None and (placeholders := layout.placeholders):
            fill = partial(sampled.fill_placeholders, placeholders=placeholders)
        return graphs.prepare(layout.runs, self._aux_hidden_state_layers, fill, slots)

    def _ends(self, layout: StepLayout) -> torch.Tensor | None:
        """Indices of the hidden states whose logits are needed, int64 [ends]; None: of all, in order."""
        ends = layout.ends
        if ends == [*range(layout.num_tokens)]:
            return None
        return packed([ends], self._device)[0]

    def _begin_draw(
        self,
        rows: Sequence[ScheduledRow],
        logits: torch.Tensor,
        result: StepResult,
        timer: StepTimer,
    ) -> LaunchedStep:
        """Sample from the logits of each row, asynchronously."""
        sampling = [each for row in rows for each in sampling_rows(row, self.eos_token_ids)]
        draw = self._sampler.begin(logits, sampling)
        places = accumulate((row.num_samples for row in rows), initial=0)
        names = (row.sequence_id for row in rows)
        sampled = SampledTokens(draw.tokens, dict(zip(names, places, strict=False)))
        return LaunchedStep(partial(_fetch_samples, rows, draw, result, timer), sampled)

    def _sampling_row(self, row: ScheduledRow, draft_ids: Sequence[int]) -> SamplingRow:
        return sampling_row(row, self.eos_token_ids, draft_ids)

    def _score_prompts(self, layout: StepLayout, hidden: torch.Tensor, result: StepResult) -> None:
        """Logprobs of the step's prompt tokens, from slices of logits over all rows that ask for them."""
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
        scored = iter(
            sliced_logprobs(
                self.decoder.logits,
                hidden.index_select(0, rows),
                token_ids,
                num_top,
                rows_per_slice(self.decoder.vocab_size),
            )
        )
        for row, positions in spans:
            num_logprobs = row.params.prompt_logprobs or 0
            result.prompt_logprobs[row.sequence_id] = [
                (position, next(scored).with_top(num_logprobs)) for position in positions
            ]

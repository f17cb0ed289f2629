"""Carries out a step plan: tensors in, the decoder, logits of the rows that need them, tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from .block_pool import NULL_BLOCK
from .kernels.paged_attention import AttentionBatch, DecodeGroup, SequenceSpan
from .kv_cache import KvCache
from .lora.bank import rows_by_adapter
from .model.attention import StepInputs
from .model.open import CausalModel
from .outputs import TokenLogprobs
from .sampler import Sampler, SamplingRow, token_logprobs
from .step_plan import ScheduledRow, StepPlan


@dataclass(slots=True)
class StepResult:
    """What a step drew, by sequence.

    Attributes:
        tokens: as many as the row asked for.
        logprobs: beside them, where the request asks for logprobs.
        prompt_logprobs: (position, logprobs) of prompt tokens that this step could score.
    """

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs | None]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[tuple[int, TokenLogprobs]]] = field(default_factory=dict)


class ModelRunner:
    """Owns the model, its KV cache and the sampler."""

    def __init__(
        self,
        decoder: CausalModel,
        cache: KvCache,
        device: torch.device,
        dtype: torch.dtype,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.decoder = decoder
        self.cache = cache
        self._device = device
        self._dtype = dtype
        self._eos_token_ids = eos_token_ids
        self._sampler = Sampler(eos_token_ids)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""
        self.cache.copy_blocks(plan.block_copies)
        hidden = self.decoder.forward(self._inputs(plan.rows), self.cache.layers)
        result = StepResult()
        self._score_prompts(plan.rows, hidden, result)
        self._draw(plan.rows, hidden, result)
        return result

    @torch.inference_mode()
    def prompt_logits(
        self,
        token_ids: Sequence[int],
        block_ids: Sequence[int],
        chunk: int,
        lora: str | None = None,
    ) -> torch.Tensor:
        """Scores after each of `token_ids`, float32 [tokens, vocab], in chunks of `chunk` tokens.

        `block_ids` are blocks that the caller has taken for this.
        """
        scores = []
        for begin in range(0, len(token_ids), chunk):
            tokens = token_ids[begin : begin + chunk]
            spans = [(begin, tokens, block_ids)]
            adapters = rows_by_adapter([(lora, len(tokens))], self._device)
            inputs = replace(self._inputs_of(spans), adapters=adapters)
            hidden = self.decoder.forward(inputs, self.cache.layers)
            scores.append(self.decoder.logits(hidden))
        return torch.cat(scores)

    def _inputs(self, rows: Sequence[ScheduledRow]) -> StepInputs:
        inputs = self._inputs_of([(row.start, row.token_ids, row.block_ids) for row in rows])
        loras = [(row.lora, row.num_tokens) for row in rows]
        return replace(inputs, adapters=rows_by_adapter(loras, self._device))

    def _inputs_of(self, runs: Sequence[tuple[int, Sequence[int], Sequence[int]]]) -> StepInputs:
        """Tensors for runs of (start position, token ids, block ids of the whole sequence)."""
        size = self.cache.block_size
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        spans: list[SequenceSpan] = []
        single: list[tuple[int, int, Sequence[int]]] = []
        for start, tokens, block_ids in runs:
            begin, end = len(token_ids), start + len(tokens)
            token_ids.extend(tokens)
            positions.extend(range(start, end))
            slots.extend(block_ids[p // size] * size + p % size for p in range(start, end))
            used = block_ids[: -(-end // size)]
            if len(tokens) == 1:
                single.append((begin, end, used))
            else:
                spans.append(SequenceSpan(begin, begin + len(tokens), end, self._tensor(used)))
        batch = AttentionBatch(spans, self._decode_group(single), size, self._dtype)
        return StepInputs(
            self._tensor(token_ids), self._tensor(positions), self._tensor(slots), batch
        )

    def _decode_group(self, single: Sequence[tuple[int, int, Sequence[int]]]) -> DecodeGroup | None:
        if not single:
            return None
        width = max(len(used) for _, _, used in single)
        padded = [
            block for _, _, used in single for block in [*used, *[NULL_BLOCK] * (width - len(used))]
        ]
        return DecodeGroup(
            rows=self._tensor([row for row, _, _ in single]),
            block_ids=self._tensor(padded),
            lengths=self._tensor([length for _, length, _ in single]),
        )

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _draw(self, rows: Sequence[ScheduledRow], hidden: torch.Tensor, result: StepResult) -> None:
        ends: list[int] = []
        draws: list[SamplingRow] = []
        owners: list[str] = []
        end = 0
        for row in rows:
            end += row.num_tokens
            for sample in range(row.num_samples):
                ends.append(end - 1)
                owners.append(row.sequence_id)
                draws.append(self._sampling_row(row, row.seed + sample))
        if not draws:
            return
        logits = self.decoder.logits(hidden.index_select(0, self._tensor(ends)))
        tokens, logprobs = self._sampler.draw(logits, draws)
        for owner, token, logprob in zip(owners, tokens, logprobs, strict=True):
            result.tokens.setdefault(owner, []).append(token)
            result.logprobs.setdefault(owner, []).append(logprob)

    def _sampling_row(self, row: ScheduledRow, seed: int) -> SamplingRow:
        num_output = len(row.history) - row.num_prompt_tokens
        barred: frozenset[int] = frozenset()
        if num_output < row.params.min_tokens:
            barred = frozenset(row.params.stop_token_ids)
            if not row.params.ignore_eos:
                barred |= self._eos_token_ids
        return SamplingRow(row.params, seed, row.history, row.num_prompt_tokens, barred)

    def _score_prompts(
        self, rows: Sequence[ScheduledRow], hidden: torch.Tensor, result: StepResult
    ) -> None:
        begin = 0
        for row in rows:
            wanted = row.params.prompt_logprobs
            # The row at position p scores the token at p + 1, which must be part of the prompt.
            count = min(row.end, row.num_prompt_tokens - 1) - row.start
            if wanted is not None and count > 0:
                logits = self.decoder.logits(hidden[begin : begin + count])
                result.prompt_logprobs[row.sequence_id] = [
                    (position + 1, token_logprobs(scores, row.history[position + 1], wanted))
                    for position, scores in zip(
                        range(row.start, row.start + count), logits, strict=True
                    )
                ]
            begin += row.num_tokens

"""Carries out a step plan: tensors in, the decoder, logits of the rows that need them, tokens out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from .kv_cache import KvCache
from .lora.bank import rows_by_adapter
from .model.attention import StepInputs
from .model.open import CausalModel
from .outputs import TokenLogprobs
from .sampler import Sampler, SamplingRow, choose, token_logprobs
from .speculation.proposer import Guesses, Proposer
from .speculation.verify import accepted_tokens, num_agreeing
from .step_inputs import Run, step_inputs
from .step_plan import ScheduledRow, StepPlan


@dataclass(slots=True)
class StepResult:
    """What a step drew, by sequence.

    Attributes:
        tokens: as many as the row asked for, or the guesses that stood and one behind them.
        logprobs: beside them, where the request asks for logprobs.
        prompt_logprobs: (position, logprobs) of prompt tokens that this step could score.
        num_guesses: that were checked.
    """

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs | None]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[tuple[int, TokenLogprobs]]] = field(default_factory=dict)
    num_guesses: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _GuessedRow:
    """A row of a step with its guesses."""

    row: ScheduledRow
    guesses: Guesses | None

    @property
    def guessed(self) -> tuple[int, ...]:
        return () if self.guesses is None else self.guesses.token_ids

    @property
    def token_ids(self) -> Sequence[int]:
        return [*self.row.token_ids, *self.guessed] if self.guessed else self.row.token_ids


class ModelRunner:
    """Owns the model, its KV cache and the sampler."""

    def __init__(
        self,
        decoder: CausalModel,
        cache: KvCache,
        device: torch.device,
        dtype: torch.dtype,
        eos_token_ids: frozenset[int],
        proposer: Proposer | None = None,
        *,
        by_rejection: bool = False,
    ) -> None:
        self.decoder = decoder
        self.cache = cache
        self._device = device
        self._dtype = dtype
        self._eos_token_ids = eos_token_ids
        self._sampler = Sampler()
        self._proposer = proposer
        self._by_rejection = by_rejection

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""
        self.cache.copy_blocks(plan.block_copies)
        guesses: Mapping[str, Guesses] = {}
        if self._proposer is not None:
            self._proposer.copy_blocks(plan.block_copies)
            guesses = self._proposer.propose(plan.rows, self._draw_of)
        runs = [_GuessedRow(row, guesses.get(row.sequence_id)) for row in plan.rows]
        hidden = self.decoder.forward(self._inputs(runs), self.cache.layers)
        result = StepResult()
        self._score_prompts(runs, hidden, result)
        self._draw(runs, hidden, result)
        return result

    @torch.inference_mode()
    def score(
        self,
        start: int,
        token_ids: Sequence[int],
        block_ids: Sequence[int],
        lora: str | None = None,
    ) -> torch.Tensor:
        """Scores after each of `token_ids`, float32 [tokens, vocab], of a sequence from `start` on.

        `block_ids` are blocks that the caller has taken for this.
        """
        adapters = rows_by_adapter([(lora, len(token_ids))], self._device)
        inputs = replace(self._inputs_of([(start, token_ids, block_ids)]), adapters=adapters)
        return self.decoder.logits(self.decoder.forward(inputs, self.cache.layers))

    def _inputs(self, runs: Sequence[_GuessedRow]) -> StepInputs:
        inputs = self._inputs_of([(r.row.start, r.token_ids, r.row.block_ids) for r in runs])
        loras = [(run.row.lora, len(run.token_ids)) for run in runs]
        return replace(inputs, adapters=rows_by_adapter(loras, self._device))

    def _inputs_of(self, runs: Sequence[Run]) -> StepInputs:
        return step_inputs(runs, self.cache.block_size, self._device, self._dtype)

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _draw(self, runs: Sequence[_GuessedRow], hidden: torch.Tensor, result: StepResult) -> None:
        ends: list[int] = []
        draws: list[SamplingRow] = []
        spans: list[tuple[_GuessedRow, slice]] = []
        end = 0
        for run in runs:
            row, end = run.row, end + len(run.token_ids)
            first = len(ends)
            for sample in range(row.num_samples):
                for count in range(len(run.guessed) + 1):
                    ends.append(end - 1 - len(run.guessed) + count)
                    draws.append(self._draw_of(row, run.guessed[:count], row.seed + sample))
            if row.num_samples:
                spans.append((run, slice(first, len(ends))))
        if not draws:
            return
        logits = self.decoder.logits(hidden.index_select(0, self._tensor(ends)))
        if self._by_rejection:
            chosen = [self._by_rejecting(run, logits[span], draws[span]) for run, span in spans]
        else:
            tokens, logprobs = self._sampler.draw(logits, draws)
            chosen = []
            for run, span in spans:
                kept = span
                if run.guesses is not None:
                    count = num_agreeing(run.guessed, tokens[span]) + 1
                    kept = slice(span.start, span.start + count)
                chosen.append((tokens[kept], logprobs[kept]))
        for (run, _), (drawn, scored) in zip(spans, chosen, strict=True):
            name = run.row.sequence_id
            result.tokens[name], result.logprobs[name] = drawn, scored
            if run.guesses is not None:
                result.num_guesses[name] = len(run.guessed)

    def _by_rejecting(
        self, run: _GuessedRow, logits: torch.Tensor, draws: Sequence[SamplingRow]
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        """The guesses of a row that stand and the token behind them, or its samples; their logprobs."""
        target = self._sampler.distributions(logits, draws)
        if run.guesses is None:
            pairs = zip(target, draws, strict=True)
            drawn = [choose(by, draw.seed, len(draw.history)) for by, draw in pairs]
        else:
            drawn = accepted_tokens(target, run.guesses, run.row.seed, len(run.row.history))
        wanted = run.row.params.logprobs
        if wanted is None:
            return drawn, [None] * len(drawn)
        return drawn, [token_logprobs(logits[i], token, wanted) for i, token in enumerate(drawn)]

    def _draw_of(
        self, row: ScheduledRow, guessed: Sequence[int] = (), seed: int | None = None
    ) -> SamplingRow:
        """How the token behind a row and some guesses is drawn."""
        history = [*row.history, *guessed] if guessed else row.history
        num_output = len(history) - row.num_prompt_tokens
        barred: frozenset[int] = frozenset()
        endings: frozenset[int] = frozenset()
        if num_output < row.params.min_tokens:
            barred = frozenset(row.params.stop_token_ids)
            if not row.params.ignore_eos:
                barred |= self._eos_token_ids
        if row.params.token_mask is not None:
            endings = self._eos_token_ids.union(row.params.stop_token_ids)
        own = row.seed if seed is None else seed
        return SamplingRow(row.params, own, history, row.num_prompt_tokens, barred, endings)

    def _score_prompts(
        self, runs: Sequence[_GuessedRow], hidden: torch.Tensor, result: StepResult
    ) -> None:
        begin = 0
        for run in runs:
            row, wanted = run.row, run.row.params.prompt_logprobs
            # The row at position p scores the token at p + 1, which must be part of the prompt.
            count = min(row.end, row.num_prompt_tokens - 1) - row.start
            if wanted is not None and count > 0:
                logits = self.decoder.logits(hidden[begin : begin + count])
                result.prompt_logprobs[row.sequence_id] = [
                    (position + 1, token_logprobs(scores, row.tokens[position + 1], wanted))
                    for position, scores in zip(
                        range(row.start, row.start + count), logits, strict=True
                    )
                ]
            begin += len(run.token_ids)

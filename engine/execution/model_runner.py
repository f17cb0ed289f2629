"""Carries out a step plan: tensors in, the decoder, logits of the rows that need them, tokens out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate

import torch

from ..base.transfer import packed
from ..cache.kv_cache import KvCache
from ..cache.step_inputs import Run, step_inputs
from ..model.layers.attention import StepInputs
from ..model.lora.bank import rows_by_adapter
from ..model.open import CausalModel
from ..sampling.logprobs import WantedLogprobs, logprobs_of
from ..sampling.row import SamplingRow
from ..sampling.sampler import Draw, Sampler
from ..scheduling.outputs import TokenLogprobs
from ..scheduling.step_plan import ScheduledRow, StepPlan
from ..speculation.proposer import Guesses, Proposer
from ..speculation.verify import Chain, accepted_tokens
from .guessed_row import GuessedRow
from .step_graphs import StepGraphs


@dataclass(slots=True)
class StepResult:
    """What a step drew, by sequence.

    Attributes:
        tokens: as many as the row asked for, or the guesses that stood and one behind them.
        logprobs: beside them, where the request asks for logprobs.
        prompt_logprobs: (position, logprobs) of prompt tokens that this step could score.
        num_guesses: that were checked.
        guess_depths: how far those reached.
    """

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs | None]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[tuple[int, TokenLogprobs]]] = field(default_factory=dict)
    num_guesses: dict[str, int] = field(default_factory=dict)
    guess_depths: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Promised:
    """Tokens of the step before, int64 on the device, and where each sequence's first one lies."""

    tokens: torch.Tensor
    places: Mapping[str, int]

    def fill_in(self, token_ids: torch.Tensor, runs: Sequence[GuessedRow]) -> None:
        """Put them at the ends of rows in `token_ids` [tokens] that the host does not know."""
        ends = [run.begin + run.row.num_tokens - 1 for run in runs]
        places = [self.places[run.row.sequence_id] for run in runs]
        to, source = packed([ends, places], token_ids.device)
        token_ids.index_copy_(0, to, self.tokens.index_select(0, source))


def _drawn(runs: Sequence[GuessedRow], draw: Draw | None, result: StepResult) -> StepResult:
    """Wait for the tokens of rows, and put them into `result`."""
    if draw is not None:
        tokens, logprobs = draw.result()
        begin = 0
        for run in runs:
            name, end = run.row.sequence_id, begin + run.row.num_samples
            result.tokens[name], result.logprobs[name] = tokens[begin:end], logprobs[begin:end]
            begin = end
    return result


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
        graphs: StepGraphs,
        by_rejection: bool = False,
    ) -> None:
        self.decoder = decoder
        self.cache = cache
        self._device = device
        self._dtype = dtype
        self._eos_token_ids = eos_token_ids
        self._sampler = Sampler()
        self._proposer = proposer
        self._graphs = graphs
        self._by_rejection = by_rejection
        self._promised: _Promised | None = None

    def capture_graphs(self) -> None:
        """Capture the steps that graphs repeat, before the first of them is asked for."""
        self._graphs.capture_all(() if self._proposer is None else self._proposer.taps)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""
        return self.launch(plan)()

    def must_know(self, plan: StepPlan) -> bool:
        """Whether a step looks at tokens on the host that the one before has not given there yet."""
        guesses = self._proposer is not None
        return any(
            row.is_unknown and (guesses or (row.num_samples > 0 and row.params.reads_tokens))
            for row in plan.rows
        )

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begin a step; what is returned waits for its tokens.

        Those that the step before draws need not be known on the host, unless it `must_know` them.
        """
        for cache in (self.cache, *(() if self._proposer is None else self._proposer.caches)):
            cache.copy(plan.copies)
        guesses: Mapping[str, Guesses] = {}
        if self._proposer is not None:
            guesses = self._proposer.propose(plan.rows, self._draw_of)
        runs: list[GuessedRow] = []
        begin = 0
        for row in plan.rows:
            runs.append(GuessedRow(row, begin, guesses.get(row.sequence_id)))
            begin += runs[-1].num_tokens
        hidden = self._graphs.forward(self._inputs(runs))
        result = StepResult()
        self._score_prompts(runs, hidden, result)
        drawing = [run for run in runs if run.row.num_samples]
        if self._proposer is None:
            return partial(_drawn, drawing, self._begin_draw(drawing, hidden), result)
        self._draw(drawing, hidden)
        for run in runs:
            name = run.row.sequence_id
            if run.row.num_samples:
                result.tokens[name], result.logprobs[name] = run.drawn, run.scored
            if run.guesses is not None:
                result.num_guesses[name] = len(run.guessed)
                result.guess_depths[name] = run.guesses.tree.depth
        self.cache.copy_slots([move for run in runs for move in self._moves(run)])
        self._proposer.see([run.seen(hidden) for run in runs])
        return lambda: result

    @torch.inference_mode()
    def score(
        self,
        start: int,
        token_ids: Sequence[int],
        block_ids: Sequence[int],
        lora: str | None = None,
    ) -> torch.Tensor:
        """Scores after each of `token_ids`, float32 [tokens, vocab]; arguments as of `hidden`."""
        return self.decoder.logits(self.hidden(start, token_ids, block_ids, lora))

    @torch.inference_mode()
    def hidden(
        self,
        start: int,
        token_ids: Sequence[int],
        block_ids: Sequence[int],
        lora: str | None = None,
    ) -> torch.Tensor:
        """Final normed states of `token_ids`, [tokens, hidden], of a sequence from `start` on.

        `block_ids` are blocks that the caller has taken for this.
        """
        adapters = rows_by_adapter([(lora, len(token_ids))], self._device)
        inputs = replace(self._inputs_of([Run(start, token_ids, block_ids)]), adapters=adapters)
        return self.decoder.forward(inputs, self.cache.layers)

    def _inputs(self, runs: Sequence[GuessedRow]) -> StepInputs:
        inputs = self._inputs_of([run.run for run in runs])
        if unknown := [run for run in runs if run.row.is_unknown]:
            assert self._promised is not None
            self._promised.fill_in(inputs.token_ids, unknown)
        loras = [(run.row.lora, run.num_tokens) for run in runs]
        taps = () if self._proposer is None else self._proposer.taps
        return replace(inputs, adapters=rows_by_adapter(loras, self._device), taps=taps)

    def _inputs_of(self, runs: Sequence[Run]) -> StepInputs:
        return step_inputs(runs, self.cache.block_size, self._device, self._dtype)

    def _logits(self, runs: Sequence[GuessedRow], hidden: torch.Tensor) -> torch.Tensor:
        """Scores behind the `ends` of some rows, float32 [ends, vocab]."""
        (ends,) = packed([[end for run in runs for end in run.ends]], self._device)
        return self.decoder.logits(hidden.index_select(0, ends))

    def _begin_draw(self, runs: Sequence[GuessedRow], hidden: torch.Tensor) -> Draw | None:
        """Draw behind each row, where nobody guesses."""
        self._promised = None
        if not runs:
            return None
        draws = [own for run in runs for own in self._draws_of(run.row)]
        draw = self._sampler.begin(self._logits(runs, hidden), draws)
        counts = accumulate((run.row.num_samples for run in runs), initial=0)
        names = (run.row.sequence_id for run in runs)
        self._promised = _Promised(draw.tokens, dict(zip(names, counts, strict=False)))
        return draw

    def _draw(self, runs: Sequence[GuessedRow], hidden: torch.Tensor) -> None:
        """Draw behind each row, and behind its guesses for as long as they are what is drawn."""
        if not runs:
            return
        logits = self._logits(runs, hidden)
        going = list(zip(runs, logits.split([len(run.ends) for run in runs]), strict=True))
        if self._by_rejection:
            self._reject(runs, logits)
            return
        while going:
            draws: list[SamplingRow] = []
            scores: list[torch.Tensor] = []
            for run, own in going:
                at = run.kept[-1] + 1 if run.kept else 0
                scores.append(own[at : at + run.row.num_samples])
                draws += self._draws_of(run.row, run.path)
            picked = logits if len(draws) == len(logits) else torch.cat(scores)
            tokens, logprobs = self._sampler.draw(picked, draws)
            begin = 0
            for run, _ in going:
                end = begin + run.row.num_samples
                run.drawn += tokens[begin:end]
                run.scored += logprobs[begin:end]
                begin = end
            going = [(run, own) for run, own in going if run.follow()]

    def _reject(self, runs: Sequence[GuessedRow], logits: torch.Tensor) -> None:
        """The guesses of rows that stand and the tokens behind them, or their samples; their logprobs.

        `logits` [draws, vocab] are those behind each row and its guesses.
        """
        draws: list[SamplingRow] = []
        for run in runs:
            if run.guesses is None:
                draws += self._draws_of(run.row)
            else:
                counts = range(len(run.guessed) + 1)
                draws += [self._draw_of(run.row, run.guessed[:count]) for count in counts]
        target = self._sampler.distributions(logits, draws)
        chains: list[Chain] = []
        begins: list[int] = []
        begin = 0
        for run in runs:
            length = len(run.guessed) + 1
            for _ in range(run.row.num_samples):
                own = draws[begin]
                chain = Chain(target[begin : begin + length], run.guesses, own.seed, own.position)
                chains.append(chain)
                begins.append(begin)
                begin += length
        answers = accepted_tokens(chains, self._sampler)
        places = [at + i for at, own in zip(begins, answers, strict=True) for i in range(len(own))]
        tokens = [token for own in answers for token in own]
        at, ids = packed([places, tokens], self._device)
        picked = logits if len(places) == len(logits) else logits.index_select(0, at)
        wanted = WantedLogprobs(picked, ids, [draws[place] for place in places])
        scored = iter(wanted.result())
        drawn = iter(answers)
        for run in runs:
            for _ in range(run.row.num_samples):
                run.drawn += next(drawn)
            run.scored = [next(scored) for _ in run.drawn]
            if run.guesses is not None:
                run.kept = list(range(len(run.drawn) - 1))

    def _moves(self, run: GuessedRow) -> list[tuple[int, int]]:
        """Slots of the cache from and to which the guesses that stand must go."""
        size, blocks = self.cache.block_size, run.row.block_ids
        return [
            (
                blocks[source // size] * size + source % size,
                blocks[place // size] * size + place % size,
            )
            for source, place in run.moves()
        ]

    def _draws_of(self, row: ScheduledRow, guessed: Sequence[int] = ()) -> list[SamplingRow]:
        """One for each of the row's samples."""
        return [self._draw_of(row, guessed, row.seed + i) for i in range(row.num_samples)]

    def _draw_of(
        self, row: ScheduledRow, guessed: Sequence[int] = (), seed: int | None = None
    ) -> SamplingRow:
        """How the token behind a row and some guesses is drawn."""
        num_output = row.end + len(guessed) - row.num_prompt_tokens
        barred: frozenset[int] = frozenset()
        endings: frozenset[int] = frozenset()
        if num_output < row.params.min_tokens:
            barred = frozenset(row.params.stop_token_ids)
            if not row.params.ignore_eos:
                barred |= self._eos_token_ids
        if row.params.token_mask is not None:
            endings = self._eos_token_ids.union(row.params.stop_token_ids)
        own = row.seed if seed is None else seed
        known = row.history
        return SamplingRow(row.params, own, known, row.num_prompt_tokens, barred, endings, guessed)

    def _score_prompts(
        self, runs: Sequence[GuessedRow], hidden: torch.Tensor, result: StepResult
    ) -> None:
        for run in runs:
            row, begin, wanted = run.row, run.begin, run.row.params.prompt_logprobs
            if wanted is None:
                continue
            # The row at position p scores the token at p + 1, which must be part of the prompt.
            count = min(row.end, row.num_prompt_tokens - 1) - row.start
            if count > 0:
                logits = self.decoder.logits(hidden[begin : begin + count])
                places = range(row.start + 1, row.start + count + 1)
                scored = logprobs_of(logits, [row.tokens[place] for place in places], wanted)
                result.prompt_logprobs[row.sequence_id] = list(zip(places, scored, strict=True))

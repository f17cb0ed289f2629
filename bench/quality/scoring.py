"""Streamed scoring: prefill in steps shared by windows, logits in slices, scores reduced as they come.

The model and its reference run the same steps, so that their slices meet. At any time the memory besides
weights and KV cache is the hidden states of one step and `SCORING_BYTES` of logits, whatever the vocabulary
and the number of tokens.

A slice is reduced on the device, in blocks that fit the CPU's cache. With a reference p and a model q:
KL(p ‖ q) = Σ p·(ln p − ln q), from the logits r and a with one exp each:
Σ e·(r − a) / Σ e + ln Σ exp(a) − ln Σ exp(r), where e = exp(r − max r).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

import numpy as np
import torch

from ...base.errors import BadInput
from ...base.progress import Progress, Silent
from ...engine.execution.prompt_pass import PromptPass, Span, plan_steps
from ...engine.sampling.sampler import SLICE_BYTES, rows_per_slice
from .passage import Passage, PassageWindow
from .positions import SCORES, PositionScores, QualitySeries, SeriesWriter

# Logits of a model and of its reference, and the LM head's memory to make them.
SCORING_BYTES = 3 * SLICE_BYTES
# The prompt of the prefill rate that is reported next to the rate of scoring; tokens scored between prefills.
PREFILL_TOKENS = 512
TOKENS_BETWEEN_PREFILLS = 16384
# Logits of a block of rows: about the size of an L2 cache.
BLOCK_BYTES = 2 << 20


Scorer = Callable[[], PromptPass]
"""Opens a pass over prompts of a model."""


@dataclass(slots=True)
class ScoringSpeed:
    """Times of scoring and, in between, of plain prefill of the same models; `prefills` are (tokens, seconds)
    of each model."""

    num_scored: int = 0
    num_computed: int = 0
    seconds: float = 0.0
    prefills: list[tuple[int, float]] = field(default_factory=list)

    def as_dict(self) -> dict[str, float | None]:
        """Rates in tokens per second. `share_of_prefill_rate` is the time that the models need to prefill the
        computed tokens, as a share of the time that scoring took."""
        rates = [tokens / seconds for tokens, seconds in self.prefills]
        computed = self.num_computed / self.seconds
        return {
            "scored_tokens_per_second": self.num_scored / self.seconds,
            "computed_tokens_per_second": computed,
            "prefill_tokens_per_second": rates[0],
            "reference_prefill_tokens_per_second": rates[1] if len(rates) > 1 else None,
            "share_of_prefill_rate": computed * sum(1 / rate for rate in rates),
            "seconds": self.seconds,
        }


def score_passage(
    passage: Passage,
    model: Scorer,
    reference: Scorer | None = None,
    *,
    progress: Progress | None = None,
    what: str = "model",
) -> tuple[QualitySeries, ScoringSpeed]:
    """Score every position of a passage, and time it. Raises BadInput: a window does not fit a model, the
    vocabularies differ, or logits are not numbers."""
    speed = ScoringSpeed(passage.num_scored)
    named: dict[str, Any] = {"progress": progress, "what": what, "speed": speed}
    (series,) = score_models(passage, [model], reference, **named)
    return series, speed


def score_models(
    passage: Passage,
    models: Sequence[Scorer],
    reference: Scorer | None = None,
    *,
    progress: Progress | None = None,
    what: str = "model",
    speed: ScoringSpeed | None = None,
) -> list[QualitySeries]:
    """Score every position with each of several models, or one without reference: the reference is computed
    once. Times go to `speed`. Raises BadInput: as `score_passage`."""
    progress = progress or Silent()
    progress.start(f"quality of the {what}", passage.num_scored, "tokens")
    try:
        with ExitStack() as stack:
            scorers = [*models] if reference is None else [*models, reference]
            passes = [stack.enter_context(scorer()) for scorer in scorers]
            for prompts in passes:
                prompts.check_fits(passage.longest - 1)
            writers = [stack.enter_context(SeriesWriter()) for _ in models]
            sample = passage.windows[0].token_ids
            prefills = [_Prefill(prompts, sample) for prompts in passes if speed is not None]
            for first, windows in _groups(passage.windows):
                for prefill in prefills:
                    prefill.run()
                begun = time.perf_counter()
                steps = list(plan_windows(windows, passes))
                for scored in _score_windows(first, windows, steps, passes):
                    for writer, scores in zip(writers, scored, strict=True):
                        writer.add(scores)
                    progress.advance(len(scored[0]))
                if speed is not None:
                    speed.num_computed += sum(
                        span.end - span.begin for step in steps for span in step
                    )
                    speed.seconds += time.perf_counter() - begun
            for prefill in prefills:
                prefill.run()
            if speed is not None:
                speed.prefills += [(prefill.num_tokens, prefill.seconds) for prefill in prefills]
            return [writer.finish() for writer in writers]
    finally:
        progress.finish()


def _groups(windows: Sequence[PassageWindow]) -> Iterator[tuple[int, Sequence[PassageWindow]]]:
    """Consecutive windows of about `TOKENS_BETWEEN_PREFILLS` tokens, and the index of the first."""
    begin = num_tokens = 0
    for index, window in enumerate(windows):
        num_tokens += len(window.token_ids)
        if num_tokens >= TOKENS_BETWEEN_PREFILLS:
            yield begin, windows[begin : index + 1]
            begin, num_tokens = index + 1, 0
    if begin < len(windows):
        yield begin, windows[begin:]


class _Prefill:
    """Timed prefill of one prompt, without logits; the first time is not counted."""

    def __init__(self, prompts: PromptPass, sample: Sequence[int]) -> None:
        length = min(PREFILL_TOKENS, prompts.max_model_len, prompts.num_free_tokens)
        self._prompts = prompts
        self._prompt = (list(sample) * (length // len(sample) + 1))[:length]
        self.num_tokens, self.seconds = 0, 0.0
        self._compute()

    def run(self) -> None:
        begun = time.perf_counter()
        self._compute()
        self.seconds += time.perf_counter() - begun
        self.num_tokens += len(self._prompt)

    def _compute(self) -> None:
        for step in plan_steps([len(self._prompt)], [self._prompts]):
            hidden = self._prompts.hidden(step, [self._prompt])
            hidden[-1, 0].item()  # waits for the device


def plan_windows(
    windows: Sequence[PassageWindow], passes: Sequence[PromptPass]
) -> Iterator[list[Span]]:
    """The steps of the windows, whose last tokens predict nothing. A window shares its first tokens with the
    one before it, up to the token that predicts its first score."""
    shared = [0]
    for before, window in pairwise(windows):
        unscored = window.token_ids[: window.first_scored - 1]
        pairs = zip(before.token_ids[:-1], unscored, strict=False)
        shared.append(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
    lengths = [len(window.token_ids) - 1 for window in windows]
    return plan_steps(lengths, passes, shared)


def _score_windows(
    first: int,
    windows: Sequence[PassageWindow],
    steps: Iterable[Sequence[Span]],
    passes: Sequence[PromptPass],
) -> Iterator[list[PositionScores]]:
    """Scores of each model, step by step; `first` is the number of the first window."""
    prompts = [window.token_ids[:-1] for window in windows]
    for step in steps:
        hidden = [prompts_of.hidden(step, prompts) for prompts_of in passes]
        places = _scored_positions(step, windows)
        if places.rows:
            yield _step_scores(first, windows, places, passes, hidden)


@dataclass(slots=True)
class _ScoredPositions:
    """The scored positions of a step: row of its hidden states, window, index of the token, and the token."""

    rows: list[int] = field(default_factory=list)
    windows: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


def _scored_positions(step: Sequence[Span], windows: Sequence[PassageWindow]) -> _ScoredPositions:
    places, offset = _ScoredPositions(), 0
    for prompt, begin, end, _ in step:
        # The row of position p scores the token at p + 1.
        scored = range(max(windows[prompt].first_scored, begin + 1), end + 1)
        places.rows += range(offset + scored.start - 1 - begin, offset + scored.stop - 1 - begin)
        places.windows += [prompt] * len(scored)
        places.positions += scored
        window = windows[prompt]
        places.token_ids += window.token_ids[scored.start : scored.stop]
        if window.alternatives and end == len(window.token_ids) - 1:
            count = len(window.alternatives)
            places.rows += [offset + end - 1 - begin] * count
            places.windows += [prompt] * count
            places.positions += [end] * count
            places.token_ids += window.alternatives
        offset += end - begin
    return places


def _step_scores(
    first: int,
    windows: Sequence[PassageWindow],
    places: _ScoredPositions,
    passes: Sequence[PromptPass],
    hidden: Sequence[torch.Tensor],
) -> list[PositionScores]:
    device = hidden[0].device
    rows = torch.tensor(places.rows, device=device)
    ids = torch.tensor(places.token_ids, device=device)
    size = min(rows_per_slice(prompts.vocab_size) for prompts in passes)
    parts = [
        _slice_scores(passes, [of_pass.index_select(0, part) for of_pass in hidden], ids_of_part)
        for part, ids_of_part in zip(rows.split(size), ids.split(size), strict=True)
    ]
    tables = [torch.cat(scored).T.cpu().numpy() for scored in zip(*parts, strict=True)]
    if (wrong := np.isnan(tables).any(axis=(0, 1))).any():
        where = int(wrong.argmax())
        raise BadInput(
            f"the logits at position {places.positions[where]} of window {first + places.windows[where]} "
            "are not numbers: the model or its dtype overflows"
        )
    return [
        PositionScores(
            document=np.array([windows[window].document for window in places.windows]),
            window=np.array(places.windows) + first,
            position=np.array(places.positions),
            token_id=np.array(places.token_ids),
            **dict(zip(SCORES, table, strict=False)),
        )
        for table in tables
    ]


def _slice_scores(
    passes: Sequence[PromptPass], states: Sequence[torch.Tensor], ids: torch.Tensor
) -> list[torch.Tensor]:
    """Scores of each model, [rows, scores]; logits of one model and of the reference are alive."""
    num_models = max(1, len(passes) - 1)
    reference = [p.logits(states[-1]) for p in passes[num_models:]]
    pairs = zip(passes[:num_models], states, strict=False)
    return [reduce_slice(p.logits(of_pass), ids, *reference) for p, of_pass in pairs]


class _Row(NamedTuple):
    """Statistics per row of logits, each [rows, 1]."""

    peak: torch.Tensor
    top: torch.Tensor
    log_sum: torch.Tensor
    rank: torch.Tensor
    nll: torch.Tensor


@torch.inference_mode()
def reduce_slice(
    logits: torch.Tensor, token_ids: torch.Tensor, reference: torch.Tensor | None = None
) -> torch.Tensor:
    """Scores per row, float64 [rows, 2]: NLL and rank of the token; with a reference [rows, 7]: also the
    reference's NLL and rank, KL in nats, whether the likeliest tokens agree, and the probability that the
    reference gives its likeliest.

    Args:
        logits: float32 [rows, vocab]; overwritten.
        token_ids: int64 [rows], on the same device.
        reference: float32 [rows, vocab], of the reference model.

    Raises:
        BadInput: the vocabularies differ.
    """
    if reference is not None and reference.shape != logits.shape:
        raise BadInput(
            f"the reference has {reference.shape[-1]} tokens in its vocabulary and the model "
            f"{logits.shape[-1]}: their distributions cannot be compared"
        )
    num_rows, vocab_size = logits.shape
    block = num_rows
    if logits.device.type == "cpu":
        block = max(1, min(num_rows, BLOCK_BYTES // (4 * vocab_size)))
    scratch = logits.new_empty((block, vocab_size))
    parts = []
    for begin in range(0, num_rows, block):
        rows = slice(begin, begin + block)
        ids = token_ids[rows, None]
        other = None if reference is None else reference[rows]
        parts.append(_reduce(logits[rows], ids, other, scratch[: len(ids)]))
    return torch.cat(parts)


def _reduce(
    logits: torch.Tensor,
    ids: torch.Tensor,
    reference: torch.Tensor | None,
    scratch: torch.Tensor,
) -> torch.Tensor:
    model, _ = _statistics(logits, ids, scratch)
    if reference is None:
        return torch.cat([model.nll, model.rank.double()], dim=1)
    other, total = _statistics(reference, ids, scratch)
    # `scratch` has exp(reference − peak) now, and the model's logits are no longer needed.
    difference = torch.sub(reference, logits, out=logits)
    mean = torch.linalg.vecdot(scratch, difference)[:, None].double() / total
    kl = mean - (other.peak - model.peak).double() + (model.log_sum - other.log_sum)
    agree = (model.top == other.top).double()
    confidence = (-other.log_sum).exp()
    columns = [model.nll, model.rank, other.nll, other.rank, kl.clamp_min(0), agree, confidence]
    return torch.cat([column.double() for column in columns], dim=1)


def _statistics(
    logits: torch.Tensor, ids: torch.Tensor, scratch: torch.Tensor
) -> tuple[_Row, torch.Tensor]:
    """Statistics of each row, and Σ exp(logits − max), float64 [rows, 1]; its terms are left in `scratch`."""
    if logits.device.type == "cpu":  # numpy's argmax is vectorized: ten times as fast as torch's
        top = torch.from_numpy(logits.numpy().argmax(axis=-1))[:, None]
    else:
        top = logits.argmax(dim=-1, keepdim=True)
    peak = logits.gather(-1, top)
    actual = logits.gather(-1, ids)
    rank = torch.gt(logits, actual, out=scratch).sum(dim=-1, keepdim=True) + 1
    terms = torch.sub(logits, peak, out=scratch).exp_()
    total = terms.sum(dim=-1, keepdim=True).double()
    log_sum = total.log()
    # In float64: the difference of two large logits is exact, and the likeliest token keeps its small NLL.
    nll = log_sum - (actual.double() - peak.double())
    return _Row(peak.double(), top, log_sum, rank, nll), total

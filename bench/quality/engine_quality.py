"""Perplexity of the measured engine, and its KL divergence from a reference model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...quant.base.progress import Progress
from ..load.inprocess import WithAdapter
from ..options.options import BenchOptions
from .quality import EVALUATION_TEXT, PromptScorer, log_probabilities, read_passage, score

if TYPE_CHECKING:
    from ...engine.engine import Engine


def score_quality(
    options: BenchOptions,
    engine: Engine,
    load_reference: Callable[[BenchOptions], PromptScorer],
    progress: Progress,
) -> dict[str, Any]:
    """`llmopt.quality`: perplexity and, with a reference, KL divergence and top-1 agreement. The reference is
    loaded after the model has been scored."""
    passage = read_passage(
        engine.tokenizer,
        max_model_len=engine.max_model_len,
        num_tokens=options.quality_tokens,
        path=options.quality_text or EVALUATION_TEXT,
    )
    scored = WithAdapter(engine, next(iter(options.loras), None))
    ours = log_probabilities(scored, passage, progress=progress, what=options.name or "model")
    if options.reference is None:
        return score(passage, ours).as_dict()
    reference = load_reference(options)
    theirs = log_probabilities(reference, passage, progress=progress, what="reference")
    return score(passage, ours, theirs, options.reference).as_dict()

"""Quality of the measured engine: perplexity, and its distance from a reference model, per position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ...quant.base.progress import Progress
from ..load.inprocess import WithAdapter
from ..options.options import BenchOptions
from ..quality.hurt_passages import hurt_passages
from ..quality.passage import Passage
from ..quality.positions import QualitySeries
from ..quality.protocols import EVALUATION_TEXT, ProtocolOptions, read_passage
from ..quality.summary import Quality, summarize

if TYPE_CHECKING:
    from ...engine.engine import Engine
    from ..quality.scoring import PromptScorer


def quality_passage(options: BenchOptions, engine: Engine) -> Passage:
    """The passage that the options name, in the engine's tokens.

    Raises:
        BadInput: the text or the protocol does not fit.
    """
    return read_passage(
        engine.tokenizer,
        max_model_len=engine.max_model_len,
        num_tokens=options.quality_tokens,
        path=options.quality_text or EVALUATION_TEXT,
        options=ProtocolOptions(
            options.quality_protocol, options.quality_window, options.quality_stride
        ),
    )


def score_quality(
    options: BenchOptions,
    engine: Engine,
    passage: Passage,
    load_reference: Callable[[BenchOptions, Passage], PromptScorer],
    progress: Progress,
) -> tuple[Quality, QualitySeries]:
    """Score the engine, beside the reference if there is one: the summary and its series.

    Raises:
        BadInput: the reference does not fit.
    """
    from ..quality.scoring import score_passage

    reference = None if options.reference is None else load_reference(options, passage)
    scored = WithAdapter(engine, next(iter(options.loras), None))
    series, speed = score_passage(
        passage, scored, reference, progress=progress, what=options.name or "model"
    )
    quality = summarize(
        passage, series, reference=options.reference, speed=speed.as_dict(), seed=options.seed
    )
    return replace(quality, hurt=hurt_passages(series, engine.tokenizer)), series

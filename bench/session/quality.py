"""Quality of the measured model: of an engine from its logits, of a server from prompt log-probabilities.

Both are scored with a reference of their kind, if there is one: a model of this process, or a server.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from ...base.errors import BadInput
from ...base.progress import Progress
from ...quant.source.models import resolve_model
from ...quant.stream.sources import is_bundled
from ..load.address import Address, ServedModel, find_served
from ..load.json_http import (
    NoPromptLogprobs,
    PromptLogprobs,
    RequestFailed,
    ScoredToken,
    probe_prompt,
)
from ..options.options import DEFAULT_CONCURRENCY, BenchOptions
from ..quality.depth import by_depth, depth_label, depth_passage
from ..quality.domains import FullPassage
from ..quality.passage import EVALUATION_TEXT, Passage, PassageWindow, ProtocolOptions, read_passage
from ..quality.positions import PositionScores, QualitySeries, SeriesWriter
from ..quality.summary import distance, summarize, truncated_kl
from .tasks import encode_pair

if TYPE_CHECKING:
    from ...engine.core.engine import Engine

_log = logging.getLogger(__name__)

# Sequences per decode step of the reference, which makes none.
SCORING_SEQUENCES = 1
# Scored tokens from which the KL of rounding the KV cache is taken: it is two more passes of the model.
CACHE_TOKENS = 1000


@dataclass(frozen=True, slots=True)
class ScoredQuality:
    """Scores of a model: `llmopt.quality`, the series, and why a server, or its reference, has none."""

    record: dict[str, Any] | None = None
    series: QualitySeries | None = None
    reason: str | None = None


def quality_passage(options: BenchOptions, tokenizer: Any, max_model_len: int) -> Passage:
    """The passage that the options name, in windows. BadInput: text or protocol do not fit."""
    return read_passage(
        tokenizer,
        max_model_len=max_model_len,
        num_tokens=options.quality_tokens,
        path=options.quality_text or EVALUATION_TEXT,
        options=ProtocolOptions(
            options.quality_protocol, options.quality_window, options.quality_stride
        ),
    )


def score_quality(
    options: BenchOptions, engine: Engine, passage: Passage, progress: Progress
) -> ScoredQuality:
    """Score the engine with any reference. BadInput: the text does not fit one of them."""
    from ..quality.scoring import score_models, score_passage

    rounding = None
    full, deep = further_passages(options, engine.tokenizer, engine.max_model_len)
    passages = [passage, *filter(None, (full and full.passage, deep))]
    reference = None
    if options.reference is not None:
        reference = load_reference(options, passages).prompt_pass
    model = partial(engine.prompt_pass, next(iter(options.loras), None))
    named: dict[str, Any] = {"progress": progress, "what": options.name or "model"}
    series, timed = score_passage(passage, model, reference, **named)
    rest = [score_models(part, [model], reference, **named)[0] for part in passages[1:]]
    del reference  # its weights and cache: the caches below have that memory
    if options.reference is not None:
        rounding = _cache_rounding(options, engine, passage, progress)
    quality = summarize(
        passage,
        series,
        reference=options.reference,
        speed=timed.as_dict(),
        seed=options.seed,
        tokenizer=engine.tokenizer,
    )
    record = asdict(quality)
    if full is not None:
        record |= full.summary(rest[0], options.seed)
    if deep is not None:
        record |= depth_parts(deep, rest[-1], options)
    record["kv_cache"] = rounding
    if options.quality_kv:
        record |= kv_parts(options, engine, progress)
    return ScoredQuality(record, series)


def further_passages(
    options: BenchOptions, tokenizer: Any, longest: int
) -> tuple[FullPassage | None, Passage | None]:
    """Passages that are scored with a reference after the quality text, each None if not asked for."""
    deep = None if options.reference is None else deep_passage(options, tokenizer, longest)
    return full_passage(options, tokenizer, longest), deep


def deep_passage(options: BenchOptions, tokenizer: Any, longest: int) -> Passage | None:
    """The documents of `--quality-depth`, of at most `longest` tokens; None without."""
    if not options.quality_depth:
        return None
    return depth_passage(
        tokenizer,
        min(longest, max(options.quality_depth)),
        documents=options.quality_documents,
        seed=options.seed,
        path=options.quality_text,
    )


def check_depths(options: BenchOptions, max_model_len: int) -> None:
    """Raise BadInput for a depth beyond the context of the model."""
    if options.quality_depth and (deepest := max(options.quality_depth)) > max_model_len:
        raise BadInput(
            f"--quality-depth {depth_label(deepest)} exceeds the context of {max_model_len:,} tokens: name "
            "smaller depths, or raise --max-model-len"
        )


def depth_parts(passage: Passage, series: QualitySeries, options: BenchOptions) -> dict[str, Any]:
    """`depth` of the record: distances by depth; and `depth_text`."""
    return {
        "depth": by_depth(series, options.quality_depth),
        "depth_text": depth_text(passage),
    }


def depth_text(passage: Passage) -> dict[str, str]:
    text = {"source": passage.source, "description": passage.description}
    return text | {"token_sha256": passage.sha256}


def kv_parts(options: BenchOptions, engine: Engine, progress: Progress) -> dict[str, Any]:
    """`kv` of the record, and `depth_text`: by type of the KV cache the distance by depth of the model on it
    from the same weights on a cache that rounds nothing. Raises BadInput: a type that this device does not
    have, or not enough memory."""
    from ..quality.scoring import score_models

    passage = deep_passage(options, engine.tokenizer, engine.max_model_len)
    assert passage is not None, "--quality-kv needs --quality-depth"
    num_tokens = _cache_tokens(options, engine.device.type, [passage])
    lora, dtypes = next(iter(options.loras), None), options.quality_kv
    *models, exact = (
        partial(engine.prompt_pass_on, dtype, num_tokens, lora) for dtype in (*dtypes, None)
    )
    series = score_models(passage, models, exact, progress=progress, what="KV caches")
    distances = (by_depth(scores, options.quality_depth) for scores in series)
    kv = dict(zip(dtypes, distances, strict=True))
    return {"kv": kv, "depth_text": depth_text(passage)}


def _cache_rounding(
    options: BenchOptions, engine: Engine, passage: Passage, progress: Progress
) -> dict[str, Any] | None:
    """Distance of the model from itself on a KV cache that rounds nothing; None where its own does not round.
    A 16-bit cache next to float32 activations, or one of 8 bits, is a cost of its own: the reference has the
    cache that the engine takes by default, so that a model is at no distance from itself."""
    from ..quality.scoring import score_models

    totals = accumulate(window.num_scored for window in passage.windows)
    count = next((n for n, sum_ in enumerate(totals, 1) if sum_ >= CACHE_TOKENS), None)
    part = replace(passage, windows=passage.windows[:count])
    num_tokens = _cache_tokens(options, engine.device.type, [part])
    lora = next(iter(options.loras), None)
    try:
        exact = engine.unrounded_prompt_pass(num_tokens, lora)
    except BadInput as error:  # the rest of the run is kept
        _log.warning("no KL of rounding the KV cache: %s", error)
        return None
    if exact is None:
        return None
    model = partial(engine.prompt_pass, lora)
    (series,) = score_models(part, [model], lambda: exact, progress=progress, what="KV cache")
    scored = distance(series, np.ones(len(series.needed("kl")), dtype=bool), options.seed)
    computed = str(engine.dtype).removeprefix("torch.")
    return {"dtype": engine.stats.kv_dtype, "computed_in": computed} | (scored or {})


def full_passage(options: BenchOptions, tokenizer: Any, max_model_len: int) -> FullPassage | None:
    """The domains and items that `--quality-full` scores with a reference; None without both."""
    if not options.quality_full or options.reference is None:
        return None
    # A bundled model has read stories alone, and answers of it to anything else are noise.
    is_served = options.base_url is not None
    stories = not is_served and is_bundled(resolve_model(options.reference))
    encode = partial(encode_pair, tokenizer)
    # A server scores the tokens of a prompt, and no others in their place.
    return FullPassage.of(
        tokenizer, encode, max_model_len, stories_only=stories, share=not is_served
    )


def load_reference(options: BenchOptions, passages: Sequence[Passage]) -> Engine:
    """The reference's engine, with KV blocks for two windows. BadInput: not served, or too short."""
    from ...engine.base.device import choose_device
    from ...engine.core.engine import Engine
    from ...engine.planner.cache_size import DEFAULT_BLOCK_SIZE

    kind = choose_device(options.device).type
    block_size = options.block_size or DEFAULT_BLOCK_SIZE[kind]
    num_tokens = _cache_tokens(options, kind, passages)
    config = replace(
        options.engine,
        model=resolve_model(options.reference),
        max_num_seqs=SCORING_SEQUENCES,
        kv_cache_memory_bytes=None,
        num_blocks=-(-num_tokens // block_size),
        cpu_activations=16,
        gpu_memory_utilization=None,
        swap_space_bytes=0,
        kv_cache_dtype="auto",
        window=None,
        attention_sinks=0,
        kv_budget=None,
        kv_eviction=None,
        loras={},
        tensor_parallel_size=1,
        speculation=None,
    )
    return Engine(config)


def _cache_tokens(options: BenchOptions, kind: str, passages: Sequence[Passage]) -> int:
    """Tokens of a KV cache that holds a window, the step after it, and a block for each shorter document."""
    from ...engine.planner.cache_size import DEFAULT_BLOCK_SIZE, DEFAULT_MAX_NUM_BATCHED_TOKENS

    block_size = options.block_size or DEFAULT_BLOCK_SIZE[kind]
    step = options.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS[kind]
    longest = max(passage.longest for passage in passages)
    most = max(len(passage.windows) for passage in passages)
    return longest + 2 * step + block_size * min(step, most)


@dataclass(frozen=True, slots=True)
class ScoringServer:
    name: str
    max_model_len: int
    scoring: PromptLogprobs

    @classmethod
    def at(cls, options: BenchOptions, address: Address, served: ServedModel) -> ScoringServer:
        """Probe a server. Raises NoPromptLogprobs: it scores no prompts."""
        scoring = PromptLogprobs.probed(
            address.json_client(options.request_timeout),
            address.completions_url,
            served.model,
            probe_prompt(served.tokenizer),
            concurrency=options.concurrency or DEFAULT_CONCURRENCY,
        )
        return cls(address.url, served.max_model_len, scoring)

    def scores(self, windows: Sequence[PassageWindow]) -> Iterator[list[ScoredToken]]:
        scored = self.scoring.scores(window.token_ids for window in windows)
        for window, tokens in zip(windows, scored, strict=True):
            yield tokens[window.first_scored - 1 :]


def score_served(
    options: BenchOptions, address: Address, served: ServedModel, progress: Progress
) -> ScoredQuality:
    """Score the server, and any reference; failures are reasons. BadInput: text or protocol misfit."""
    try:
        model = ScoringServer.at(options, address, served)
    except NoPromptLogprobs as error:
        return ScoredQuality(reason=f"no quality: {error}")
    reference, reason = None, None
    if options.reference is not None:
        try:
            at = Address.parse(
                options.reference,
                headers=options.header,
                api_key=options.api_key,
                verify_tls=not options.insecure,
            )
            name = at.listed(options.model)
            shared = {"base_url": options.reference, "model": name, "max_model_len": None}
            its_model = find_served(options.model_copy(update=shared), at)
            reference = ScoringServer.at(options, at, its_model)
        except (NoPromptLogprobs, BadInput) as error:
            reason = f"no distance from the reference {options.reference}: {error}"
    servers = [model] if reference is None else [model, reference]
    limit = min(server.max_model_len for server in servers)
    passage = quality_passage(options, served.tokenizer, limit)
    if passage.longest >= limit:  # leave room for the token that a server generates after a prompt
        passage = quality_passage(options, served.tokenizer, limit - 1)
    try:
        return _scored(options, passage, servers, served, progress, reason)
    except (RequestFailed, NoPromptLogprobs) as error:
        return ScoredQuality(reason=f"no quality: a window was not scored: {error}")
    finally:
        progress.finish()


def _scored(
    options: BenchOptions,
    passage: Passage,
    servers: Sequence[ScoringServer],
    served: ServedModel,
    progress: Progress,
    reason: str | None,
) -> ScoredQuality:
    rests: list[float] = []
    series = _served_series(passage, servers, progress, rests)
    reference = servers[1] if len(servers) > 1 else None
    if reference is not None and not rests:
        reason = (
            f"no KL from the reference {reference.name}: one server names tokens, one their ids"
        )
    quality = summarize(
        passage,
        series,
        reference=None if reference is None else reference.name,
        seed=options.seed,
        tokenizer=served.tokenizer,
    )
    how = {
        "scored_by": servers[0].scoring.form,
        "reference_scored_by": None if reference is None else reference.scoring.form,
        "num_top": min(server.scoring.num_top for server in servers),
        "kl_is_lower_bound": True if rests else None,
        "mean_rest": float(np.mean(rests)) if rests else None,
    }
    record = asdict(quality) | {"served": how}
    longest = min(server.max_model_len for server in servers) - 1
    if reference is None:
        return ScoredQuality(record, series, reason)
    full, deep = further_passages(options, served.tokenizer, longest)
    if full is not None:
        record |= full.summary(_served_series(full.passage, servers, progress, []), options.seed)
    if deep is not None:  # one long prompt at a time: answers hold 20 tokens of each position
        single = [replace(s, scoring=replace(s.scoring, concurrency=1)) for s in servers]
        record |= depth_parts(deep, _served_series(deep, single, progress, []), options)
    return ScoredQuality(record, series, reason)


def _served_series(
    passage: Passage, servers: Sequence[ScoringServer], progress: Progress, rests: list[float]
) -> QualitySeries:
    """The scores of every position; `rests` as in `_columns`."""
    progress.start(f"quality of {servers[0].name}", passage.num_scored, "tokens")
    with SeriesWriter() as writer:
        scored = zip(*(server.scores(passage.windows) for server in servers), strict=True)
        for number, (window, scores) in enumerate(zip(passage.windows, scored, strict=True)):
            columns = _columns(scores, [server.scoring.form for server in servers], rests)
            first, last = window.first_scored, len(window.token_ids)
            writer.add(
                PositionScores(
                    document=np.full(last - first, window.document),
                    window=np.full(last - first, number),
                    position=np.arange(first, last),
                    token_id=np.array(window.token_ids[first:]),
                    **columns,
                )
            )
            progress.advance(last - first)
        return writer.finish()


def _columns(
    scores: Sequence[Sequence[ScoredToken]], forms: Sequence[str], rests: list[float]
) -> dict[str, np.ndarray]:
    """`PositionScores` of a window; the reference's probability outside top tokens goes to `rests`."""
    model, *others = scores
    columns = {"nll": _nll(model)}
    if forms[0] == "prompt_logprobs":
        columns["rank"] = np.array([token.rank for token in model])
    for reference in others:
        columns["reference_nll"] = _nll(reference)
        if forms[1] == "prompt_logprobs":
            columns["reference_rank"] = np.array([token.rank for token in reference])
        if type(reference[0].top_token) is not type(model[0].top_token):
            continue
        pairs = list(zip(reference, model, strict=True))
        kls = [truncated_kl(p.top, q.top) for p, q in pairs]
        rests += [kl.rest for kl in kls]
        columns["kl"] = np.array([kl.kl for kl in kls])
        columns["top1"] = np.array([p.top_token == q.top_token for p, q in pairs])
        columns["reference_top"] = np.exp([max(p.top.values(), default=-np.inf) for p in reference])
    return columns


def _nll(scores: Sequence[ScoredToken]) -> np.ndarray:
    return -np.array([token.logprob for token in scores])

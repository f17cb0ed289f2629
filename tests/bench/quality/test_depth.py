"""Quality at depth: documents from a seed, distances by position, memory, and a KV cache of known damage."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.bench.gate.limits import GateOutcome, Scored, TaskScored, parse_gate, parse_promises
from llmopt.bench.gate.score_checks import check_promises
from llmopt.bench.quality.depth import bucket_ends, by_depth, depth_label, depth_passage
from llmopt.bench.quality.passage import Passage, PassageWindow
from llmopt.bench.quality.positions import PositionScores, QualitySeries, SeriesWriter
from llmopt.bench.quality.scoring import score_passage
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.execution.prompt_pass import PromptPass
from llmopt.recipes import MODELS
from transformers import AutoTokenizer

from ...support.model_families import save_model

FOLDER = MODELS / "stories3M"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


def test_documents_come_from_the_seed_alone(tokenizer: Any) -> None:
    first, again, other = (
        depth_passage(tokenizer, 3000, documents=2, seed=seed) for seed in (1, 1, 2)
    )
    assert first.sha256 == again.sha256 != other.sha256
    assert [len(window.token_ids) for window in first.windows] == [3000, 3000]
    assert first.windows[0].token_ids != first.windows[1].token_ids
    text = tokenizer.decode(first.windows[0].token_ids)
    # Codes of earlier sections come again.
    assert "Section 1 gave the part" in text.partition("## Section 2")[2]


def test_a_text_gives_whole_windows_or_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("one day there was a cat " * 400, encoding="utf-8")
    passage = depth_passage(tokenizer, 512, documents=3, path=path)
    assert [window.document for window in passage.windows] == [0, 1, 2]
    with pytest.raises(BadInput, match="needs as many: give a longer text"):
        depth_passage(tokenizer, 4096, documents=1, path=path)


def series_of(position: np.ndarray, document: np.ndarray, kl: np.ndarray) -> QualitySeries:
    with SeriesWriter() as writer:
        scores = {"token_id": position, "nll": kl, "top1": kl < 1, "window": document}
        writer.add(PositionScores(document=document, position=position, kl=kl, **scores))
        return writer.finish()


def test_a_depth_is_the_second_half_of_its_tokens() -> None:
    assert bucket_ends([4096, 3000]) == [128, 256, 512, 1024, 2048, 3000, 4096]
    assert [depth_label(n) for n in (3000, 4096, 2**20)] == ["3000", "4k", "1M"]
    position = np.tile(np.arange(1, 512), 4)
    kl = np.where(position < 256, 0.0, 2.0)
    depths = by_depth(series_of(position, np.repeat(np.arange(4), 511), kl), [512])
    assert {depth: part["kl_nats"] for depth, part in depths.items()} == {
        "128": 0.0,
        "256": 0.0,
        "512": 2.0,
    }
    assert depths["512"]["num_tokens"] == 4 * 256 and depths["512"]["top1_agreement"] == 0


def test_limits_at_depth_are_judged_by_the_interval() -> None:
    part = {"kl_nats": 0.04, "top1_agreement": 0.97}
    part |= {"intervals": {"kl_nats": [0.03, 0.05], "top1_agreement": [0.96, 0.98]}}
    quality = {"depth": {"32k": part}, "kv": {"fp8": {"8k": part}}}
    text = "kl.depth.32k<=0.06 top1.depth.32k>=98.5% kl.kv.fp8.8k<=0.04 kl.depth.64k<=1"
    verdicts = check_promises(parse_promises(text), quality)
    outcomes = [verdict.outcome for verdict in verdicts]
    unknown = GateOutcome.NO_VERDICT
    assert outcomes == [GateOutcome.PASS, GateOutcome.REGRESSION, unknown, unknown]
    assert "needs a --reference and --quality-depth 64k" in verdicts[3].reason
    (limit,) = parse_gate("kl.kv.int8.4k<=0.1")
    assert isinstance(limit.quantity, Scored)
    assert limit.quantity.label == "KL of the int8 KV cache at depth 4k"
    (limit,) = parse_promises("needles.64k>=-2%")
    assert limit.quantity == TaskScored("task.needles.exact_match.64k")
    for wrong in ("needles.64k<=+2%", "needles.64k>=0.5", "top1.depth.4k<=0.5", "kl.depth.4x<=1"):
        with pytest.raises(BadInput):
            parse_promises(wrong)


def test_models_at_the_limit_seldom_break_it() -> None:
    """500 models whose true KL is the limit, over eight documents that differ by a third."""
    rng, document = np.random.default_rng(0), np.repeat(np.arange(8), 128)
    position = np.tile(np.arange(128, 256), 8)
    (limit,) = parse_promises("kl.depth.256<=0.05")
    series = series_of(position, document, np.zeros(len(position)))
    outcomes = []
    for _ in range(500):
        by_document = rng.gamma(9, 1 / 9, 8)[document]
        kl = 0.05 * by_document * rng.gamma(0.3, 1 / 0.3, len(document))
        columns = {"position": position, "document": document, "kl": kl, "top1": kl < 0.5}
        series.column = columns.get  # type: ignore[method-assign]
        quality = {"depth": by_depth(series, [256])}
        outcomes += [verdict.outcome for verdict in check_promises([limit], quality)]
    assert outcomes.count(GateOutcome.REGRESSION) / 500 <= 0.025
    same = by_depth(series_of(position, document, np.zeros(len(position))), [256])
    assert same["256"]["intervals"]["kl_nats"] == (0, 0)


class CountedPass:
    """A prompt pass that counts the bytes of its logits that are alive."""

    live = most = 0

    def __init__(self, inner: PromptPass) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __enter__(self) -> CountedPass:
        return self

    def __exit__(self, *_: object) -> None:
        self._inner.__exit__()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits, count = self._inner.logits(hidden), CountedPass
        count.live += logits.nbytes
        count.most = max(count.most, count.live)
        weakref.finalize(logits, self._freed, logits.nbytes)
        return logits

    @staticmethod
    def _freed(num_bytes: int) -> None:
        CountedPass.live -= num_bytes


def counted(engine: Engine) -> Any:
    return CountedPass(engine.prompt_pass())


def test_live_logits_do_not_grow_with_depth(tmp_path: Path) -> None:
    vocab = 20_000
    size = {"vocab_size": vocab, "hidden_size": 16, "intermediate_size": 16}
    size |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    save_model(tmp_path, "LlamaConfig", {**size, "head_dim": 8, "max_position_embeddings": 4096})
    config = EngineConfig(tmp_path, dtype="float32", num_blocks=140, num_threads=1)
    engines = Engine(config), Engine(config)
    most = []
    for depth in (1024, 2048):
        CountedPass.live = CountedPass.most = 0
        torch.manual_seed(0)
        window = PassageWindow(tuple(torch.randint(vocab, (depth,)).tolist()))
        passage = Passage((window,), "text", "p", "words")
        score_passage(passage, *(partial(counted, engine) for engine in engines))
        most.append(CountedPass.most)
        assert CountedPass.live == 0
    # A slice of both models; all logits of the deeper document are 164 MB of each.
    assert 0 < most[0] == most[1] == 2 * 256 * 4 * vocab


def rounded_to_4_bits(x: torch.Tensor) -> torch.Tensor:
    """The nearest of 15 points, with a scale for each token and head; rounding again changes nothing."""
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 7
    return torch.round(x / scale) * scale


class RoundedPass(CountedPass):
    """A prompt pass whose cached keys and values are rounded after each step."""

    def hidden(self, spans: Sequence[Any], prompts: Sequence[Any]) -> torch.Tensor:
        hidden = self._inner.hidden(spans, prompts)
        for layer in self._inner._runner.cache.layers:
            for part in layer.parts:
                part.copy_(rounded_to_4_bits(part.nan_to_num()))
        return hidden


@contextmanager
def chunked_engine() -> Iterator[Engine]:
    """Steps of 64 tokens, which read their own keys and values before these are rounded."""
    yield Engine(EngineConfig(FOLDER, dtype="float32", max_num_batched_tokens=64, num_threads=1))


def test_a_cache_of_4_bits_hurts_depth_and_not_short_text(tokenizer: Any) -> None:
    deep = depth_passage(tokenizer, 256, documents=5)
    short = Passage(
        tuple(PassageWindow(window.token_ids[:65]) for window in deep.windows), "text", "p", "words"
    )
    kl = {}
    with chunked_engine() as engine:
        for name, passage in (("short", short), ("deep", deep)):
            opened = partial(engine.prompt_pass_on, "float32", 1024)
            rounded: Any = partial(RoundedPass, opened())
            series, _ = score_passage(passage, rounded, opened)
            kl[name] = series
    assert kl["short"].needed("kl").max() < 1e-6
    depths = by_depth(kl["deep"], [256])
    limits = parse_promises("kl.depth.128<=0.01 kl.depth.256<=0.01")
    verdicts = check_promises(limits, {"depth": depths})
    assert [verdict.outcome for verdict in verdicts] == [GateOutcome.REGRESSION] * 2
    # The same cache without rounding keeps them.
    with chunked_engine() as engine:
        opened = partial(engine.prompt_pass_on, "float32", 1024)
        series, _ = score_passage(deep, opened, opened)
    verdicts = check_promises(limits, {"depth": by_depth(series, [256])})
    assert [verdict.outcome for verdict in verdicts] == [GateOutcome.PASS] * 2

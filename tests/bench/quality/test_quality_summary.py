"""Series of scores and their summary: against values worked out by hand, and coverage of the intervals."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from llmopt.base.errors import BadInput
from llmopt.bench.quality.passage import Passage, PassageWindow
from llmopt.bench.quality.positions import PositionScores, QualitySeries, SeriesWriter
from llmopt.bench.quality.summary import PositionBlocks, quantile, summarize

PASSAGE = Passage(
    (PassageWindow((1, 2, 3)), PassageWindow((3, 3), document=1)), "text", "p", "words"
)


def scores(**columns: list[float]) -> PositionScores:
    return PositionScores(
        document=np.array([0, 0, 1]),
        window=np.array([0, 0, 1]),
        position=np.array([1, 2, 1]),
        token_id=np.array([2, 3, 3]),
        **{name: np.array(column) for name, column in columns.items()},
    )


def test_summary_by_hand(tmp_path: Path) -> None:
    with SeriesWriter() as writer:
        writer.add(
            scores(
                nll=[1.0, 2.0, 3.0],
                reference_nll=[1.0, 1.0, 1.0],
                rank=[1, 2, 3],
                reference_rank=[1, 1, 3],
                kl=[0.0, 0.5, 1.0],
                top1=[True, False, False],
            )
        )
        series = writer.finish()
    quality = summarize(PASSAGE, series, reference="other")
    assert quality.num_tokens == 3 and quality.num_windows == 2
    assert quality.perplexity == pytest.approx(math.exp(2))
    assert quality.reference_perplexity == pytest.approx(math.e)
    assert quality.perplexity_ratio == pytest.approx(math.e)
    assert quality.kl_nats == pytest.approx(0.5) and quality.median_kl_nats == pytest.approx(0.5)
    assert quality.p90_kl_nats == quality.p999_kl_nats == quality.max_kl_nats == pytest.approx(1.0)
    assert quality.top1_agreement == pytest.approx(1 / 3) and quality.rank_moved == pytest.approx(
        1 / 3
    )
    # Three positions bound no high quantile from above.
    assert quality.intervals["p999_kl_nats"][1] is None
    series.copy_to(tmp_path)
    again = QualitySeries.beside(tmp_path)
    assert again is not None and again.needed("position").tolist() == [1, 2, 1]
    assert summarize(PASSAGE, again, reference="other") == quality


def test_without_a_reference_only_perplexity() -> None:
    with SeriesWriter() as writer:
        writer.add(scores(nll=[1.0, 2.0, 3.0]))
        quality = summarize(PASSAGE, writer.finish())
    assert quality.kl_nats is None and quality.top1_agreement is None
    assert quality.intervals.keys() == {"perplexity"}


def test_series_is_written_in_row_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet as pq

    monkeypatch.setattr("llmopt.bench.quality.positions.ROW_GROUP", 4)
    with SeriesWriter() as writer:
        for _ in range(5):
            writer.add(scores(nll=[1.0, 2.0, 3.0]))
            assert writer._num_kept < 4
        series = writer.finish()
    assert pq.ParquetFile(series.path).num_row_groups >= 3
    assert len(series.needed("nll")) == 15


def test_damaged_series_is_refused(tmp_path: Path) -> None:
    assert QualitySeries.beside(tmp_path) is None
    (tmp_path / "quality.parquet").write_text("no table")
    with pytest.raises(BadInput, match="is damaged"):
        QualitySeries.beside(tmp_path)


def test_an_aborted_series_leaves_nothing() -> None:
    writer = SeriesWriter()
    with pytest.raises(KeyboardInterrupt), writer:
        writer.add(scores(nll=[1.0, 2.0, 3.0]))
        raise KeyboardInterrupt
    assert not writer._path.parent.exists()


def test_blocks_are_documents_windows_or_segments() -> None:
    windows = np.repeat(np.arange(40), 30)
    joined = PositionBlocks.over(np.zeros(1200), windows)
    assert (joined.count, joined.kind) == (40, "windows")
    assert PositionBlocks.over(windows // 2, windows).kind == "documents"
    two = PositionBlocks.over(np.zeros(1200), windows // 20)
    assert two.kind == "segments of 60 positions" and two.count == 20
    # A segment is within one window.
    assert all(len(set((windows // 20)[two.of == block])) == 1 for block in range(20))


def test_quantiles_of_resamples_equal_numpy() -> None:
    rng = np.random.default_rng(0)
    values, blocks = (
        rng.exponential(size=600),
        PositionBlocks.over(np.arange(600) // 20, np.zeros(600)),
    )
    resampled = blocks.resampled_quantiles(values, 0.9)
    weights = np.concatenate(list(blocks.weights()))
    for index in (0, 500, 999):
        whole = np.repeat(values, weights[index][blocks.of].astype(int))
        assert resampled[index] == quantile(whole, 0.9)


def test_intervals_cover_the_truth() -> None:
    """Correlated positions: independent resampling of positions would cover far less often."""
    rng, covered = np.random.default_rng(1), 0
    for seed in range(60):
        level = np.repeat(rng.normal(size=40), 25)
        values = level + rng.normal(size=1000)
        low, high = PositionBlocks.over(np.repeat(np.arange(40), 25), np.zeros(1000), seed).mean(
            values
        )
        assert low is not None and high is not None
        covered += low <= 0 <= high
    assert covered >= 51  # 57 expected of 60; 51 or fewer has a chance of 1 %

"""Passages that lost most, and how the report shows them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llmopt.bench.page.page import (
    MarkedText,
    Page,
    ReportVerdict,
    Section,
    to_html,
    to_markdown,
)
from llmopt.bench.quality.positions import PositionScores, QualitySeries, SeriesWriter
from llmopt.bench.quality.summary import hurt_passages, worst_runs
from llmopt.bench.report.parts import marked

from tests.support.page_parts import sections_of


def test_worst_runs_stay_in_a_window_and_apart() -> None:
    values, windows = np.zeros(60), np.repeat([0, 1, 2], 20)
    values[[18, 21, 22, 45]] = [3.0, 2.0, 2.0, 1.0]
    runs = worst_runs(values, windows, count=9, length=5)
    assert runs[0][1] - runs[0][0] <= 5 and {21, 22} <= set(range(*runs[0]))
    assert all(windows[begin] == windows[end - 1] for begin, end in runs)
    assert len(runs) == 3  # where nothing was lost, there is no passage
    covered = [place for run in runs for place in range(*run)]
    assert len(covered) == len(set(covered)) and {18, 21, 22, 45} <= set(covered)


class Letters:
    def decode(self, token_ids: Sequence[int], /) -> str:
        return "".join(chr(token) for token in token_ids)


def series(kl: list[float] | None, text: str) -> QualitySeries:
    zeros = np.zeros(len(text))
    with SeriesWriter() as writer:
        position = np.arange(1, len(text) + 1)
        ids = np.array([ord(letter) for letter in text])
        distance = None if kl is None else np.array(kl)
        writer.add(PositionScores(zeros, zeros, position, ids, zeros, kl=distance))
        return writer.finish()


def test_passages_are_shown_shaded_and_escaped() -> None:
    text = "a <b*>\n c"
    (passage,) = (
        hurt_passages(series([0, 0, 0.06, 0.3, 2.0, 9.0, 0, 0, 0.06], text), Letters()) or []
    )
    assert passage["position"] == 1 and "".join(passage["tokens"]) == text
    shaded = marked(passage)
    assert [shade for _, shade, _ in shaded.pieces] == [0, 0, 1, 2, 3, 4, 0, 0, 1]
    section = Section("Quality", texts=[shaded])
    page = Page("t", "s", ReportVerdict("plain", "h", "s"), sections=[section])
    html = to_html(page)
    assert '<span class="shade2" title="0.300 nats">b</span>' in html
    assert '<span class="shade1" title="0.060 nats">&lt;</span>' in html
    assert "a **\\<b\\*\\>**\u21b5 **c**" in to_markdown(page)


def test_bold_takes_no_spaces_with_it() -> None:
    assert (
        MarkedText([("a", 0, ""), (" b", 1, ""), ("c ", 2, ""), (" ", 3, "")]).markdown
        == "a **bc**  "
    )


def test_without_a_reference_or_a_loss_there_is_no_passage() -> None:
    assert hurt_passages(series(None, "abc"), Letters()) is None
    assert hurt_passages(series([0, 0, 0], "abc"), Letters()) == []


def test_older_results_have_no_section() -> None:
    for quality in (None, {"perplexity": 3.0}):
        assert sections_of("quality_by_position", quality) == []

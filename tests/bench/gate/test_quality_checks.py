"""Gate limits on quality: decided by intervals over the text, paired by position between two runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from llmopt.bench.gate.gate_options import LimitOptions
from llmopt.bench.gate.limits import GateOutcome, parse_gate
from llmopt.bench.gate.score_checks import check_quality, quality_changes
from llmopt.bench.quality.passage import Passage, PassageWindow
from llmopt.bench.quality.positions import PositionScores, SeriesWriter
from llmopt.bench.quality.summary import summarize
from llmopt.bench.record.result import RunData

WINDOWS, LENGTH = 50, 100
COUNT = WINDOWS * LENGTH
PASSAGE = Passage(
    tuple(PassageWindow((1,) * (LENGTH + 1)) for _ in range(WINDOWS)), "text", "gptq v1", "words"
)
Columns = dict[str, np.ndarray]


def model(change: Callable[[np.random.Generator, Columns], None] | None = None) -> RunData:
    """A run whose scores are those of the reference, with an error as a good quantization makes."""
    rng = np.random.default_rng(3)
    window = np.repeat(np.arange(WINDOWS), LENGTH)
    hard = rng.normal(size=WINDOWS)[window] * 0.5
    theirs = rng.gamma(2.0, 1.0, COUNT) * np.exp(hard)
    columns = {
        "reference_nll": theirs,
        "nll": theirs + rng.normal(0.005, 0.05, COUNT),
        "kl": rng.gamma(0.5, 0.004, COUNT),
        "top1": rng.random(COUNT) < 0.98,
    }
    if change is not None:
        change(np.random.default_rng(4), columns)
    with SeriesWriter() as writer:
        position = np.tile(np.arange(1, LENGTH + 1), WINDOWS)
        zeros = np.zeros(COUNT)
        writer.add(PositionScores(zeros, window, position, zeros, **columns))
        series = writer.finish()
    quality = asdict(summarize(PASSAGE, series, reference="plain"))
    return RunData({"llmopt": {"quality": quality}}, series=series)


def ruined(rng: np.random.Generator, columns: Columns) -> None:
    """One position in a hundred is ruined; the rest is better, so that the means stay."""
    bad = rng.choice(COUNT, COUNT // 100, replace=False)
    columns["kl"] *= 0.1
    columns["kl"][bad] = rng.uniform(0.1, 0.3, len(bad))


def verdicts(gate: str, base: RunData, new: RunData) -> list[GateOutcome]:
    return [check_quality(limit, base, new).outcome for limit in parse_gate(gate)]


GOOD = model()
PASS, REGRESSION, UNDECIDED = GateOutcome.PASS, GateOutcome.REGRESSION, GateOutcome.NO_VERDICT


def test_a_tail_gate_finds_what_the_mean_hides() -> None:
    new = model(ruined)
    means = [run.result["llmopt"]["quality"]["kl_nats"] for run in (GOOD, new)]
    assert means[1] < 1.2 * means[0]
    gate = "kl<=0.004 top1>=0.95 perplexity<=+2% p999_kl<=0.06"
    assert verdicts(gate, GOOD, GOOD) == [PASS, PASS, PASS, PASS]
    assert verdicts(gate, GOOD, new) == [PASS, PASS, PASS, REGRESSION]
    assert verdicts("p999_kl<=+100%", GOOD, new) == [REGRESSION]


def test_three_percent_ruined_are_found_at_p99() -> None:
    def worse(rng: np.random.Generator, columns: Columns) -> None:
        columns["kl"][rng.choice(COUNT, COUNT * 3 // 100, replace=False)] = 0.2

    assert verdicts("p99_kl<=0.1", GOOD, GOOD) == [PASS]
    assert verdicts("p99_kl<=0.1", GOOD, model(worse)) == [REGRESSION]


def test_equal_models_keep_the_tightest_limits() -> None:
    gate = "perplexity<=+0% kl<=+0% p99_kl<=+0% p999_kl<=+0% top1>=-0%"
    assert verdicts(gate, GOOD, model()) == [PASS] * 5


def test_perplexity_is_paired_by_position() -> None:
    # Texts differ by tens of percent in difficulty; a change of 1 % of the NLLs still shows.
    def worse(_: np.random.Generator, columns: Columns) -> None:
        columns["nll"] += 0.02

    new = model(worse)
    interval = GOOD.result["llmopt"]["quality"]["intervals"]["perplexity"]
    assert interval[1] / interval[0] > 1.2
    assert verdicts("perplexity<=+1%", GOOD, new) == [REGRESSION]
    assert verdicts("perplexity<=+3%", GOOD, new) == [PASS]
    check = check_quality(parse_gate("perplexity<=+1%")[0], GOOD, new)
    assert "beyond the limit" in check.reason and check.interval is not None
    changes = quality_changes(GOOD, new)
    assert changes["perplexity_change"] == pytest.approx(np.expm1(0.02), rel=1e-4)


def test_a_limit_within_the_interval_is_undecided() -> None:
    value = GOOD.result["llmopt"]["quality"]["kl_nats"]
    check = check_quality(parse_gate(f"kl<={value * 1.001}")[0], GOOD, GOOD)
    assert check.outcome is UNDECIDED and "--quality-tokens" in check.reason
    assert verdicts(f"kl<={value * 1.2} top1>=0.5 top1>=0.999"[:-12], GOOD, GOOD) == [PASS, PASS]
    assert verdicts("top1>=0.999", GOOD, GOOD) == [REGRESSION]


def test_a_tail_without_enough_positions_is_undecided() -> None:
    short = RunData({"llmopt": {"quality": dict(GOOD.result["llmopt"]["quality"])}})
    short.result["llmopt"]["quality"]["intervals"] = {"p999_kl_nats": (0.01, None)}
    assert verdicts("p999_kl<=0.5", short, short) == [UNDECIDED]
    assert verdicts("p999_kl<=0.001", short, short) == [REGRESSION]


def changed(**values: Any) -> RunData:
    return RunData({"llmopt": {"quality": {**GOOD.result["llmopt"]["quality"], **values}}})


@pytest.mark.parametrize(
    ("gate", "base", "new", "words"),
    [
        ("perplexity<=+1%", GOOD, changed(token_sha256="x"), "the runs scored different tokens"),
        ("perplexity<=+1%", GOOD, changed(perplexity=9.0), "no quality.parquet next to"),
        (
            "kl<=+1%",
            changed(kl_nats=None),
            GOOD,
            "no value in the base run: it needs a --reference",
        ),
        ("kl<=1", GOOD, RunData({"llmopt": {"quality": None}}), "no value in the new run"),
    ],
)
def test_what_cannot_be_paired_is_undecided(
    gate: str, base: RunData, new: RunData, words: str
) -> None:
    check = check_quality(parse_gate(gate)[0], base, new)
    assert check.outcome is UNDECIDED and words in check.reason


def test_options_are_limits() -> None:
    limits = LimitOptions(max_ppl_increase="2%", max_kl=0.05, min_top1="0.9").quality
    assert [(limit.quantity.key, limit.text) for limit in limits] == [
        ("perplexity", "≤ +2 %"),
        ("kl", "≤ 0.05"),
        ("top1", "≥ 0.9"),
    ]
    assert not LimitOptions().quality

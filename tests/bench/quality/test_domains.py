"""Domains, items and flips: what ships, and their statistics against brute force and simulation."""

from __future__ import annotations

import itertools
import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llmopt.base.errors import BadInput
from llmopt.bench.gate.limits import GateOutcome, parse_promises
from llmopt.bench.gate.score_checks import check_promises
from llmopt.bench.quality.domains import (
    BUNDLED_TASKS,
    STORY_TASK,
    FullPassage,
    bundled_task,
    domain_texts,
    exact_interval,
    flips_between,
    items_for_loss,
    predicted_share,
    smallest_loss,
)
from llmopt.bench.quality.passage import DOMAINS, EVALUATION_TEXT
from llmopt.bench.quality.positions import PositionScores, SeriesWriter
from llmopt.bench.quality.summary import score_of
from llmopt.bench.session.tasks import encode_pair
from llmopt.quant.stream.sources import MIXED, STORIES, plain_text, read_documents
from llmopt.recipes import DATA, MODELS
from transformers import AutoTokenizer

from tools import quality_items

RUN = 100  # characters


def runs(texts: list[str]) -> set[str]:
    return {text[i : i + RUN] for text in texts for i in range(len(text) - RUN)}


def test_what_ships_is_small_and_no_calibration_saw_it() -> None:
    files = [DATA / "domains.jsonl.xz", *DATA.glob("cloze_*")]
    assert sum(path.stat().st_size for path in files) < 200_000
    texts = {name: [plain_text(text) for text in of] for name, of in domain_texts().items()}
    assert set(texts) == set(DOMAINS)
    assert all(
        sum(map(len, of)) > (6_000 if name == "zh" else 13_000) for name, of in texts.items()
    )
    ours = runs([text for of in texts.values() for text in of]) | runs(
        EVALUATION_TEXT.read_text(encoding="utf-8").split("\n\n")
    )
    for source in (MIXED, STORIES):
        for document in read_documents(source)[1]:
            text = plain_text(document)
            assert all(text[i : i + RUN] not in ours for i in range(len(text) - RUN))


def test_items_are_those_of_the_committed_tool(tmp_path: Path) -> None:
    quality_items.main(tmp_path)
    for name in BUNDLED_TASKS:
        made, shipped = (
            lzma.decompress((folder / f"{name}.jsonl.xz").read_bytes())
            for folder in (tmp_path, DATA)
        )
        assert made == shipped
    task = bundled_task(STORY_TASK)
    assert len(task.items) >= 400
    for item in itertools.chain.from_iterable(bundled_task(name).items for name in BUNDLED_TASKS):
        assert len(set(item.choices)) == 4 and 0 <= item.answer < 4
        assert item.context == item.context.rstrip() != ""


def flips(before: np.ndarray, after: np.ndarray, answers: list[int]) -> dict[str, Any]:
    return flips_between(list(before), list(after), answers)


def test_flips_by_brute_force() -> None:
    rng = np.random.default_rng(0)
    before = rng.normal(size=(300, 4))
    after = before + rng.normal(size=(300, 4)) * 0.4
    answers = list(rng.integers(4, size=300))
    found = flips(before, after, answers)
    changed = lost = gained = 0
    for old, new, answer in zip(before, after, answers, strict=True):
        a, b = max(range(4), key=lambda i: old[i]), max(range(4), key=lambda i: new[i])
        changed += a != b
        lost += a == answer != b
        gained += b == answer != a
    assert (found["count"], found["lost"], found["gained"]) == (changed, lost, gained)
    assert found["share"] == changed / 300 and 0 < lost < changed
    assert found["accuracy"] - found["reference_accuracy"] == pytest.approx((gained - lost) / 300)
    assert found["intervals"]["share"] == exact_interval(changed, 300)


def test_equal_models_have_no_flips_and_keep_every_promise() -> None:
    scores = np.random.default_rng(1).normal(size=(50, 4))
    found = flips(scores, scores, [0] * 50)
    assert found["count"] == found["lost"] == found["gained"] == 0 and found["p_value"] == 1
    assert set(found["intervals"].values()) == {(0.0, 0.0)}
    (verdict,) = check_promises(parse_promises("flips<=0%"), {"flips": found})
    assert verdict.outcome is GateOutcome.PASS


def test_the_exact_interval_misses_each_side_no_more_often_than_stated() -> None:
    rng = np.random.default_rng(2)
    for share, total in ((0.02, 463), (0.1, 100), (0.5, 40)):
        counts = rng.binomial(total, share, size=2000)
        bounds = {int(count): exact_interval(int(count), total) for count in set(counts)}
        low, high = np.array([bounds[int(count)] for count in counts]).T
        # A promise at the true share is broken, and kept, in at most 2.5 % of the samples each.
        assert (low > share).mean() <= 0.033 and (high < share).mean() <= 0.033
    assert exact_interval(0, 100)[0] == 0 and exact_interval(0, 100)[1] == pytest.approx(
        1 - 0.025 ** (1 / 100)
    )


def test_another_sample_falls_into_the_predicted_interval() -> None:
    rng = np.random.default_rng(3)
    held = []
    for share in (0.03, 0.1, 0.3):
        first, second = rng.binomial(200, share, size=(2, 1500))
        bounds = {int(count): predicted_share(int(count), 200, 200) for count in set(first)}
        held += [
            bounds[int(a)][0] <= b / 200 <= bounds[int(a)][1]
            for a, b in zip(first, second, strict=True)
        ]
    assert 0.88 <= np.mean(held) <= 0.96


def test_items_for_a_loss_find_it_in_four_of_five_samples() -> None:
    from llmopt.bench.quality.task_items import mcnemar_exact

    needed = items_for_loss(0.05, 0.1)
    rng = np.random.default_rng(4)
    lost, gained, _ = rng.multinomial(needed, [0.075, 0.025, 0.9], size=400).T
    found = [mcnemar_exact(int(a), int(b)) < 0.05 for a, b in zip(lost, gained, strict=True)]
    assert 0.72 <= np.mean(found) <= 0.86
    assert smallest_loss(needed, 0.1) == pytest.approx(0.05, rel=0.01)
    assert items_for_loss(0.05, 0.0) == items_for_loss(0.05, 0.05) < needed


def test_summary_splits_the_series_by_domain_and_item() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "stories3M")
    full = FullPassage.of(
        tokenizer, lambda a, b: encode_pair(tokenizer, a, b), 512, stories_only=True, share=False
    )
    windows, count = full.passage.windows, len(full.domains)
    assert len(windows) - count == 4 * len(full.tasks[0].items)
    rng = np.random.default_rng(5)
    kl_of = {name: 0.1 * place for place, name in enumerate(DOMAINS, start=1)}
    logliks: list[list[float]] = [[], []]
    with SeriesWriter() as writer:
        for number, window in enumerate(windows):
            rows = window.num_scored
            nll = rng.uniform(1, 5, size=(2, rows)).astype(np.float32)
            kl = kl_of[full.domains[number]] if number < count else 9.0
            if number >= count:
                for side in (0, 1):
                    logliks[side].append(-float(nll[side].sum()))
            writer.add(
                PositionScores(
                    document=np.full(rows, window.document),
                    window=np.full(rows, number),
                    position=np.arange(rows),
                    token_id=np.array(window.token_ids[window.first_scored :]),
                    nll=nll[1],
                    reference_nll=nll[0],
                    kl=np.full(rows, kl),
                    top1=np.full(rows, True),
                )
            )
        record = full.summary(writer.finish())
    for name, part in record["domains"].items():
        assert part["kl_nats"] == pytest.approx(kl_of[name]) and part["num_tokens"] > 3_900
    answers = [item.answer for item in full.tasks[0].items]
    before, after = (np.array(side).reshape(-1, 4) for side in logliks)
    wanted = flips(before, after, answers)
    assert {name: record["flips"][name] for name in ("count", "lost", "gained")} == {
        name: wanted[name] for name in ("count", "lost", "gained")
    }
    assert score_of(record, "domains.code.kl_nats") == (
        pytest.approx(0.2),
        pytest.approx((0.2, 0.2)),
    )


@pytest.mark.parametrize(
    ("promise", "word"),
    [
        ("flips<=12%", "pass"),
        ("flips<=0.05", "no verdict"),
        ("flips<=2%", "regression"),
        ("kl.code<=0.02", "regression"),
        ("kl.code<=0.04", "pass"),
        ("kl.zh<=1", "no verdict"),
        ("kl.sure<=0.01", "no verdict"),
        ("top1>=95%", "pass"),
        ("perplexity<=+4%", "pass"),
        ("perplexity<=+0.5%", "regression"),
    ],
)
def test_promises_are_kept_broken_or_unsure(promise: str, word: str) -> None:
    quality = {
        "perplexity_ratio": 1.02,
        "top1_agreement": 0.96,
        "intervals": {"perplexity_ratio": [1.01, 1.03], "top1_agreement": [0.955, 0.965]},
        "sure": {"kl_nats": 0.01, "intervals": {"kl_nats": [0.008, 0.012]}},
        "domains": {
            "code": {"kl_nats": 0.03, "intervals": {"kl_nats": [0.025, 0.035]}},
            "zh": None,
        },
        "flips": {"share": 0.05, "intervals": {"share": [0.03, 0.08]}},
    }
    (verdict,) = check_promises(parse_promises(promise), quality)
    assert verdict.outcome == word
    if promise == "kl.zh<=1":
        assert "--quality-full" in verdict.reason
    if promise == "flips<=0.05":
        assert "items: about" in verdict.reason


@pytest.mark.parametrize(
    "promise",
    ["kl.code<=+5%", "flips<=+2%", "top1>=-2%", "perplexity<=3", "p99_ttft_ms<=5", "kl.x<=1"],
)
def test_a_promise_that_one_record_cannot_answer_is_refused(promise: str) -> None:
    with pytest.raises(BadInput):
        parse_promises(promise)


def test_items_file_is_lines_of_json() -> None:
    with lzma.open(DATA / "cloze_prose.jsonl.xz", "rt", encoding="utf-8") as file:
        assert {tuple(json.loads(line)) for line in file} == {
            ("source", "context", "choices", "answer")
        }

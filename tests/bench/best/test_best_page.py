"""The page of a decision: the answer and its commands, the front, finalists with intervals, the bits of layers."""

from __future__ import annotations

import re

import pytest
from llmopt.bench.best.best_page import best_page, bits_of, layers_figure, measured_words
from llmopt.bench.best.finalists import interval
from llmopt.bench.page.page import Page, Section, to_html, to_markdown

from .decisions import a_decision

CODE = "domains.code.kl_nats"


def section(page: Page, title: str) -> Section:
    return next(one for one in page.sections if one.title.startswith(title))


def test_the_answer_has_its_commands_and_its_numbers_once() -> None:
    decision = a_decision()
    page = best_page(decision)
    one = next(each for each in decision["finalists"] if each["id"] == "int-3.75")
    assert page.verdict.tone == "good" and page.verdict.headline.startswith("int-3.75: ")
    assert page.verdict.sentence == decision["sentence"]
    commands, neighbours, usual = section(page, "The answer").tables
    assert [*commands.rows] == [["Rebuild", one["rebuild"]], ["Serve", one["serve"]]]
    assert [row[:2] for row in neighbours.rows] == [
        ["recommended", "int-3.75"],
        ["next smaller", "int-3.50"],
        ["next better", "int-4.00"],
    ]
    cards = {card.label: (card.value, card.note) for card in page.cards}
    kl, interval = cards["KL"]
    (row,) = (row for row in section(page, "Finalists").tables[0].rows if row[0].endswith("*"))
    assert row[3] == neighbours.rows[0][4] == f"{kl} ({interval})"
    assert [row[0] for row in usual.rows] == ["awq int4 (awq-int4)", "fp8"]
    assert "KL ≤ 0.02" in page.subtitle.replace("kl", "KL") and "TPOT ≤ 20 ms" in page.subtitle


def test_a_broken_promise_is_said_with_the_finalist() -> None:
    finalists = section(best_page(a_decision()), "Finalists").tables[0]
    said = {row[0]: (row[1], row[-1]) for row in finalists.rows}
    assert said["awq-int4"] == ("no", "tpot 20.4 ms > 20 ms") and said["int-3.50"] == ("yes", "")
    (bad,) = (place for place, tone in finalists.tones.items() if tone == "bad")
    assert finalists.rows[bad][0] == "awq-int4"


def test_too_few_texts_have_no_interval() -> None:
    intervals = {"kl_nats": (None, None)}
    found = interval({"domains": {"code": {"kl_nats": 0.25, "intervals": intervals}}}, CODE)
    assert found == {"value": 0.25, "low": None, "high": None}
    assert measured_words(found, 4) == "0.2500"


@pytest.mark.parametrize(("code", "tone"), [(1, "bad"), (3, "unsure")])
def test_without_an_answer_the_closest_is_shown(code: int, tone: str) -> None:
    decision = a_decision(exit_code=code, closest="int-4.00", sentence="It is close.")
    decision |= {"recommended": None, "next_smaller": None, "next_better": None}
    page = best_page(decision)
    assert (page.verdict.tone, page.verdict.sentence) == (tone, "It is close.")
    assert page.cards[0].label == "Size"
    assert [row[:2] for row in section(page, "The answer").tables[1].rows] == [
        ["closest", "int-4.00"]
    ]


def test_a_prediction_alone_makes_a_page() -> None:
    """No finalist, speeds that nobody planned, an original that is not named."""
    decision = a_decision(finalists=[], recommended=None, next_smaller=None, next_better=None)
    decision["front"] = [
        point | {"speed": None, "keeps": None, "expected_kl": point["expected_kl"] or 0.0}
        for point in decision["front"]
    ]
    page = best_page(decision | {"usual": [], "exit_code": 1})
    titles = [one.title for one in page.sections]
    assert "Finalists" not in titles and "Predicted against measured" not in titles
    (figure,) = section(page, "Quality against size").figures
    assert figure.name == "front-size"
    assert "front-speed" not in to_html(page) and "unsure" in to_markdown(page.without_figures())


def test_every_layer_has_its_bits_in_the_picture() -> None:
    layers = {f"model.layers.{n}.mlp.up_proj": "int4 g64" if n else "int8" for n in range(6)}
    layers |= {
        f"model.layers.{n}.mlp.experts.{e}.down_proj": "nvfp4" for n in (2, 3) for e in (0, 1)
    }
    figure = layers_figure({"id": "one", "label": "mixed", "layers": layers | {"lm_head": "int8"}})
    assert figure is not None and figure.caption == "Outside the layers: lm_head int8."
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", figure.svg)
    assert {"int4 g64", "int8", "nvfp4", "mlp.up_proj", "mlp.experts.*.down_proj"} <= {*texts}
    assert layers_figure({"id": "one", "label": "", "layers": {"lm_head": "int8"}}) is None
    many = {f"model.layers.{n}.mlp.up_proj": "int4 g64" for n in range(80)}
    far = layers_figure({"id": "one", "label": "many", "layers": many})
    assert far is not None
    assert len(re.findall(r">4<", far.svg)) <= 1, "a tick: cells have no room for numbers"


@pytest.mark.parametrize(
    ("kind", "bits"),
    [
        ("int4 g64", 4),
        ("nvfp4", 4),
        ("fp8 block", 8),
        ("Q4_K", 4),
        ("IQ2_XXS", 2),
        ("bf16", 16),
        ("exl3 3.5", 3.5),
        ("original", 0),
    ],
)
def test_the_bits_of_a_kind_are_those_of_its_name(kind: str, bits: float) -> None:
    assert bits_of(kind) == bits


def test_the_rank_of_predictions_is_that_of_the_finalists() -> None:
    page = best_page(a_decision())
    (figure,) = section(page, "Predicted").figures
    assert "Rank correlation over 6 finalists: 1.00." in figure.caption

"""Decisions from plain values: which points stay, which finalists are made, what is recommended, and why not others."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from llmopt.bench.best.decision import (
    check_point,
    choose,
    decide,
    gap_words,
    next_finalist,
    slo_breaks,
)
from llmopt.bench.best.first_answer import first_sentence

SIZES = (100, 200, 300, 400)
EXPECTED = (0.4, 0.065, 0.04, 0.01)


def asked(**changes: Any) -> dict[str, Any]:
    kl = {"metric": "kl", "op": "<=", "limit": 0.05, "relative": False}
    plain = {
        "size_bytes": None,
        "slo": None,
        "promises": [kl],
        "is_bounded": False,
        "is_loaded": False,
        "request_rate": None,
    }
    return plain | changes


def speed(tpot: float, band: tuple[float, float] | None = None) -> dict[str, Any]:
    return {"tpot_ms": tpot, "ttft_ms": 100.0, "e2el_ms": 500.0, "tokens_per_s": 1e3 / tpot,
            "band": band and list(band), "ttft_band": None, "source": "planned"}  # fmt: skip


def point(name: str, size: int, expected: float | None, **changes: Any) -> dict[str, Any]:
    plain = {"id": name, "lane": "a", "label": name, "bytes": size, "bits_per_weight": size / 100,
             "expected_kl": expected, "speed": None, "unfit": None, "layers": {}, "quantize": {}}  # fmt: skip
    return plain | changes


def usual(name: str, size: int = 350, **changes: Any) -> dict[str, Any]:
    plain = {"name": name, "refused": None, "is_solved": True, "first_kl": None}
    return point(name, size, None) | plain | changes


def searched(usuals: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    pairs = zip(SIZES, EXPECTED, strict=True)
    return {
        "lanes": [],
        "front": [point(f"p{size}", size, kl) for size, kl in pairs],
        "usual": [*usuals],
    }


def finalist(
    name: str, size: int, kl: float, outcome: str = "pass", **changes: Any
) -> dict[str, Any]:
    found = {"value": kl, "low": 0.9 * kl, "high": 1.1 * kl}
    verdict = {"outcome": outcome, "reason": f"KL is {kl:g}", "excess": kl / 0.05 - 1}
    plain = {"id": name, "bytes": size, "kl": found, "top1": found, "flips": None, "kl_by_domain": {},
             "speed": None, "sound": True, "verdicts": [verdict]}  # fmt: skip
    return plain | changes


MEASURED = (
    finalist("p200", 200, 0.12, "regression"),
    finalist("p300", 300, 0.045),
    finalist("p400", 400, 0.012),
)


def test_the_fewest_bytes_that_keep_the_promises() -> None:
    found = decide(asked(), searched(), MEASURED)
    assert (found["recommended"], found["exit_code"], found["closest"]) == ("p300", 0, None)
    assert (found["next_smaller"], found["next_better"]) == ("p200", "p400")
    assert found["finalists"][0]["breaks"] == ["KL is 0.12"]
    kept = {one["id"]: one["keeps"] for one in found["finalists"]}
    assert kept == {"p200": False, "p300": True, "p400": True}


def test_the_least_kl_where_bytes_are_bounded() -> None:
    question = asked(is_bounded=True, size_bytes=350)
    found = decide(question, searched(), MEASURED)
    assert (found["recommended"], found["next_better"]) == ("p300", "p400")
    assert "400 bytes > 350" in found["finalists"][-1]["breaks"]
    assert decide(question | {"size_bytes": 400}, searched(), MEASURED)["recommended"] == "p400"


@pytest.mark.parametrize(
    ("outcomes", "code", "closest"),
    [
        (("regression", "regression", "regression"), 1, "p400"),
        (("regression", "no verdict", "regression"), 3, "p300"),
        (("no verdict", "no verdict", "regression"), 3, "p300"),
    ],
)
def test_nothing_and_unsure_name_the_closest(
    outcomes: Sequence[str], code: int, closest: str
) -> None:
    """Rank what may keep the promises before what breaks them, then the one that is least beyond."""
    measured = [
        finalist(one["id"], one["bytes"], one["kl"]["value"], outcome)
        for one, outcome in zip(MEASURED, outcomes, strict=True)
    ]
    found = decide(asked(), searched(), measured)
    assert (found["recommended"], found["exit_code"], found["closest"]) == (None, code, closest)
    assert closest in found["sentence"]


def test_a_point_that_was_not_made_and_may_keep_the_promises_is_named() -> None:
    measured = [finalist("p100", 100, 0.5, "regression"), finalist("p300", 300, 0.06, "regression")]
    found = decide(asked(), searched(), measured)
    assert (found["recommended"], found["exit_code"], found["closest"]) == (None, 3, "p300")
    assert found["sentence"].startswith("Unsure: p400 ")
    # Within a size that it exceeds it is no answer, and one with more KL than a finalist is none.
    assert decide(asked(size_bytes=350), searched(), measured)["exit_code"] == 1
    assert (
        decide(asked(), searched(), [*measured, MEASURED[2] | {"sound": False}])["exit_code"] == 1
    )


def test_points_without_an_expected_kl_are_passed_over_where_none_keeps_the_promises() -> None:
    """Neither is such a point named as one that may keep them, nor compared with."""
    fronts = searched([usual("int4")])
    fronts["front"].append(point("p350", 350, None))
    measured = [
        finalist("p300", 300, 0.06, "regression"),
        finalist("int4", 350, 0.07, "regression"),
    ]
    found = decide(asked(), fronts, measured)
    assert (found["exit_code"], found["closest"]) == (3, "p300")
    assert found["sentence"].startswith("Unsure: p400 ")


def test_without_a_finalist_the_closest_is_expected() -> None:
    fronts = searched()
    for one, tpot in zip(fronts["front"], (30.0, 22.0, 40.0, 50.0), strict=True):
        one["speed"] = speed(tpot, (0.9 * tpot, 1.1 * tpot))
    question = asked(slo={"tpot": 15.0})
    assert choose(question, fronts, 10) == []
    found = decide(question, fronts, [])
    assert (found["exit_code"], found["closest"]) == (1, "p200")
    assert found["front"][1]["breaks"] == ["TPOT 22 ms (19.8 to 24.2) > 15 ms"]
    # Of points that may all keep them it is the smallest that is expected to.
    assert decide(asked(), searched(), [])["closest"] == "p300"


def test_an_original_whose_speed_is_not_known_is_not_compared_by_load() -> None:
    original = point("original", 600, None, throughput={})
    assert decide(asked(), searched() | {"original": original}, MEASURED)["by_load"] == []


def test_a_failed_verification_is_never_recommended() -> None:
    measured = [finalist("p300", 300, 0.01, sound=False), finalist("p400", 400, 0.012)]
    assert decide(asked(), searched(), measured)["recommended"] == "p400"


@pytest.mark.parametrize(
    ("limit", "band", "kept"),
    [
        (20.0, None, True),
        (20.0, (10.0, 25.0), None),
        (9.0, (10.0, 25.0), False),
        (15.0, None, False),
    ],
)
def test_a_limit_on_a_speed_is_kept_broken_or_unsure(
    limit: float, band: tuple[float, float] | None, kept: bool | None
) -> None:
    ((found, said, _),) = slo_breaks({"tpot": limit}, speed(18.0, band))
    assert found is kept and f"> {limit:g} ms" in said
    ((unknown, _, _),) = slo_breaks({"tpot": limit}, None)
    assert unknown is None


def test_expected_kl_is_judged_by_the_ratios_of_the_finalists() -> None:
    """Measured to expected KL are 1.2, 1.125 and 1.2 here."""
    fronts = searched()
    fronts["front"][1]["expected_kl"] = 0.1
    front = decide(asked(), fronts, MEASURED)["front"]
    assert [one["keeps"] for one in front] == [False, False, True, True]
    assert front[0]["kl_band"] == pytest.approx([0.45, 0.48])
    assert check_point(asked(), searched()["front"][0], None)["keeps"] is None


def test_a_promise_of_no_divergence_at_all_is_judged() -> None:
    question = asked(promises=[asked()["promises"][0] | {"limit": 0.0}])
    found = check_point(question, point("p100", 100, 0.4), (0.5, 2.0))
    assert (found["keeps"], found["breaks"]) == (False, ["expected KL 0.4 > 0"])


def test_what_does_not_fit_leaves_the_front() -> None:
    big = point("p500", 500, 0.001, unfit="memory: 1 of 8 sequences fit in that of H100")
    found = check_point(asked(), big, None)
    assert found["keeps"] is False and "unfit" not in found
    assert found["breaks"] == ["memory: 1 of 8 sequences fit in that of H100"]


@pytest.mark.parametrize(
    ("question", "count", "chosen"),
    [
        (asked(), 2, ["p200", "p300"]),
        (asked(), 3, ["p200", "p300", "awq"]),
        (asked(), 10, ["p100", "p200", "p300", "p400", "awq"]),
        (asked(is_bounded=True, size_bytes=400, promises=[]), 3, ["p300", "p400", "awq"]),
        (asked(is_bounded=True, size_bytes=300, promises=[]), 2, ["p200", "p300"]),
    ],
)
def test_finalists_are_around_the_expected_answer(
    question: dict[str, Any], count: int, chosen: list[str]
) -> None:
    usuals = [usual("awq"), usual("Q4_K_M", refused="vLLM does not load it")]
    assert choose(question, searched(usuals), count) == chosen


def test_most_finalists_are_searched_and_the_usual_ones_the_nearest() -> None:
    usuals = [usual("awq", 360), usual("Q4_K_M", 310), usual("fp8", 390)]
    assert choose(asked(), searched(usuals), 3) == ["p200", "p300", "Q4_K_M"]
    assert choose(asked(), searched(usuals), 6)[-2:] == ["Q4_K_M", "awq"]
    few = searched(usuals) | {"front": searched()["front"][2:3]}
    assert choose(asked(), few, 4) == ["p300", "Q4_K_M", "awq", "fp8"]


def test_the_gap_to_the_optimum_in_words() -> None:
    front = [point("p100", 100, 0.4, gap=0.0), point("p200", 200, 0.1, gap=1e-4), usual("awq")]
    assert "each of the 2 mixtures is within 0.01% of the least expected KL" in gap_words(front)
    assert decide(asked(), searched() | {"front": front[:2]}, [])["front"][1]["gap"] == 1e-4


def test_points_that_others_beat_are_no_finalists() -> None:
    fronts = searched()
    fronts["front"].append(point("worse", 310, 0.05))
    assert "worse" not in choose(asked(), fronts, 10)


def test_the_usual_ones_and_the_promises_that_they_break() -> None:
    usuals = [
        usual("awq"), usual("Q4_K_M", refused="vLLM does not load it"), usual("fp8", 900), usual("kept"),
    ]  # fmt: skip
    measured = [*MEASURED, finalist("awq", 350, 0.2, "regression"), finalist("kept", 350, 0.04)]
    found = decide(asked(size_bytes=800), searched(usuals), measured)["usual"]
    said = {one["name"]: (one["id"], one["why"]) for one in found}
    assert said["awq"] == ("awq", "KL is 0.2")
    assert said["Q4_K_M"] == (None, "vLLM does not load it")
    assert said["fp8"][0] is None and said["fp8"][1].endswith("KiB")
    assert said["kept"] == ("kept", "keeps the promises, with +16.7% bytes and 0.89 times the KL")


def test_the_same_values_give_the_same_bytes() -> None:
    """In whatever order the finalists were finished."""
    measured = [*MEASURED, finalist("awq", 350, 0.2, "regression")]
    fronts = searched([usual("awq")])
    first = json.dumps(decide(asked(), fronts, measured))
    random.Random(0).shuffle(measured)
    assert json.dumps(decide(asked(), fronts, measured)) == first


def made_in_order(
    question: dict[str, Any],
    fronts: dict[str, Any],
    results: Sequence[Mapping[str, Any]],
    worth: float,
) -> tuple[list[str], float]:
    """The names in the order in which they are made, and the share that was left to save."""
    by_name = {result["id"]: result for result in results}
    measured: list[Mapping[str, Any]] = []
    while True:
        name, saving = next_finalist(question, fronts, measured, [*by_name])
        if name is None or (decide(question, fronts, measured)["recommended"] and saving < worth):
            return [result["id"] for result in measured], saving
        measured.append(by_name[name])


@pytest.mark.parametrize(
    ("question", "results", "worth", "order", "saving"),
    [
        # The nearest to the limit keeps it, the next smaller does not: what is below is not tried.
        (asked(), MEASURED, 0.02, ["p300", "p200"], 0.0),
        (asked(), MEASURED, 0.4, ["p300"], 1 - 200 / 300),
        # Twice the expected KL: the next is the nearest by that ratio.
        (asked(), [MEASURED[0], finalist("p300", 300, 0.08, "regression"), finalist("p400", 400, 0.02)],
         0.02, ["p300", "p400"], 0.0),
        (asked(is_bounded=True, size_bytes=400, promises=[]), MEASURED, 0.02, ["p400"], 0.0),
        (asked(promises=[]), MEASURED, 0.02, ["p300", "p200"], 0.0),
    ],
)  # fmt: skip
def test_the_search_ends_when_nothing_left_is_worth_it(
    question: dict[str, Any], results: Sequence[Mapping[str, Any]], worth: float, order: list[str],
    saving: float,
) -> None:  # fmt: skip
    assert made_in_order(question, searched(), results, worth) == (order, saving)


@pytest.mark.parametrize(("kl", "made"), [(0.045, ["p300"]), (0.005, ["p300", "p200"])])
def test_what_surely_loses_too_much_is_not_made(kl: float, made: list[str]) -> None:
    """By the finalists' ratio of measured to expected KL, unless that shows that none is expected well."""
    fronts = searched()
    fronts["front"][1]["expected_kl"] = 0.1
    results = [MEASURED[0], finalist("p300", 300, kl)]
    assert made_in_order(asked(), fronts, results, 0.02)[0] == made


def test_usual_ones_are_made_where_they_may_be_smaller() -> None:
    """Not if rounding alone is known to lose too much; a solver may lose less than rounding."""
    kl = {"value": 0.3, "low": 0.2, "high": 0.4}
    usuals = [
        usual("awq", 250, is_solved=True, first_kl=kl),
        usual("Q4_K_M", 240, is_solved=False, first_kl=kl),
        usual("Q8_0", 390, is_solved=False, first_kl=kl),
    ]
    results = [
        *MEASURED,
        finalist("awq", 250, 0.2, "regression"),
        finalist("Q4_K_M", 240, 0.3, "regression"),
    ]
    order, _ = made_in_order(asked(), searched(usuals), results, 0.02)
    assert order == ["p300", "p200", "awq"]
    why = {
        usual["name"]: usual["why"]
        for usual in decide(asked(), searched(usuals), results[:4])["usual"]
    }
    assert why["Q8_0"] == "+30.0% bytes, not a finalist: KL 0.3 (0.2 to 0.4) rounded to nearest"


@pytest.mark.parametrize(
    ("question", "said"),
    [
        (asked(), "So far: Q5_K_M (3.00 bits per weight, 0.293 KiB) is expected to keep the promises: KL 0.04 (0.035 to 0.045)"),
        (asked(size_bytes=250), "none of the usual quantizations keeps the promises when rounded to nearest; Q5_K_M comes closest"),
        (asked(is_bounded=True, promises=[], size_bytes=500), "So far: Q8_0 (4.00 bits"),
        (asked(promises=[{"metric": "flips", "op": "<=", "limit": 0.02, "relative": False}]), "awq (2.00 bits per weight, 0.1953 KiB) may keep"),
    ],
)  # fmt: skip
def test_the_first_answer(question: dict[str, Any], said: str) -> None:
    usuals = [
        usual(name, size, first_kl={"value": kl, "low": 0.875 * kl, "high": 1.125 * kl})
        for name, size, kl in (("awq", 200, 0.2), ("Q5_K_M", 300, 0.04), ("Q8_0", 400, 0.002))
    ]
    sentence = first_sentence(question, [*usuals, usual("fp8", refused="it does not load")], 2048)
    assert said in sentence

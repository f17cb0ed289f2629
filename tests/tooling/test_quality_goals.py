"""The goals of the real model's table, from rows."""

from __future__ import annotations

from typing import Any

import pytest

from tools.quality.goals import DEFAULT_METHOD, Goal, exit_code, goals, markdown


def row(package: str, method: str, kl: float, bits_per_weight: float = 4.3, **options: Any) -> dict:
    options = {"symmetric": False, **options}
    bits = options.pop("bits", 4)
    return {
        "name": f"{package} {method} {bits} {options}",
        "package": package,
        "method": method,
        "grid": f"int{bits}",
        "bits": bits,
        "options": options,
        "bits_per_weight": bits_per_weight,
        "perplexity": 30.0,
        "kl_nats": kl,
        "kl_interval": [0.9 * kl, 1.1 * kl],
        "top1_agreement": 0.75,
        "seconds": 10.0,
    }


def verdicts(rows: list[dict]) -> dict[str, bool | None]:
    beside = (goal for goal in goals(rows) if "peer" in goal.text)
    return {goal.text.split(":")[0]: goal.met for goal in beside}


def test_ours_at_or_below_the_best_peer() -> None:
    peers = [row("hqq", "hqq", 0.3), row("gptqmodel", "gptq", 0.2)]
    assert verdicts([*peers, row("llmopt", "awq", 0.2)]) == {"int4": True}
    assert verdicts([*peers, row("llmopt", "awq", 0.21)]) == {"int4": False}
    assert verdicts(peers) == {"int4": None}


def test_ours_may_not_buy_it_with_more_bits() -> None:
    rows = [row("gptqmodel", "gptq", 0.2), row("llmopt", "awq", 0.1, bits_per_weight=4.5)]
    assert verdicts(rows) == {"int4": None}


def test_an_error_is_no_score() -> None:
    broken = {
        "name": "x",
        "package": "llmopt",
        "grid": "int4",
        "bits": 4,
        "options": {},
        "error": "no",
    }
    assert verdicts([row("gptqmodel", "gptq", 0.2), broken | {"method": "awq"}]) == {"int4": None}


@pytest.mark.parametrize(("kl", "met"), [(0.29, True), (0.31, False)])
def test_share_of_rtn_is_of_the_same_symmetry(kl: float, met: bool) -> None:
    rows = [
        row("llmcompressor", "rtn", 1.0),
        row("llmcompressor", "rtn", 2.0, symmetric=True),
        row("llmopt", "rtn", 5.0),  # its ranges may be searched: no baseline
        row("llmopt", "awq", kl),
    ]
    shares = [goal for goal in goals(rows) if goal.text.startswith("int4: share")]
    assert [goal.met for goal in shares] == [met]


def test_the_default_is_what_wins_within_three_times_gptqs_time() -> None:
    slow = {**row("llmopt", "autoround", 0.1), "seconds": 31.0}
    plain = row("llmopt", DEFAULT_METHOD, 0.2)
    taken = {**plain, "options": {**plain["options"], "rotations": ["R2"], "asymmetric": True}}
    rows = [row("llmopt", "gptq", 0.3), taken, slow]
    assert goals(rows)[-1].met is True
    assert goals([rows[0], plain])[-1].met is False  # not as the command takes it
    assert goals([*rows[:2], {**slow, "seconds": 29.0}])[-1].met is False
    assert goals(rows[1:])[-1].met is None


def test_exit_codes() -> None:
    assert exit_code([Goal("a", True)]) == 0
    assert exit_code([Goal("a", True), Goal("b", None)]) == 3
    assert exit_code([Goal("a", False), Goal("b", None)]) == 1
    assert exit_code([]) == 3


def test_markdown_has_every_row_and_every_error() -> None:
    record = {
        "rows": [
            row("gptqmodel", "gptq", 0.2),
            {**row("gptqmodel", "awq", 0.0), "error": "CUDA is not available"},
        ],
        "calibration": {"shape": [32, 512], "source": "c4.jsonl"},
        "num_tokens": 4094,
        "evaluation": "wiki.test.raw",
        "protocol": "windows",
        "original_perplexity": 26.5,
    }
    del record["rows"][1]["kl_nats"]
    text = markdown(record)
    assert "| int4 | gptqmodel gptq asym | 4.30 | 30.000 | 0.2 (0.18 to 0.22) | 75.0 % |" in text
    assert "Not run: int4 by gptqmodel awq asym: CUDA is not available" in text
    assert "ours not measured: no verdict" in text


@pytest.mark.parametrize(
    ("kl", "stored", "met"), [(1.9, 2.1, True), (2.1, 2.1, False), (1.0, 2.5, None)]
)
def test_lattice_codes_at_or_below_auto_rounds(kl: float, stored: float, met: bool | None) -> None:
    rows = [
        row("autoround", "autoround", 2.0, bits_per_weight=2.36, bits=2),
        row("llmopt", "trellis", kl, bits_per_weight=stored, bits=2) | {"grid": "IQ2_XS"},
    ]
    found = [goal for goal in goals(rows) if goal.text.startswith("2 bits: auto-round")]
    assert [goal.met for goal in found] == [met]

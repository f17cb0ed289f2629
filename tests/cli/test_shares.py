"""Shares on the command line and in recipes: a bare number of 1 and more is refused everywhere."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from llmopt.base.errors import BadInput
from llmopt.bench.gate.gate_options import LimitOptions
from llmopt.bench.gate.limits import COUNTED as COUNTS
from llmopt.bench.gate.limits import MEASURED, SCORED, parse_gate
from llmopt.bench.studies.recipe import CompareStep
from llmopt.bench.studies.starts_plan import Build, StartsPlan
from llmopt.cli import main


def llmopt(*words: str) -> int:
    app = main.application(words[0])
    return main.run_guarded(lambda: app([*words], standalone_mode=False), debug=False)


# Every option that takes a share, with the words before it. None of these files has to exist.
SHARES = {
    ("compare", "--threshold"): ("compare", "base", "new"),
    ("compare", "--plan-runs"): ("compare",),
    ("compare", "--max-ppl-increase"): ("compare", "base", "new"),
    ("compare", "--min-top1"): ("compare", "base", "new"),
}


def options_with_percent(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Options whose help shows a percentage, gates and promises left out, whose syntax is their own."""
    for name, inner in getattr(command, "commands", {}).items():
        yield from options_with_percent(inner, (*path, name))
    for option in () if hasattr(command, "commands") else command.params:
        if "%" in (getattr(option, "help", None) or "") and not {"--gate", "--promise"} & {
            *option.opts
        }:
            yield (*path, option.opts[0])


def test_every_option_that_shows_a_percentage_is_listed() -> None:
    assert {*options_with_percent(typer.main.get_command(main.application()))} == {*SHARES}


@pytest.mark.parametrize("option", SHARES)
@pytest.mark.parametrize("word", ["5", "1", "1.5"])
def test_an_option_refuses_a_bare_number_that_is_no_fraction(
    option: tuple[str, str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert llmopt(*SHARES[option], option[-1], word) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"{word!r} is no share" in line and f"{word}%" in line and str(float(word) / 100) in line


@pytest.mark.parametrize(
    "key",
    [
        k
        for k, hint in typing.get_type_hints(CompareStep).items()
        if hint not in (bool | str, float | None) and k != "gate_speed"
    ],
)
@pytest.mark.parametrize("value", [5, 1, "5"])
def test_a_recipe_refuses_it_too(key: str, value: Any) -> None:
    step = CompareStep.model_validate({key: value})
    with pytest.raises(BadInput, match=r"is no share: write \d%"):
        step.options.check()
    assert CompareStep.model_validate({key: "150%"}).model_dump()[key] == "150%"


@pytest.mark.parametrize("name", ["threshold", "max_ppl_increase", "min_top1"])
def test_paired_starts_refuse_it_too(name: str) -> None:
    build, limits = Build("base", "llmopt"), dict[str, Any]({name: "5"})
    plan = StartsPlan(build, build, (), LimitOptions(**limits))
    with pytest.raises(BadInput, match="'5' is no share"):
        plan.limits.check()


def test_a_gate_on_a_share_is_at_most_one() -> None:
    units = {key: one.unit for part in (MEASURED, COUNTS, SCORED) for key, one in part.items()}
    shares = [key for key, unit in units.items() if unit == "share"]
    assert {"error_rate", "slo_share", "top1"} <= {*shares}
    for key in shares:
        for word in (f"{key}<=5", f"{key}>=95", f"{key}<=1"):
            with pytest.raises(BadInput, match=r"a bound on a share from 0 to 1: write 0\.\d+ for"):
                parse_gate(word)
        assert parse_gate(f"{key}>=1 {key}<=0.05")[0].bound == 1
    # What has a unit may be any number, and a change may double.
    assert [limit.bound for limit in parse_gate("kl<=2 duration<=30 median_ttft_ms<=+150%")] == [
        2,
        30,
        1.5,
    ]


@pytest.mark.parametrize("word", ["perplexity<=+5", "completed>=-5", "weight_bytes<=+0", "kl<=-1"])
def test_a_signed_number_in_a_gate_needs_its_percent_sign(word: str) -> None:
    with pytest.raises(BadInput, match=r"a bound on the value itself: write [+-]\d% for a change"):
        parse_gate(word)


@pytest.mark.parametrize("word", ["inf", "nan", "-1"])
def test_the_highest_divergence_is_a_number_of_nats(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert llmopt("compare", "base", "new", "--max-kl", word) == 2
    assert f"divergence is {float(word)}: give nats" in capsys.readouterr().err
    with pytest.raises(BadInput, match="give nats"):
        CompareStep(max_kl=float(word)).options.check()


def test_an_agreement_is_at_most_all() -> None:
    with pytest.raises(BadInput, match="is 500%: give at most 100%"):
        CompareStep(min_top1="500%").options.check()

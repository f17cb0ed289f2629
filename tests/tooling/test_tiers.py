"""Tiers of the suite: which cases of a sweep `make test` runs."""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from ..support.tiers import spread

pytest_plugins = ["pytester"]


def test_every_value_is_shown_before_one_is_repeated() -> None:
    cases = [{"family": family, "bits": bits} for family, bits in product("abcd", (2, 3, 4))]
    chosen = [cases[place] for place in spread(cases, 4)]
    assert {case["family"] for case in chosen} == set("abcd")
    assert {case["bits"] for case in chosen} == {2, 3, 4}


def test_one_axis_is_spread_over_its_order() -> None:
    assert spread([{"family": place} for place in range(9)], 3) == [0, 4, 8]


def test_a_sweep_of_few_cases_runs_whole() -> None:
    assert spread([{"family": place} for place in range(2)], 5) == [0, 1]


def test_cases_left_out_are_marked_whole(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nmarkers =\n  whole\n  sweep")
    pytester.makeconftest(
        """
from tests.support.tiers import mark_unswept

def pytest_collection_modifyitems(items):
    mark_unswept(items)
"""
    )
    pytester.makepyfile(
        """
import pytest

@pytest.mark.sweep(1)
@pytest.mark.parametrize("case", ["first", "second"])
def test_swept(case): pass

def test_other(): pass
"""
    )
    pytester.runpytest_inprocess("-m", "not whole").assert_outcomes(passed=2, deselected=1)
    pytester.runpytest_inprocess("-m", "whole").assert_outcomes(passed=1, deselected=2)


def test_a_random_order_keeps_the_tests_of_a_file_together(pytester: pytest.Pytester) -> None:
    for name in "abc":
        pytester.makepyfile(
            **{
                f"test_{name}": "import pytest\n@pytest.mark.parametrize('i', range(5))\ndef test_it(i): pass"
            }
        )
    plugin = ("-p", "tests.support.random_order", "--collect-only", "-q")
    orders = []
    for seed in ("1", "1", "2"):
        lines = pytester.runpytest_inprocess(*plugin, "--order-seed", seed).outlines
        orders.append([line for line in lines if "::" in line])
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])
    files = [line.partition("::")[0] for line in orders[2]]
    assert sum(a != b for a, b in pairwise(files)) == 2

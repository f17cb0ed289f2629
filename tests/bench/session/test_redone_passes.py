"""A pass that others disturbed is rejected and measured again, within a bound, and stays in the record."""

from __future__ import annotations

from typing import Any

import pytest
from llmopt.bench.metrics.trace import LoadPass
from llmopt.bench.options.options import BenchOptions
from llmopt.bench.record.run_record import MeasuredPass, Measurement
from llmopt.bench.report.parts import remarks
from llmopt.bench.session.session import BenchSession


class FakeSession(BenchSession):
    """Passes that are disturbed, or not, as given."""

    def __init__(self, disturbed: list[bool], *, most: int) -> None:
        options = BenchOptions(num_runs=2, max_redone_passes=most)
        nothing: Any = None
        super().__init__(Measurement(options, "fake", {}, nothing, nothing), None)
        self._disturbed = disturbed
        self.numbers: list[int] = []

    def identity(self) -> dict[str, Any]:
        raise AssertionError("these tests only make passes")

    def _score(self) -> None:
        raise AssertionError("these tests only make passes")

    def _facts(self) -> Any:
        raise AssertionError("these tests only make passes")

    def _measure(self, number: int, description: str) -> MeasuredPass:
        self.numbers.append(number)
        usage = {"disturbed": self._disturbed.pop(0)}
        return MeasuredPass(LoadPass([], float(number)), None, usage)

    def outcome(self) -> tuple[list[bool], int]:
        """(whether each pass of the record is disturbed, how many were rejected)."""
        assert self.run_pass() and self.run_pass()
        return [taken.disturbed for taken in self.measured.passes], len(self.measured.rejected)


@pytest.mark.parametrize(
    ("disturbed", "most", "kept", "rejected"),
    [
        ([False, False], 2, [False, False], 0),
        ([True, False, False], 2, [False, False], 1),
        ([True, True, True, False], 2, [True, False], 2),
        ([True, False, True, True], 2, [False, True], 2),
        ([True, True], 0, [True, True], 0),
    ],
)
def test_disturbed_passes_are_measured_again(
    disturbed: list[bool], most: int, kept: list[bool], rejected: int
) -> None:
    session = FakeSession(disturbed, most=most)
    assert session.outcome() == (kept, rejected)
    # Over HTTP each number has a first token of its own, so that no pass finds another's prefixes.
    assert session.numbers == list(range(1, 3 + rejected))


def test_the_report_says_which_passes_were_disturbed() -> None:
    run = {"disturbed": True, "disturbed_because": "30% stolen"}
    calm = {"disturbed": False, "disturbed_because": None}
    silent = {"workload": {"notes": []}, "metrics": {"e2el": {"count": 0}}}
    record = silent | {"runs": [calm, run], "rejected_passes": [run]}
    assert remarks({"llmopt": record}) == [
        "1 of 2 passes were disturbed: 30% stolen.",
        "Passes measured again because they were disturbed: 1 (30% stolen).",
    ]
    assert remarks({"llmopt": silent | {"runs": [calm, {}]}}) == []

"""Where a decode step goes: parts of a real engine, and the reason in words from numbers made by hand."""

from __future__ import annotations

from typing import Any

import pytest
from llmopt.bench.load.step_split import PARTS, reason_in_words, split_sentence, split_table
from llmopt.bench.options.options import BenchOptions
from llmopt.bench.session.session import BenchSession

OPTIONS = BenchOptions(
    num_prompts=4, num_runs=1, output_len=6, quality=False, num_threads=1, max_concurrency=4
)


@pytest.mark.parametrize("overlapped", [False, True])
def test_the_parts_of_a_real_step_add_up_and_nothing_stays_wrapped(overlapped: bool) -> None:
    options = OPTIONS.model_copy(
        update={"slowdown": 50.0, "slowdown_where": "sampler", "async_scheduling": overlapped}
    )
    session = BenchSession(options)
    slowed = session.engine.runner._sampler.begin
    assert session.run_pass()
    split = session.finish().result["llmopt"]["step_split"]
    assert set(split["parts_ms"]) == set(PARTS) and split["num_steps"] == 5
    assert split["step_ms"] == pytest.approx(sum(split["parts_ms"].values()))
    assert all(spent > 0 for part, spent in split["parts_ms"].items() if part != "rest")
    # The sampler was slowed on purpose: it shows, and stays slowed.
    assert split["parts_ms"]["sampling"] > split["parts_ms"]["scheduling"]
    assert session.engine.runner._sampler.begin is slowed
    for owner, name in ((session.engine, "step"), (session.engine.scheduler, "schedule")):
        assert name not in vars(owner)


def result(kernels: float, weights: int) -> dict[str, Any]:
    parts = dict.fromkeys(PARTS, 0.1) | {"kernels": kernels}
    split = {"num_steps": 9, "step_ms": sum(parts.values()), "parts_ms": parts}
    return {
        "llmopt": {
            "step_split": split,
            "memory": {"weight_bytes": weights},
            "roofline": {"ceilings": {"bandwidth": 1e9}},
        }
    }


def test_the_reason_in_words() -> None:
    base, slower, faster = result(1.5, 1_000_000), result(2.5, 400_000), result(0.9, 400_000)
    # 600,000 bytes at 1e9 bytes a second are 0.6 ms of a step of 2 ms.
    said = reason_in_words(base, slower) or ""
    assert "take 0.600 ms to read" in said and "30.0 % of the base's decode step of 2.00 ms" in said
    assert "1.00 ms longer; most of it is kernels (+1.00 ms): unpacking the codes" in said
    assert "0.60 ms shorter; most of it is kernels (-0.60 ms)." in (
        reason_in_words(base, faster) or ""
    )
    assert reason_in_words(slower, base) is None
    base["llmopt"]["step_split"] = None
    assert reason_in_words(base, slower) is None
    assert split_table({"a": base}) is None and split_sentence(base) is None


def test_the_table_and_the_sentence() -> None:
    table = split_table({"a": result(1.5, 1), "b": result(2.5, 1)})
    assert table is not None and list(table.header) == ["ms of a decode step", "a", "b", ""]
    assert [row[1:3] for row in table.rows if row[0] == "kernels"] == [["1.50", "2.50"]]
    assert table.rows[-1][:3] == ["whole step", "2.00", "3.00"]
    assert (split_sentence(result(1.5, 1)) or "").startswith(
        "Of the 2.00 ms of a decode step 75 % go to kernels"
    )

"""Every row of the device table: what it must say, and its peak from the cores where they are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llmopt.engine.planner.devices import devices, find_device

ROWS: list[dict[str, Any]] = json.loads(
    (Path(find_device.__code__.co_filename).parent / "devices.json").read_text()
)
# Their cores or clocks are not known well enough to be asserted.
NOT_RECOMPUTED = {"B200", "GB200", "B300", "RTX PRO 6000"}
# The L4's sheet rounds down to a clock that it holds; the L40S' to a whole number of sparse FLOP.
TOLERANCE = {"L4": 0.04, "L40S": 0.015}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_a_row_is_complete(row: dict[str, Any]) -> None:
    assert row["date"]
    for part in (row["visible_bytes"], row["bandwidth_gb_s"]):
        assert part["value"] > 0
        assert part["source"]
    # A process sees less than the label in GiB; an estimate says that it is one.
    assert 0.85 < row["visible_bytes"]["value"] / (row["label_gb"] * 2**30) <= 1
    assert row["visible_bytes"].get("estimated", False) == (
        "estimated" in row["visible_bytes"]["source"]
    )
    assert row["peaks"]
    for peak in row["peaks"].values():
        assert peak["dense"] is True
        assert peak["accumulate"] in ("fp32", "fp16", "int32")
        assert peak["source"]
    assert {"bf16", "fp16"} & set(row["peaks"])


def test_rows_without_cores_are_the_ones_that_are_named() -> None:
    assert {row["name"] for row in ROWS if row["cores"] is None} == NOT_RECOMPUTED


@pytest.mark.parametrize("row", [row for row in ROWS if row["cores"]], ids=lambda row: row["name"])
def test_the_peak_is_cores_times_operations_times_clock(row: dict[str, Any]) -> None:
    """Tensor cores x FMA per clock x 2 x boost clock: dense, with float32 accumulation."""
    cores = row["cores"]
    assert cores["source"]
    computed = cores["count"] * cores["fma_per_clock"] * 2 * cores["clock_ghz"] / 1e3
    stated = row["peaks"].get("bf16") or row["peaks"]["fp16"]
    assert stated["value"] == pytest.approx(computed, rel=TOLERANCE.get(row["name"], 0.005))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_narrower_types_are_as_much_faster_as_they_are_narrower(row: dict[str, Any]) -> None:
    peaks = {name: peak["value"] for name, peak in row["peaks"].items()}
    if "fp8" in peaks:
        assert peaks["fp8"] / peaks["bf16"] == pytest.approx(2, rel=0.015)
    if "fp16_fp16acc" in peaks:
        assert peaks["fp16_fp16acc"] / peaks["bf16"] == pytest.approx(2, rel=0.005)
    if "fp4" in peaks and row["name"] not in ("B300", "RTX 5090"):  # more fp4 units than of others
        assert peaks["fp4"] / peaks["fp8"] == pytest.approx(2, rel=0.005)


def test_estimates_are_marked_on_the_device() -> None:
    estimated = {device.name for device in devices() if device.memory_is_estimated}
    assert estimated == {row["name"] for row in ROWS if row["visible_bytes"].get("estimated")}
    assert find_device("h100").memory_bytes == int(79.18 * 2**30)

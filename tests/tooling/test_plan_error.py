"""The command that fits and judges the plan's speed: rows, split, fit, bands."""

from __future__ import annotations

import csv
import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from llmopt.engine.planner import error_bands
from llmopt.engine.planner.catalog import model_names
from llmopt.engine.planner.error_bands import Known
from llmopt.engine.planner.expected import CHUNK_TOKENS, Loop, steady_state, throughput
from llmopt.engine.planner.step_model import Parallelism, StepModel, StepWork
from llmopt.engine.planner.step_parameters import parameter_file

from tools.plan_error import disaggregated
from tools.plan_error.columns import Columns, Predicted, kv_bytes
from tools.plan_error.cpu_records import (
    KEY,
    PREFILL,
    Configuration,
    band,
    configurations,
    transfers,
)
from tools.plan_error.field import read_field
from tools.plan_error.fit import OF_ROWS, PRIORS, Fit, as_json, fit, levenberg_marquardt
from tools.plan_error.own_machine import COUNTS, corrected, lines
from tools.plan_error.report import (
    bands,
    coverage,
    judged_rows,
    needed_stretches,
    stretch_of,
    unlike_entry,
)
from tools.plan_error.rivals import nearest_rows
from tools.plan_error.rows import parallelism, read_rows, split_group
from tools.plan_error.scripts import chunk_tokens, draft_tokens, is_known, wait_steps

ROW = {
    "id": "a",
    "silicon_data_source": "source_file=dated.csv; silicon_concurrency=8",
    "backend": "vllm",
    "backend_version": "0.19.0",
    "model_path": "meta-llama/Llama-3.1-8B-Instruct",
    "system": "h100_sxm",
    "mode": "agg",
    "isl": "1024",
    "osl": "512",
    "gemm_quant_mode": "fp8",
    "moe_quant_mode": "fp8",
    "batch_size": "8",
    "tp_size": "1",
    "pp_size": "1",
    "attention_dp_size": "1",
    "moe_tp_size": "1",
    "moe_ep_size": "1",
    "silicon_ttft_ms": "40",
    "silicon_tpot_ms": "6",
}


def written(folder: Path, rows: list[dict[str, str]]) -> Path:
    path = folder / "rows.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, list(rows[-1]))
        table.writeheader()
        table.writerows(rows)
    return path


def test_equal_configurations_count_once_with_their_medians(tmp_path: Path) -> None:
    measured = ["6", "7", "20"]
    rows = [ROW | {"id": str(i), "silicon_tpot_ms": m} for i, m in enumerate(measured)]
    apart = ROW | {"mode": "disagg"}
    (row,) = read_rows(written(tmp_path, [*rows, apart]))
    assert (row.tpot_seconds, row.count, row.model) == (0.007, 3, "llama-3.1-8b")
    assert (row.prompt, row.output, row.concurrency) == (1024, 512, 8)


def test_the_split_is_by_deployment() -> None:
    assert split_group(ROW) == "llama|h100_sxm|1|1|1"
    r1 = ROW | {"model_path": "deepseek-ai/DeepSeek-R1", "attention_dp_size": "", "tp_size": "8"}
    assert split_group(r1) == "deepseek|h100_sxm|8|1|1"


@pytest.mark.parametrize(
    ("tp", "dp", "width", "ep", "meant"),
    [
        ("8", "1", "8", "1", Parallelism(8)),
        ("8", "1", "1", "8", Parallelism(8, ep=8)),
        ("64", "1", "8", "8", Parallelism(8, ep=8)),
        ("16", "1", "4", "4", Parallelism(4, ep=4)),
        ("1", "64", "8", "8", Parallelism(1, ep=8, attention_dp=8)),
        ("4", "4", "1", "16", Parallelism(1, ep=4, attention_dp=4)),
        ("72", "1", "72", "1", Parallelism(1, ep=72, attention_dp=72)),
    ],
)
def test_multiplied_sizes_are_divided_again(
    tp: str, dp: str, width: str, ep: str, meant: Parallelism
) -> None:
    sizes = {"tp": tp, "attention_dp": dp, "moe_tp": width, "moe_ep": ep}
    assert parallelism({f"{name}_size": size for name, size in sizes.items()}) == meant


OSS = {"model_path": "openai/gpt-oss-120b"}
R1 = {"model_path": "deepseek-ai/DeepSeek-R1", "backend": "trtllm", "tp_size": "8"}


@pytest.mark.parametrize(
    ("row", "drafts"),
    [
        (R1 | {"silicon_data_source": "measured=2026-02-05; release:1.2.0rc6.post3"}, 3),
        (R1 | {"silicon_data_source": "measured=2026-01-29; release:1.2.0rc6.post2"}, 0),
        (R1 | {"silicon_data_source": "measured=2026-01-14; release:1.1.0rc2.post2"}, 3),
        (R1 | {"silicon_data_source": "measured=2025-12-15; release:1.1.0rc2.post2"}, 0),
        ({"silicon_data_source": "release:1.2.0rc6.post3"}, 0),
    ],
)
def test_draft_tokens_are_those_of_the_public_configurations(
    row: dict[str, str], drafts: int
) -> None:
    row = ROW | row
    assert draft_tokens([row], parallelism(row)) == drafts
    spread = row | {"tp_size": "1", "attention_dp_size": "8", "moe_ep_size": "8"}
    assert draft_tokens([spread], parallelism(spread)) == min(drafts, 1)


@pytest.mark.parametrize(
    ("row", "known"),
    [
        ({"system": "gb200", "silicon_data_source": "a.csv; measured=2025-11-17T00"}, False),
        ({"system": "gb200", "silicon_data_source": "a; measured=2025-11-17; image=b"}, True),
        ({"system": "gb200", "silicon_data_source": "a.csv; measured=2026-01-17T00"}, True),
        (OSS | {"batch_size": "512", "silicon_data_source": "measured=2025-12-08T00"}, False),
        (OSS | {"batch_size": "512", "silicon_data_source": "measured=2025-12-09T00"}, True),
        (OSS | {"batch_size": "64", "silicon_data_source": "measured=2025-12-08T00"}, True),
    ],
)
def test_rows_whose_scripts_ran_something_else_are_left_out(
    row: dict[str, str], known: bool
) -> None:
    assert is_known(ROW | row) == known


def test_no_deployment_has_more_sequences_than_the_client_sends(tmp_path: Path) -> None:
    source = {"silicon_data_source": "a.csv; silicon_concurrency=32"}
    wide = {"batch_size": "32", "attention_dp_size": "64", "moe_ep_size": "8", "tp_size": "1"}
    (row,) = read_rows(written(tmp_path, [ROW | R1 | source | wide]))
    assert row.concurrency == 32


def test_a_configuration_under_two_names_counts_once(tmp_path: Path) -> None:
    rows = [
        ROW | R1 | {"model_path": f"deepseek-ai/{name}"} for name in ("DeepSeek-R1", "DeepSeek-V3")
    ]
    (row,) = read_rows(written(tmp_path, rows))
    assert row.count == 2


LLAMA = {"backend": "trtllm", "model_path": "nvidia/Llama-3.3-70B-Instruct-FP8"}
DATED = {"silicon_data_source": "source_file=2026-04-06.csv; measured=2026-02-05"}
SHORT = {"isl": "1024", "osl": "1024"}
POLLING = {"backend": "sglang", "system": "b200_sxm"}
QWEN = POLLING | {"model_path": "Qwen/Qwen3.5-397B-A17B"}
GAP = {"silicon_data_source": "source_file=qwen3.5-397b-gap-analysis.csv"}
LATE = {"system": "b300_sxm", "backend_version": "0.5.10.post1"}


@pytest.mark.parametrize(
    ("row", "parallel", "clients", "drafts", "steps"),
    [
        (LLAMA | DATED | SHORT, Parallelism(4), 8, 0, 20),
        (LLAMA | DATED | SHORT, Parallelism(8), 8, 0, 0),
        (LLAMA | SHORT, Parallelism(4), 8, 0, 0),
        (LLAMA | DATED | {"isl": "8192"}, Parallelism(4), 8, 0, 0),
        (R1 | DATED | SHORT, Parallelism(1, ep=8, attention_dp=8), 8, 0, 60),
        (R1 | DATED | SHORT | {"system": "b200_sxm"}, Parallelism(8), 64, 0, 40),
        (R1 | DATED | SHORT | {"system": "b200_sxm"}, Parallelism(8), 64, 3, 0),
        (R1 | DATED | SHORT | {"system": "b200_sxm"}, Parallelism(8), 32, 0, 0),
        (R1 | DATED | POLLING, Parallelism(8), 16, 0, 30),
        (R1 | DATED | POLLING, Parallelism(8), 8, 0, 10),
        (R1 | DATED | POLLING, Parallelism(4), 16, 0, 10),
        (R1 | DATED | POLLING | {"gemm_quant_mode": "nvfp4"}, Parallelism(4), 16, 0, 30),
        (R1 | DATED | POLLING | {"system": "h200_sxm"}, Parallelism(8), 16, 0, 0),
        (QWEN | GAP, Parallelism(4), 16, 0, 30),
        (QWEN | DATED | LATE | {"gemm_quant_mode": "fp8"}, Parallelism(4), 16, 0, 10),
        (QWEN | DATED | LATE | {"gemm_quant_mode": "nvfp4"}, Parallelism(4), 16, 0, 30),
        (POLLING | DATED | {"model_path": "zhipuai/GLM-5"}, Parallelism(8), 16, 0, 0),
    ],
)
def test_prompts_wait_for_the_steps_that_the_public_scripts_set(
    row: dict[str, str], parallel: Parallelism, clients: int, drafts: int, steps: int
) -> None:
    assert wait_steps(ROW | row, parallel, clients, drafts) == steps


@pytest.mark.parametrize(
    ("date", "ranks", "drafts", "tokens"),
    [
        ("2025-12-15", 1, 0, 64 + 1024 + 64),
        ("2026-01-14", 8, 1, 128 + 8 * (1024 + 64)),
        ("2026-01-29", 1, 0, CHUNK_TOKENS),
        ("2026-02-05", 1, 3, 256 + 1024 + 64),
    ],
)
def test_a_step_holds_the_prompts_that_the_public_scripts_let_it(
    date: str, ranks: int, drafts: int, tokens: int
) -> None:
    row = (
        ROW | R1 | SHORT | {"silicon_data_source": f"source_file=a.csv; measured={date}T00:00:00Z"}
    )
    parallel = Parallelism(8 // ranks, ep=ranks, attention_dp=ranks)
    assert chunk_tokens(row, parallel, 64, drafts) == tokens


def test_accepted_draft_tokens_shorten_the_time_of_a_token(tmp_path: Path) -> None:
    plain = R1 | {"silicon_data_source": "measured=2026-01-29; release:1.2.0rc6.post2"}
    drafted = R1 | {"silicon_data_source": "measured=2026-02-05; release:1.2.0rc6.post3"}
    drafted |= {"backend_version": "1.2.0rc6.post3"}
    columns = Columns.of(read_rows(written(tmp_path, [ROW | plain, ROW | drafted])))
    p = {name: np.full(2, prior.value) for name, prior in PRIORS.items()}
    for acceptance, faster in ((0.01, False), (0.9, True)):
        (_, _), (one, three) = columns.predict(p | {"draft.acceptance": np.full(2, acceptance)})
        assert (three < one / 2) == faster


NOT_MEASURED: list[Known] = ["model not measured"]


def loads() -> list[dict[str, str]]:
    """Rows of two models on two GPUs under several loads, with times of a plain law."""
    rows = []
    for model in ("meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-32B"):
        for system in ("h100_sxm", "b200_sxm"):
            for tp in (1, 2, 4):
                for batch, prompt in itertools.product((1, 8, 32), (512, 4096)):
                    large = 4 if "32B" in model else 1
                    tpot = 5 * large / tp + 0.05 * batch
                    rows.append(
                        ROW
                        | {"model_path": model, "system": system, "tp_size": str(tp)}
                        | {
                            "batch_size": str(batch),
                            "isl": str(prompt),
                            "silicon_tpot_ms": str(tpot),
                        }
                        | {"silicon_ttft_ms": str(30 * large / tp + batch)}
                        | {"silicon_data_source": f"dated; silicon_concurrency={batch}"}
                    )
    return rows


def test_a_fit_lowers_the_error_and_is_written_with_units(tmp_path: Path) -> None:
    columns = Columns.of(read_rows(written(tmp_path, loads())))
    priors = {name: np.full(len(columns.rows), prior.value) for name, prior in PRIORS.items()}
    ttft, tpot = columns.predict(priors | {"layer.seconds": 4 * priors["layer.seconds"]})
    measured = Predicted(ttft, tpot, throughput(columns.loop, ttft, tpot))
    found = fit(replace(columns, measured=measured))
    errors = np.abs(found.predict(columns).tpot / tpot - 1)
    before = np.abs(columns.predict(priors)[1] / tpot - 1)
    assert np.median(errors) < 0.2 * np.median(before)
    content = as_json(found)
    assert {*content["parameters"], *OF_ROWS} == set(PRIORS)
    assert all(entry["unit"] for entry in content["parameters"].values())
    assert content["fitted_configurations"] == len(columns.rows)


def test_what_is_judged_is_what_a_plan_says(tmp_path: Path) -> None:
    """The columns of a fit give the value of the plan's closed form, with the parameters that it has."""
    rows = read_rows(written(tmp_path, loads()))
    columns = Columns.of(rows)
    file = parameter_file()
    slots = [
        (name, tag)
        for name, entry in file["parameters"].items()
        for tag in ("", *entry.get("factors", ()))
    ]
    slots += [(name, "") for name in OF_ROWS]
    entries = [file["parameters"].get(name) or file[name] for name, _ in slots]
    values = [
        e["factors"][tag]["value"] if tag else e["value"]
        for e, (_, tag) in zip(entries, slots, strict=True)
    ]
    corrections = {
        measure: {key: (entry["value"], 0.0) for key, entry in known.items()}
        for measure, known in file["corrections"].items()
    }
    logs = np.log(values)
    found = Fit(tuple(slots), logs, logs, corrections, 0, (), ()).predict(columns)
    for index in range(0, len(rows), 7):
        row, resident = rows[index], columns.loop.resident[index]
        model = StepModel.build(
            row.planned.shape,
            row.recipe,
            row.device,
            engine=row.engine,
            version=row.version,
            parallel=row.parallel,
            kv_bytes_per_element=kv_bytes(row),
        )
        plan = steady_state(model, Loop(row.prompt, row.output, row.concurrency, resident))
        judged = [column[index] for column in found]
        assert judged == pytest.approx(
            [plan.ttft_seconds, plan.tpot_seconds, plan.throughput], rel=1e-3
        )


def test_corrections_are_few_and_of_no_model(tmp_path: Path) -> None:
    corrections = parameter_file()["corrections"]
    assert sum(map(len, corrections.values())) <= 60
    names = {name.split("-")[0] for name in model_names()}
    for key in (key for known in corrections.values() for key in known):
        engine = key.split("|")[0]
        parts = key.removeprefix("llama.cpp")  # the engine
        assert not any(name in parts for name in names if len(name) > 3), key
        assert " " not in engine or engine.split(" ")[1], f"{key}: no version"


FIELD = {
    "gpu": "NVIDIA H100 80GB HBM3",
    "n_gpus": "2",
    "engine": "vLLM 0.20.1+transformers",
    "model": "meta-llama/Llama-3.1-8B-Instruct",
    "weights_dtype": "int8 W8A16",
    "kv_dtype": "auto",
    "input_len": "282",
    "output_len": "355",
    "concurrency_or_batch": "8",
    "metric": "tpot_p50",
    "value": "10",
    "notes": "tensor parallel = n_gpus",
}


def test_metrics_of_one_load_of_the_field_are_one_row(tmp_path: Path) -> None:
    lines = [
        FIELD,
        FIELD | {"value": "12"},
        FIELD | {"metric": "ttft_median", "value": "50"},
        FIELD | {"concurrency_or_batch": "2 req/s Poisson"},
        FIELD | {"model": "nobody/nothing-3b"},
        FIELD
        | {
            "concurrency_or_batch": "1000 requests at once",
            "metric": "output_throughput",
            "value": "900",
        },
    ]
    rows, unread = read_field(written(tmp_path, lines))
    assert (len(rows), unread) == (3, 1)
    closed, poisson, queued = rows
    assert (closed.tpot_seconds, closed.ttft_seconds, closed.parallel) == (
        0.011,
        0.05,
        Parallelism(2),
    )
    assert (closed.engine, closed.version, closed.weights) == ("vllm", "0.20.1", "int8")
    assert poisson.concurrency == round(2 * 0.01 * 355)
    assert (queued.throughput, queued.concurrency) == (900, 1000)
    columns = Columns.of(rows)
    assert np.isnan(columns.targets[0][2]) and columns.targets[2][2] == 900


def test_levenberg_marquardt_finds_a_line() -> None:
    x = np.linspace(0, 1, 20)

    def residuals(p: np.ndarray) -> np.ndarray:
        return p[0] + p[1] * x - (2 + 3 * x)

    jacobian = np.column_stack([np.ones(20), x])
    found = levenberg_marquardt(residuals, lambda p: jacobian, np.zeros(2))
    assert found == pytest.approx([2, 3], abs=1e-2)


def test_interpolation_returns_what_it_knows_and_bands_hold_their_rows(tmp_path: Path) -> None:
    columns = Columns.of(read_rows(written(tmp_path, loads())))
    near = nearest_rows(columns, columns)
    assert np.median(np.abs(near.tpot / columns.measured.tpot - 1)) < 0.1
    judged = judged_rows(columns, near, NOT_MEASURED * len(columns.rows))
    found = bands(judged)
    assert found["vllm|hopper|model not measured"]["rows"] == len(judged) // 2 == 36


def test_a_measure_with_few_rows_has_the_band_of_rows_that_nothing_is_like(tmp_path: Path) -> None:
    columns = Columns.of(read_rows(written(tmp_path, loads())))
    predicted = Predicted(*(1.1 * column for column in columns.measured))
    judged = judged_rows(columns, predicted, NOT_MEASURED * len(columns.rows))
    sparse = [(row, like, (ratios[0], np.nan, ratios[2])) for row, like, ratios in judged]
    key = "vllm|hopper|model not measured"
    assert key not in bands(sparse)
    unlike = unlike_entry(judged)
    band = bands(sparse, unlike=unlike)[key]
    assert band["ttft"] == unlike["ttft"] and band["tpot"] == bands(judged)[key]["tpot"]


def test_bands_are_stretched_until_they_hold_nine_of_ten_rows_of_other_models(
    tmp_path: Path,
) -> None:
    columns = Columns.of(read_rows(written(tmp_path, loads())))
    # One model is predicted well, and the other twice as fast as it is.
    off = np.array([2.0 if row.model == "qwen3-32b" else 1.0 for row in columns.rows])
    noise = np.linspace(0.9, 1.1, len(off))
    predicted = Predicted(*(column / off / noise for column in columns.measured))
    judged = 2 * judged_rows(columns, predicted, NOT_MEASURED * len(columns.rows))
    unlike = unlike_entry(judged)
    needed = needed_stretches(judged, judged, lambda row: row.model, unlike)
    assert coverage(needed, dict.fromkeys(("tpot", "ttft", "throughput"), 1.0))["tpot"] < 0.2
    stretch = stretch_of(needed)
    assert stretch["tpot"] > 3 and coverage(needed, stretch)["tpot"] == pytest.approx(0.9, abs=0.02)
    plain, wide = (
        bands(judged, s)["vllm|hopper|model not measured"]
        for s in (None, {"model not measured": stretch})
    )
    assert wide["tpot"][0] < plain["tpot"][0] < plain["tpot"][1] < wide["tpot"][1]


def test_rows_of_a_deployment_correct_the_others_of_it(tmp_path: Path) -> None:
    columns = Columns.of(read_rows(written(tmp_path, loads())))
    factors = {group: 1.3 + 0.2 * i for i, group in enumerate({r.group for r in columns.rows})}
    factor = np.array([factors[row.group] for row in columns.rows])
    predicted = Predicted(*(column / factor for column in columns.measured))
    judged = judged_rows(columns, predicted, NOT_MEASURED * len(columns.rows))
    none, two = (corrected(judged, count) for count in (0, 2))
    assert len(none) == len(two) > 0
    errors = [np.median([abs(one.error) for one in found]) for found in (none, two)]
    assert errors[1] < 0.6 * errors[0]
    assert np.median([one.span for one in two]) < np.median([one.span for one in none])
    assert len(list(lines(judged))) == 1 + len(COUNTS)


def test_cpu_configurations_predict_each_other_as_a_run_does() -> None:
    known = configurations()
    assert len({one.model for one in known}) >= 4
    found = list(transfers(known))
    assert all(fitted != held_out for fitted, held_out, _, _ in found)
    entry = json.loads(Path(error_bands.__file__).with_name("cpu_band.json").read_text())["bands"][
        KEY
    ]
    assert band(found, len(known)) == entry, "python -m tools.plan_error.cpu_records --write"
    low, high = entry["tpot"]
    assert low < 1 < high


def test_a_cpu_step_is_predicted_by_the_longer_of_its_bytes_and_operations() -> None:
    run = Configuration("a", "run", {"alone": (100.0, 1.0, 1.0), PREFILL: (0.0, 50.0, 2.0)})
    other = Configuration("b", "other", {"alone": (300.0, 1.0, 4.0), "batch 16": (1.0, 500.0, 9.0)})
    assert other.predicted("alone", "alone", run) == 3.0
    assert other.predicted("batch 16", "alone", run) == 20.0
    assert {(m, r) for _, _, m, r in transfers([run, other])} == {("tpot", 4 / 3), ("tpot", 0.45)}


def disaggregated_row(**changes: str) -> dict[str, str]:
    pools = {"num_workers": "2", "tp_size": "2", "attention_dp_size": "1"}
    pools |= {"moe_tp_size": "1", "moe_ep_size": "1"}
    sizes = {f"{pool}_{name}": n for pool in ("prefill", "decode") for name, n in pools.items()}
    return ROW | {"mode": "disagg"} | sizes | changes


def test_disaggregated_pools_are_predicted_apart(tmp_path: Path) -> None:
    rows = [
        disaggregated_row(),
        disaggregated_row(id="b", silicon_ttft_ms="60"),
        disaggregated_row(id="c", decode_num_workers="8"),
        disaggregated_row(id="d", prefill_num_workers="1", isl="8192"),
        disaggregated_row(id="e", prefill_num_workers="", osl="100"),
    ]
    found, unknown = disaggregated.read(written(tmp_path, rows))
    assert (len(found), unknown) == (3, 1)
    plain, spread, queued = (one.predicted() for one in found)
    assert found[0].measured == (0.05, 0.006)
    assert spread[1] < plain[1], "a decode step of fewer sequences"
    alone = found[2].prefill.seconds(StepWork.of(0, 0, 8192))
    assert queued[0] > alone + found[2].prefill.parameters.values["load.fixed"]
    assert len(disaggregated.lines(tmp_path / "rows.csv")) == 3

"""Result formats of other benchmarks, a definition each: how a file is recognised by its content, and its
columns under our names with their units.

A path is dotted: `metrics.request_latency.successful.mean`. A format lists only what its file says; the rest
is unknown (`imported`). The columns are those of the tools' own writers; docs/measuring.md has the table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ...base.errors import BadInput
from ...base.json_lines import json_lines, parse_json
from ..metrics.names import LATENCIES, STATISTICS

Row = Mapping[str, Any]
"""A measured point as its tool wrote it."""
Scaled = tuple[str, float]
"""A dotted path, and our unit as a multiple of the file's."""

SECONDS = 1000.0
"""Milliseconds in a second."""
SAME = {name: name for name in STATISTICS}
LEVELS = ("p90", "p95", "p99")
FLAT = "{statistic}_{metric}_ms"


def at(row: Any, path: str) -> Any:
    """The value at a dotted path; None where there is none."""
    for part in path.split("."):
        if not isinstance(row, Mapping) or part not in row:
            return None
        row = row[part]
    return row


def read_rows(path: Path) -> list[Row]:
    """The objects of a JSON file, of a JSON array, or of a file with one on each line. Raises BadInput: it
    holds something else; a line that is not JSON is named."""
    try:
        value = parse_json(path.read_text(encoding="utf-8-sig"))
    except ValueError:
        value = [row for _, row in json_lines(path)]
    rows = value if isinstance(value, list) else [value]
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise BadInput(f"{path} holds no JSON objects")
    return rows


@dataclass(frozen=True, slots=True)
class Format:
    """A result format.

    Attributes:
        marks: paths that every row of the format has, and no row of another format together.
        metrics: {ttft, tpot, itl or e2el: the path of its statistics}, with the unit.
        statistics: {our statistic: the tool's}; `pattern` joins both to a path.
        values: {our key: path} for rates, counts and totals, in our units.
        says: {field of the identity: path}, such as `load.request_rate`; `version.NAME` names a version.
        date: path of the time of the measurement.
        has_units: True if a metric has a `unit` next to its statistics.
        target: `http` where a client measured a server.
        is_flat: True if every text and truth value at the top of a row, but its date, is a setting.
        points: function that splits the rows of a file into passes.
        requests: function that gives the table of requests of a row, where the file has it.
    """

    tool: str
    marks: Sequence[str]
    metrics: Mapping[str, Scaled] = field(default_factory=dict)
    statistics: Mapping[str, str] = field(default_factory=lambda: SAME)
    pattern: str = "{metric}.{statistic}"
    values: Mapping[str, str] = field(default_factory=dict)
    says: Mapping[str, str] = field(default_factory=dict)
    date: str = "date"
    has_units: bool = False
    target: str = "http"
    is_flat: bool = False
    points: Callable[[Sequence[Row]], Iterable[Row]] = iter
    requests: Callable[[Row, Path], list[dict[str, Any]]] = lambda *_: []


def columns(text: str) -> dict[str, str]:
    """{our name: the file's path} of words `OURS=PATH`, or of one word where both are the same."""
    entries = (word.partition("=") for word in text.split())
    return {name: path or name for name, _, path in entries}


def detailed_requests(row: Row, _: Path) -> list[dict[str, Any]]:
    """The requests of `--save-detailed` and `--output-details`: arrays in seconds, in the prompts' order."""
    names = ("input_lens", "output_lens", "ttfts", "itls", "errors")
    if any(not isinstance(row.get(name), list) for name in names):
        return []
    table = []
    columns = zip(*(row[name] for name in names), strict=False)
    for number, (prompt, output, ttft, gaps, error) in enumerate(columns):
        times: list[float | None] = [None, None, None]
        if is_good := not error and output > 0:
            tpot = sum(gaps) * SECONDS / (output - 1) if output > 1 else None
            times = [ttft * SECONDS, tpot, (ttft + sum(gaps)) * SECONDS]
        table.append(_request(f"{number}:{prompt}", prompt, output, is_good, error or "", *times))
    return table


def _request(*values: Any) -> dict[str, Any]:
    names = ("request_id", "prompt_len", "output_len", "success", "error")
    return dict(zip((*names, "ttft_ms", "tpot_ms", "e2el_ms"), values, strict=True))


def guidellm_requests(row: Row, _: Path) -> list[dict[str, Any]]:
    """The requests, which GuideLLM lists in the order of their ends, by the hash of what was sent."""
    table = []
    for request in at(row, "requests.successful") or ():
        sent, seconds = request.get("request_args"), request.get("request_latency")
        digest = hashlib.sha256(str(sent).encode()).hexdigest()[:16]
        name = digest if sent else request["request_id"]
        lengths = request.get("prompt_tokens"), request.get("output_tokens")
        times = request.get("time_to_first_token_ms"), request.get("inter_token_latency_ms")
        whole = None if seconds is None else seconds * SECONDS
        table.append(_request(name, *lengths, True, "", *times, whole))
    return table


def aiperf_requests(_: Row, path: Path) -> list[dict[str, Any]]:
    """The records next to the summary: `profile_export.jsonl`, of `--profile-export-prefix` its name's."""
    usual = {"profile_export_aiperf": "profile_export"}
    records = path.with_name(f"{usual.get(path.stem, path.stem)}.jsonl")
    table = []
    for record in read_rows(records) if records.is_file() else ():
        if at(record, "metadata.benchmark_phase") == "warmup":
            continue
        metrics: Row = record.get("metrics") or {}
        length = at(metrics, "input_sequence_length.value")
        # Its own count is of the text tokenized again, which differs between answers of equal lengths.
        output = at(metrics, "usage_completion_tokens.value")
        output = output or at(metrics, "output_sequence_length.value")
        name, error = f"{at(record, 'metadata.session_num')}:{length}", record.get("error")
        times = ("time_to_first_token", "inter_token_latency", "request_latency")
        values = [at(metrics, f"{time}.value") for time in times]
        table.append(_request(name, length, output, not error, str(error or ""), *values))
    return table


def guidellm_points(rows: Sequence[Row]) -> Iterator[Row]:
    """A row for each benchmark of the file, with what the file says of all."""
    for row in rows:
        for benchmark in row["benchmarks"]:
            yield {**benchmark, "file": {key: row[key] for key in row if key != "benchmarks"}}


def aiperf_rows(rows: Sequence[Row]) -> Iterator[Row]:
    """The rows, with the options of schema 1.0 under the names of the later ones."""
    for row in rows:
        options: Row = row.get("input_config") or {}
        if load := options.get("loadgen"):
            models, data = at(options, "endpoint.model_names"), options.get("input")
            options = {**options, "models": models, "phases": load, "datasets": data}
        yield {**row, "input_config": options}


def iterations(rows: Sequence[Row]) -> Iterator[Row]:
    """A row for each iteration of `vllm bench latency`, which is a pass."""
    for row in rows:
        for seconds in row["latencies"]:
            every = dict.fromkeys(("mean", "median"), seconds)
            yield {**row, "iteration": {**every, "seconds": seconds, "batches": 1}}


def repetitions(rows: Sequence[Row]) -> Iterator[Row]:
    """A row for each repetition of llama-bench, which is a pass; a prompt test and a generation test of one
    configuration are one point (`pp512`, `tg128`), and a test of both (`-pg`) is a point of its own."""
    groups: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        tests = ("n_prompt", "n_gen", "test_time")
        stays = {
            key: value
            for key, value in row.items()
            if key not in tests and not key.startswith(("avg_", "stddev_", "samples_"))
        }
        kind = "pg" if row["n_prompt"] and row["n_gen"] else "pp" if row["n_prompt"] else "tg"
        groups.setdefault(str(stays), {}).setdefault(kind, []).append(row)
    for kinds in groups.values():
        pairs = zip_longest(kinds.get("pp", ()), kinds.get("tg", ()))
        for tests in (
            *((*pair, None) for pair in pairs),
            *((None, None, pg) for pg in kinds.get("pg", ())),
        ):
            rates = [(test.get("samples_ts") or [test["avg_ts"]]) if test else () for test in tests]
            lengths = {
                name: sum(test[name] for test in tests if test) for name in ("n_prompt", "n_gen")
            }
            first = next(test for test in tests if test)
            test = "pg" if tests[2] else None
            for repeated in zip_longest(*rates):
                measured = dict(zip(("pp", "tg", "pg"), repeated, strict=True))
                yield {**first, **lengths, "test": test, "rate": measured}


VLLM_SERVE = Format(
    "vllm bench serve",
    ("model_id", "tokenizer_id", "num_prompts", "request_throughput", "duration"),
    {name: (name, 1.0) for name in LATENCIES},
    pattern=FLAT,
    values=columns(
        "duration completed failed total_input_tokens total_output_tokens request_throughput "
        "request_goodput output_throughput total_token_throughput max_output_tokens_per_s "
        "max_concurrent_requests"
    ),
    says=columns(
        "model=model_id load.num_prompts=num_prompts load.request_rate=request_rate "
        "load.burstiness=burstiness load.max_concurrency=max_concurrency "
        "load.ramp_up_strategy=ramp_up_strategy load.ramp_up_start_rps=ramp_up_start_rps "
        "load.ramp_up_end_rps=ramp_up_end_rps engine.backend=backend "
        "shape.total_input_tokens=total_input_tokens shape.input_lens=input_lens"
    ),
    is_flat=True,
    requests=detailed_requests,
)
FORMATS: tuple[Format, ...] = (
    replace(VLLM_SERVE, tool="vllm bench sweep", marks=(*VLLM_SERVE.marks, "run_number")),
    VLLM_SERVE,
    Format(
        "vllm bench throughput",
        ("elapsed_time", "num_requests", "total_num_tokens", "requests_per_second"),
        values=columns(
            "duration=elapsed_time completed=num_requests request_throughput=requests_per_second "
            "total_token_throughput=tokens_per_second"
        ),
        says=columns(
            "model=model_id load.num_prompts=num_requests shape.total_num_tokens=total_num_tokens"
        ),
        target="in-process",
    ),
    Format(
        "vllm bench latency",
        ("avg_latency", "latencies", "percentiles"),
        {"e2el": ("iteration", SECONDS)},
        values=columns("duration=iteration.seconds completed=iteration.batches"),
        says=columns("model=model_id"),
        target="in-process",
        points=iterations,
    ),
    Format(
        "sglang bench_serving",
        ("mean_e2e_latency_ms", "output_throughput", "backend", "total_output_tokens_retokenized"),
        {**{name: (name, 1.0) for name in LATENCIES}, "e2el": ("e2e_latency", 1.0)},
        pattern=FLAT,
        values=columns(
            "duration completed total_input_tokens total_output_tokens request_throughput "
            "request_goodput input_throughput output_throughput max_output_tokens_per_s "
            "max_concurrent_requests total_token_throughput=total_throughput"
        ),
        says=columns(
            "model=server_info.model_path version.sglang=server_info.version "
            "dtype=server_info.dtype quantization=server_info.quantization "
            "engine.kv_cache_dtype=server_info.kv_cache_dtype engine.tp_size=server_info.tp_size "
            "engine.dp_size=server_info.dp_size engine.ep_size=server_info.ep_size "
            "engine.attention_backend=server_info.attention_backend "
            "engine.mem_fraction_static=server_info.mem_fraction_static "
            "engine.max_running_requests=server_info.max_running_requests "
            "engine.chunked_prefill_size=server_info.chunked_prefill_size "
            "engine.disable_radix_cache=server_info.disable_radix_cache "
            "engine.speculative_algorithm=server_info.speculative_algorithm "
            "load.request_rate=request_rate load.max_concurrency=max_concurrency "
            "engine.backend=backend shape.dataset=dataset_name "
            "shape.random_input_len=random_input_len shape.random_output_len=random_output_len "
            "shape.random_range_ratio=random_range_ratio "
            "shape.total_input_tokens=total_input_tokens shape.input_lens=input_lens"
        ),
        is_flat=True,
        requests=detailed_requests,
    ),
    Format(
        "guidellm",
        ("benchmarks", "metadata.guidellm_version"),
        {
            "ttft": ("metrics.time_to_first_token_ms.successful", 1.0),
            # Each request's mean gap, weighted by its gaps: the mean is that of all gaps.
            "itl": ("metrics.inter_token_latency_ms.successful", 1.0),
            "e2el": ("metrics.request_latency.successful", SECONDS),
        },
        {
            "mean": "mean",
            "median": "median",
            "std": "std_dev",
            **{level: f"percentiles.{level}" for level in LEVELS},
        },
        values=columns(
            "duration completed=metrics.request_totals.successful "
            "failed=metrics.request_totals.errored "
            "total_input_tokens=metrics.prompt_token_count.successful.total_sum "
            "total_output_tokens=metrics.output_token_count.successful.total_sum "
            "request_throughput=metrics.requests_per_second.successful.mean "
            "request_goodput=metrics.request_goodput.successful.mean "
            "input_throughput=metrics.prompt_tokens_per_second.successful.mean "
            "output_throughput=metrics.output_tokens_per_second.successful.mean "
            "total_token_throughput=metrics.tokens_per_second.successful.mean"
        ),
        says=columns(
            "model=config.backend.model version.guidellm=file.metadata.guidellm_version "
            "load.strategy=config.strategy load.constraints=config.constraints "
            "engine.backend=config.backend.request_format "
            "shape.prompt_tokens=metrics.prompt_token_count.successful.median"
        ),
        date="start_time",
        points=guidellm_points,
        requests=guidellm_requests,
    ),
    Format(
        "aiperf",
        ("aiperf_version", "request_throughput.avg", "request_latency.unit"),
        {
            "ttft": ("time_to_first_token", 1.0),
            "tpot": ("inter_token_latency", 1.0),
            "itl": ("inter_chunk_latency", 1.0),
            "e2el": ("request_latency", 1.0),
        },
        {"mean": "avg", "median": "p50", "std": "std", **{level: level for level in LEVELS}},
        values=columns(
            "duration=benchmark_duration.avg completed=request_count.avg "
            "failed=error_request_count.avg total_input_tokens=total_isl.avg "
            "total_output_tokens=total_osl.avg request_throughput=request_throughput.avg "
            "request_goodput=goodput.avg output_throughput=output_token_throughput.avg "
            "total_token_throughput=total_token_throughput.avg"
        ),
        says=columns(
            "model=input_config.models version.aiperf=aiperf_version "
            "load.phases=input_config.phases load.seed=run_info.random_seed "
            "engine.backend=input_config.endpoint.type shape.datasets=input_config.datasets"
        ),
        date="start_time",
        has_units=True,
        points=aiperf_rows,
        requests=aiperf_requests,
    ),
    Format(
        "llama-bench",
        ("build_commit", "build_number", "n_prompt", "n_gen", "avg_ts"),
        values=columns(
            "input_throughput=rate.pp output_throughput=rate.tg total_token_throughput=rate.pg"
        ),
        says=columns(
            "model=model_filename model_line=model_type weight_bytes=model_size "
            "version.llama.cpp=build_commit hardware.cpu_model=cpu_info hardware.gpu=gpu_info "
            "device=backends engine.num_threads=n_threads engine.n_batch=n_batch "
            "engine.n_ubatch=n_ubatch engine.n_gpu_layers=n_gpu_layers "
            "engine.flash_attn=flash_attn engine.kv_cache_dtype=type_k engine.main_gpu=main_gpu "
            "engine.n_cpu_moe=n_cpu_moe engine.poll=poll shape.n_prompt=n_prompt "
            "shape.n_gen=n_gen shape.n_depth=n_depth shape.test=test"
        ),
        date="test_time",
        target="in-process",
        is_flat=True,
        points=repetitions,
    ),
)

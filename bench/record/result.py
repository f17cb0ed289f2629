"""Results on disk and in memory: the record as strict JSON, the table of requests, a run read back, and
atomic writes of its folder (write, fsync, rename).
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...base.atomic_io import atomic_folder
from ...base.errors import BadInput
from ..metrics.names import LATENCIES, STATISTICS
from ..metrics.trace import LoadPass
from ..quality.positions import QualitySeries, readable
from ..quality.task_items import TaskItems

if TYPE_CHECKING:
    from .imported import ImportedRun

SCHEMA_VERSION = 1
RESULT_NAME = "result.json"


_TEXT, _NUMBER = (str, None), (int, float, None)
_NUMBERS = {"*": _NUMBER}
_INTERVALS = (None, {"*": (None, [_NUMBER])})


def _of_kind(kind: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), kind)


_MEASURED = {f"{name}_{metric}_ms": _NUMBER for name in STATISTICS for metric in LATENCIES}
_MEASURED |= _of_kind(
    _NUMBER,
    "duration completed failed total_input_tokens total_output_tokens request_throughput "
    "request_goodput output_throughput total_token_throughput max_output_tokens_per_s "
    "max_concurrent_requests num_prompts max_concurrency slo_share prefix_cache_hit_rate "
    "joules_per_token other_load joules cpu_seconds waiting_seconds run_delay_seconds "
    "involuntary_switches",
)
_RUNS = [_MEASURED | {"disturbed": (bool, None), "disturbed_because": _TEXT}]
_DISTRIBUTION = _NUMBERS | _of_kind(_INTERVALS, "interval_95 order_interval_95")
_QUALITY = _of_kind(_NUMBER, "num_tokens perplexity kl_nats top1_agreement")
_QUALITY |= _of_kind(_TEXT, "protocol description source token_sha256 reference")
_KINDS = _MEASURED | {
    "date": str,
    "model_id": _TEXT,
    "request_rate": (*_NUMBER, str),
    "llmopt": {
        **_of_kind(str, "run_id name"),
        **_of_kind(_TEXT, "arms quality_reason"),
        **_of_kind(_NUMBER, "slowdown num_runs preemptions prefix_cache_hit_rate"),
        **_of_kind((None, _NUMBERS), "peaks client_lag_ms phases step_trace"),
        **_of_kind((None, {}), "energy plan"),
        "interrupted": bool,
        "identity": {
            **_of_kind(str, "model target device machine"),
            **_of_kind(_TEXT, "model_hash quantization dtype workload"),
            "load": {"request_rate": (*_NUMBER, str), "max_concurrency": _NUMBER},
            "engine": {},
            **_of_kind((None, {}), "hardware server"),
        },
        "workload": {"name": str, "source": _TEXT, "notes": [str], "num_requests": _NUMBER},
        **_of_kind(_RUNS, "runs rejected_passes"),
        "metrics": {"*": (None, _DISTRIBUTION)},
        "spread": {"*": (None, _NUMBERS | {"interval_95": (None, [_NUMBER])})},
        "slo": (None, {"limits_ms": _NUMBERS, "share": _NUMBER}),
        "client": (None, {"certified": bool, "reasons": [str]}),
        "silent_failures": (None, [str]),
        "failures": (None, [{"error": str, "count": _NUMBER}]),
        "step_split": (None, _NUMBERS | {"parts_ms": _NUMBERS}),
        "memory": {
            **_of_kind(_NUMBER, "weight_bytes checkpoint_bytes kv_cache_bytes"),
            "checkpoint_dtype": _TEXT,
            "kv_cache": (None, {"dtype": _TEXT, **_of_kind(_NUMBER, "bytes_per_token tokens")}),
        },
        "quality": (None, _QUALITY | {"intervals": _INTERVALS, "speed": (None, {})}),
        "layer_errors": (None, [{"error": _NUMBER}]),
        "tasks": (None, {"metrics": [{}]}),
        "roofline": (
            None,
            {"ceilings": _of_kind(_NUMBER, "bandwidth flops"), "points": [{"phase": str}]},
        ),
        "environment": (None, {"machine": _TEXT, "libraries": (None, {"*": _TEXT})}),
    },
}
"""Kinds of what comparisons and reports compute with: `quant.model.checkpoint.kind_fault`."""
_NEEDED = ("run_id", "name", "arms", "interrupted", "identity", "runs", "metrics", "memory")
_NEEDED += ("quality",)


@dataclass(slots=True)
class BenchRun:
    """A finished benchmark: its record, its passes, the quality per position, and the tasks' scores per
    item."""

    result: dict[str, Any]
    passes: list[LoadPass]
    series: QualitySeries | None = None
    items: TaskItems | None = None

    @property
    def interrupted(self) -> bool:
        return self.result["llmopt"]["interrupted"]


def to_json(value: Any) -> str:
    """Strict JSON text: NaN and infinities become null, numpy values become plain ones."""
    return json.dumps(plain(value), indent=2, allow_nan=False) + "\n"


def plain(value: Any) -> Any:
    """The value converted to dicts, lists, text and finite numbers."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    return value


def read_result(path: Path) -> dict[str, Any]:
    """A `result.json`, or the one in a run folder. A result of another tool is read as `imported` does.
    Raises BadInput: missing, not JSON, no result, or with a value of another kind."""
    from ...quant.model.checkpoint import check_kinds, read_json

    if (imported := _imported(path)) is not None:
        return imported.result
    if path.is_dir():
        path = path / RESULT_NAME
    result = read_json(path)
    ours = result.get("llmopt")
    if not isinstance(ours, dict) or "identity" not in ours:
        raise BadInput(
            f"{path} is not a result of llmopt bench: it has no llmopt.identity, nor the fields of a tool "
            "that is read (docs/measuring.md lists them)"
        )
    if ours.get("schema") != SCHEMA_VERSION:
        raise BadInput(
            f"{path} has result schema {ours.get('schema')!r}; this version reads {SCHEMA_VERSION}"
        )
    if missing := [key for key in _NEEDED if key not in ours]:
        raise BadInput(f"{path} has no llmopt.{missing[0]}: measure it again")
    check_kinds(path, result, _KINDS)
    return result


def _imported(path: Path) -> ImportedRun | None:
    """The run of another tool at a path; None where it is one of ours, or nothing known."""
    from .imported import read_imported

    if (path / RESULT_NAME).is_file():
        return None
    if path.is_file() and '"llmopt": {' in path.read_text(encoding="utf-8", errors="replace"):
        return None
    return read_imported(path)


def has_result(folder: Path) -> bool:
    return (folder / RESULT_NAME).is_file() or (folder.is_dir() and _imported(folder) is not None)


REQUESTS_NAME = "requests.parquet"
REQUESTS_CSV_NAME = "requests.csv"


def requests_table(passes: Sequence[LoadPass]) -> dict[str, list[Any]]:
    """One row a request: every time (seconds from the start of its pass) and every length."""
    rows: list[dict[str, Any]] = []
    for number, load_pass in enumerate(passes):
        for t in load_pass.traces:
            seen = bool(t.chunk_times)
            tpot = t.tpot if seen else None
            rows.append(
                {
                    "run": number,
                    "request_id": t.request_id,
                    "conversation": t.conversation,
                    "turn": t.turn + 1,
                    "cycle": t.cycle,
                    "drained": load_pass.is_drained(t),
                    "prompt_len": t.prompt_len,
                    "wanted_len": t.wanted_len,
                    "output_len": t.output_len,
                    "success": t.success,
                    "error": t.error,
                    "scheduled_s": t.scheduled,
                    "sent_s": t.sent,
                    "first_chunk_s": t.chunk_times[0] if seen else None,
                    "last_chunk_s": t.chunk_times[-1] if seen else None,
                    "ttft_ms": t.ttft * 1000 if t.output_len else None,
                    "tpot_ms": tpot * 1000 if tpot is not None else None,
                    "e2el_ms": t.e2el * 1000 if seen else None,
                    "client_queue_ms": t.queued * 1000,
                    "cached_tokens": t.cached_tokens,
                    "lora": t.lora,
                    "chunk_times_s": list(t.chunk_times),
                    "chunk_tokens": list(t.chunk_tokens),
                    "text": t.text,
                }
            )
    return {key: [row[key] for row in rows] for key in rows[0]} if rows else {}


def write_requests(path: Path, passes: Sequence[LoadPass]) -> None:
    """`requests.parquet`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(requests_table(passes)), path)


def write_requests_csv(path: Path, passes: Sequence[LoadPass]) -> None:
    """`requests.csv`: the columns of the Parquet table; lists are JSON, a missing value is empty."""
    import csv

    table = requests_table(passes)
    with path.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.writer(handle)
        writer.writerow(table)
        for row in zip(*table.values(), strict=True):
            writer.writerow([json.dumps(cell) if isinstance(cell, list) else cell for cell in row])


@dataclass(frozen=True, slots=True)
class RunData:
    """A result and, where present, its request table by column, its quality per position, and its tasks'
    scores per item."""

    result: dict[str, Any]
    requests: dict[str, list[Any]] | None = None
    series: QualitySeries | None = None
    items: TaskItems | None = None

    @classmethod
    def of_run(cls, run: BenchRun) -> RunData:
        return cls(run.result, requests_table(run.passes), run.series, run.items)

    @classmethod
    def read(cls, path: Path) -> RunData:
        """Read a run folder, a `result.json` with the request table next to it, or another tool's result.
        Raises BadInput: no such result, or a damaged file."""
        if (imported := _imported(path)) is not None:
            return cls(imported.result, imported.requests, items=imported.items)
        result = read_result(path)
        series, items = QualitySeries.beside(path), TaskItems.beside(path)
        table = (path if path.is_dir() else path.parent) / REQUESTS_NAME
        if not table.is_file():
            return cls(result, series=series, items=items)
        import pyarrow.parquet as pq

        with readable(table):
            return cls(result, pq.read_table(table).to_pydict(), series, items)

    @property
    def name(self) -> str:
        return self.result["llmopt"]["name"]

    def values(self, key: str) -> list[float]:
        values = [value_of_pass(run, key) for run in self.result["llmopt"]["runs"]]
        return [value for value in values if value]

    def column(self, name: str) -> list[tuple[str, int, Any]]:
        """(request id, number of the pass, value) of every request that succeeded and has the value."""
        table = self.requests or {}
        runs, good = (table.get(key) or itertools.repeat(1) for key in ("run", "success"))
        rows = zip(table.get("request_id", ()), runs, table.get(name, ()), good, strict=False)
        return [(request, run, cell) for request, run, cell, ok in rows if ok and cell is not None]

    def by_request(self, column: str) -> dict[str, list[float]]:
        """A column's values by request id, in the order of the passes."""
        values: dict[str, list[float]] = {}
        for request, _, value in self.column(column):
            values.setdefault(request, []).append(value)
        return values


def value_of_pass(run: Mapping[str, Any], key: str) -> float | None:
    """A metric of a pass; None where it has none. Goodput or SLO share of a pass without a good request is
    what half a request would give, because values are compared as ratios."""
    value = run.get(key)
    if value == 0 and key == "request_goodput" and run["duration"]:
        return 0.5 / run["duration"]
    if value == 0 and key == "slo_share":
        return 0.5 / max(1, run["completed"] + run["failed"])
    return value


def stamped(root: Path, name: str, now: datetime | None = None) -> Path:
    """Make the empty folder `root/<time>-<name>`; see `claimed`."""
    slug = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"
    return claimed(root / f"{(now or datetime.now()):%Y%m%d-%H%M%S}-{slug}")


def claimed(path: Path) -> Path:
    """Make an empty folder: `path`, or where that is taken (by another process too) `path-2`, `path-3` and so
    on."""
    for number in itertools.count(1):
        candidate = path if number == 1 else path.with_name(f"{path.name}-{number}")
        with suppress(FileExistsError):
            candidate.mkdir(parents=True)
            return candidate
    raise AssertionError("unreachable")


def atomic_run_folder(target: Path) -> AbstractContextManager[Path]:
    """A hidden folder to write a run into, renamed to `target` when the block succeeds: `atomic_folder`."""
    return atomic_folder(target, f".{target.name}.partial-{os.getpid()}")

"""Results of other benchmarks as runs of ours: read, grouped into passes, and laid out as a record.

A file is recognised by its content (`formats`). Rows of equal settings are passes of one run; a file with
several settings needs `FILE#2`. What a file does not say stays unknown and is named
(`llmopt.imported.unknown`); no default stands in for it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...base.errors import BadInput
from ...base.json_lines import is_number
from ..metrics.names import LATENCIES, STATISTICS
from ..quality.task_items import TaskItems, items_of, metric_rows
from .formats import FORMATS, Format, Row, at, read_rows

UNKNOWN = "unknown"
# Milliseconds in the units that a file may name next to its times.
UNITS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "sec": 1000.0, "s": 1000.0, "seconds": 1000.0}
COUNTS = ("completed", "failed", "total_input_tokens", "total_output_tokens", "duration")
KEYS = (*COUNTS, "request_throughput", "request_goodput", "input_throughput", "output_throughput")
KEYS += ("total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests")
# What a comparison would like to know, in the words of its last line.
ASKED = {
    "version": "the version of the tool",
    "model": "the model",
    "hardware": "the hardware",
    "shape": "prompts and lengths",
    "load": "the load",
    "load.seed": "sampling and seeds",
}
LM_EVAL = Format("lm-eval", ("results", "configs", "n-shot"))
KNOWN = (LM_EVAL, *FORMATS)
SUFFIXES = (".json", ".jsonl")
TOTAL_TOKENS = "shape.total_input_tokens"
NO_LOAD = {"load.num_prompts"}
"""Options that say how many requests there are, but not how they arrive."""


@dataclass(frozen=True, slots=True)
class ImportedRun:
    """A run of another tool: its record, and where the file has them its requests and scored items."""

    result: dict[str, Any]
    requests: dict[str, list[Any]] | None = None
    items: TaskItems | None = None


def read_imported(path: Path) -> ImportedRun | None:
    """The run in a file (`results.json`, `results.json#2`) or in a folder with one such file; None where it
    is of no known format. Raises BadInput: several runs and none is named, or a value that cannot be read."""
    name, mark, number = path.name.partition("#")
    file = path.with_name(name) if mark and not path.exists() else path
    if file.is_dir():
        files = sorted(path for path in file.rglob("*") if path.suffix in SUFFIXES)
        rows = ((path, _rows(path)) for path in files)
        known = [path for path, row in rows if row and any(_has(row[0], kind) for kind in KNOWN)]
        if len(known) > 1:
            some = ", ".join(str(path.relative_to(file)) for path in known[:4])
            raise BadInput(f"{file} holds {len(known)} results, name one: {some}")
        return read_imported(known[0]) if known else None
    if not file.is_file():
        return None
    if not (rows := read_rows(file) if file.suffix == ".jsonl" else _rows(file)):
        return None
    format = next((known for known in KNOWN if all(_has(row, known) for row in rows)), None)
    if format is None:
        return None
    try:
        if format is LM_EVAL:
            return _lm_eval(rows[0], file)
        return _chosen(format, [*format.points(rows)], file, number)
    except BadInput:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadInput(f"{file} is of {format.tool}, but cannot be read: {error!r}") from error


def _has(row: Row, format: Format) -> bool:
    return all(at(row, mark) is not None for mark in format.marks)


def _rows(file: Path) -> list[Row]:
    """The rows of a file of another tool; none of one of ours, which has all that vLLM's have."""
    try:
        rows = read_rows(file)
    except (ValueError, RecursionError):
        return []
    return [] if rows and at(rows[0], "llmopt") is not None else rows


def _chosen(format: Format, points: Sequence[Row], file: Path, number: str) -> ImportedRun:
    """The run of the settings that `number` names, from 1; the only one without."""
    groups: dict[str, list[Row]] = {}
    seen: list[float] = []
    for row in points:
        # A pass with failures does not say the tokens of all its prompts; mean lengths within 10 % are equal.
        settings = {key: value for key, value in _said(format, row).items() if key != TOTAL_TOKENS}
        completed = _number(at(row, format.values.get("completed", ""))) or 1
        if "failed" not in format.values:
            settings["completed"] = completed
        for key in ("total_input_tokens", "total_output_tokens"):
            mean = round((_number(at(row, format.values.get(key, ""))) or 0) / completed, 1)
            near = (length for length in seen if math.isclose(length, mean, rel_tol=0.1))
            seen.append(next(near, mean))
            settings[f"{key} per request"] = seen[-1]
        groups.setdefault(json.dumps(settings, sort_keys=True, default=str), []).append(row)
    runs = [*groups.values()]
    if not runs:
        raise BadInput(f"{file} is of {format.tool} and holds no measurement")
    if not number and len(runs) > 1:
        settings = [json.loads(key) for key in groups]
        every = dict.fromkeys(key for own in settings for key in own)
        differing = [key for key in every if len({str(own.get(key)) for own in settings}) > 1]
        shown = "; ".join(
            f"{file.name}#{position} ({', '.join(f'{key} {own.get(key)}'[:60] for key in differing[:3])})"
            for position, own in enumerate(settings[:6], 1)
        )
        raise BadInput(f"{file} holds {len(runs)} runs of {format.tool}, name one: {shown}")
    if number and not (number.isdigit() and 1 <= int(number) <= len(runs)):
        raise BadInput(f"{file}#{number}: it holds {len(runs)} runs, from #1")
    return _run(format, runs[int(number or 1) - 1], file, number)


def _said(format: Format, row: Row) -> dict[str, Any]:
    """{field of the identity: what the row says}; settings without a field are `engine.NAME`."""
    reported = {name: at(row, path) for name, path in format.says.items()}
    if format.is_flat:
        listed = {*format.says.values(), format.date}
        others = {key: value for key, value in row.items() if key not in listed}
        reported |= {f"engine.{k}": v for k, v in others.items() if isinstance(v, str | bool)}
    if isinstance(reported.get("shape.input_lens"), list):
        reported["shape.input_lens"] = _hash(reported["shape.input_lens"])
    if at(row, format.values.get("failed", "")):
        reported.pop(TOTAL_TOKENS, None)  # it lacks those of the failed requests
    known = {name: _plain(value) for name, value in reported.items()}
    return {name: value for name, value in known.items() if value not in (None, "", UNKNOWN)}


def _plain(value: Any) -> Any:
    """Infinity as vLLM's text; a structure by its hash, for people by its first words."""
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    if isinstance(value, list | dict):
        text = json.dumps(value, sort_keys=True, default=str)
        return text if len(text) <= 80 else f"{text[:60]}… {_hash(value)}"
    return value


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _measured(format: Format, row: Row) -> dict[str, float | None]:
    """A pass: our keys in our units, None where the row has no value."""
    times = [f"{name}_{metric}_ms" for metric in LATENCIES for name in STATISTICS]
    values: dict[str, float | None] = dict.fromkeys([*KEYS, *times])
    for key, path in format.values.items():
        values[key] = _number(at(row, path))
    for metric, (path, unit) in format.metrics.items():
        if format.has_units and (named := at(row, f"{path}.unit")) is not None:
            if named not in UNITS:
                raise ValueError(f"{path} is in {named!r}, which is no known unit of time")
            unit = UNITS[named]
        for name, theirs in format.statistics.items():
            value = at(row, format.pattern.format(metric=path, statistic=theirs))
            values[f"{name}_{metric}_ms"] = _number(value, unit)
        # The 50th percentile has either name.
        p50, median = values[f"p50_{metric}_ms"], values[f"median_{metric}_ms"]
        values |= dict.fromkeys(
            (f"p50_{metric}_ms", f"median_{metric}_ms"), median if p50 is None else p50
        )
    return values


def _number(value: Any, factor: float = 1.0) -> float | None:
    return value * factor if is_number(value) else None


def _run(format: Format, rows: Sequence[Row], file: Path, number: str) -> ImportedRun:
    facts, passes = _said(format, rows[0]), [_measured(format, row) for row in rows]
    requests: dict[str, list[Any]] = {}
    for number_of_pass, row in enumerate(rows):
        for request in format.requests(row, file):
            for key, value in (*request.items(), ("run", number_of_pass)):
                requests.setdefault(key, []).append(value)
    totals: dict[str, float | None] = {}
    for key in passes[0]:
        known = [value for measured in passes if (value := measured[key]) is not None]
        total = sum(known) if key in COUNTS else sum(known) / max(1, len(known))
        totals[key] = total if len(known) == len(passes) else None
    record = _record(format.tool, facts, file, number, _stamp(at(rows[0], format.date)))
    record["llmopt"]["identity"]["target"] = format.target
    record["llmopt"]["interrupted"] = any(row.get("was_cancelled") for row in rows)  # AIPerf's
    record["llmopt"] |= {"runs": passes, "num_runs": len(passes), "metrics": _distributions(totals)}
    return ImportedRun({**record, **totals}, requests or None)


def _distributions(totals: Mapping[str, float | None]) -> dict[str, Any]:
    count = int(totals.get("completed") or 0)
    return {
        metric: {"count": count, **{name: totals.get(f"{name}_{metric}_ms") for name in STATISTICS}}
        for metric in LATENCIES
    }


def _record(
    tool: str, reported: Mapping[str, Any], file: Path, number: str, date: str
) -> dict[str, Any]:
    """The record without measurements; `said` are fields of the identity by dotted name."""
    groups: dict[str, dict[str, Any]] = {}
    for name, value in reported.items():
        group, dot, field = name.partition(".")
        if dot:
            groups.setdefault(group, {})[field] = value
    versions, model = groups.pop("version", {}), str(reported.get("model", UNKNOWN))
    known = {*reported} - NO_LOAD
    known |= {key.partition(".")[0] for key in known}
    unknown = [descriptions for name, descriptions in ASKED.items() if name not in known]
    name = f"{file.parent.name}/{file.stem}".lstrip("/") + (f"#{number}" if number else "")
    digest = hashlib.sha256(file.read_bytes() + number.encode()).hexdigest()
    workload_name = str(groups.get("shape", {}).get("dataset", "workload unknown"))
    identity = {
        "model": model,
        "model_hash": None,
        "quantization": reported.get("quantization"),
        "dtype": reported.get("dtype", UNKNOWN),
        "target": UNKNOWN,
        "workload": workload_name,
        "workload_sha256": None,
        "load": {},
        "engine": {},
        "device": reported.get("device", UNKNOWN),
        "machine": UNKNOWN,
        "hardware": None,
        "tool": tool,
        **groups,
    }
    memory = dict.fromkeys(("weight_bytes", "checkpoint_bytes"), reported.get("weight_bytes"))
    memory |= dict.fromkeys(("kv_cache_bytes", "peak_resident_bytes", "kv_cache"))
    absent = ("phases", "preemptions", "quality", "roofline", "energy", "tasks", "client")
    workload = {"name": identity["workload"], "source": tool, "notes": [], "num_requests": None}
    ours = {
        "schema": 1,
        "run_id": digest[:32],
        "arms": None,
        "name": name,
        "interrupted": False,
        "slowdown": 1.0,
        "imported": {"tool": tool, "file": str(file), "versions": versions, "unknown": unknown},
        "identity": identity,
        "model": {"line": reported.get("model_line")},
        "workload": workload,
        "num_runs": 0,
        "runs": [],
        "metrics": _distributions({}),
        "spread": {},
        "memory": memory,
        **dict.fromkeys(absent),
        "environment": {"libraries": versions, "commit": None},
    }
    return {"date": date, "model_id": model, **dict.fromkeys(KEYS), "llmopt": ours}


def _stamp(value: Any) -> str:
    """A time in our form, from ISO text, seconds since 1970, or vLLM's own; `unknown` else."""
    try:
        if isinstance(value, int | float):
            return datetime.fromtimestamp(value, UTC).strftime("%Y%m%d-%H%M%S")
        moment = datetime.fromisoformat(str(value).replace("Z", "+00:00"))
        moment = moment.astimezone(UTC) if moment.tzinfo else moment
        return moment.strftime("%Y%m%d-%H%M%S")
    except (ValueError, OverflowError, OSError):
        return str(value) if value else UNKNOWN


def _lm_eval(content: Row, file: Path) -> ImportedRun:
    """`results_TIME.json` of lm-eval: task scores, and no speeds; paired by item where its
    `samples_TASK_TIME.jsonl` (`--log_samples`) are next to it."""
    rows = metric_rows({"higher_is_better": {}, "n-samples": {}, "versions": {}, **content})
    time = file.stem.removeprefix("results_")
    samples = {
        path.stem.removeprefix("samples_").removesuffix(f"_{time}"): read_rows(path)
        for path in sorted(file.parent.glob(f"samples_*_{time}.jsonl"))
    }
    template = content.get("chat_template_sha") or content.get("chat_template")
    protocol = (
        f"chat template {str(template)[:16] if template else 'none'}, "
        f"system instruction {content.get('system_instruction') or 'none'}, "
        f"shots as turns: {bool(content.get('fewshot_as_multiturn'))}, "
        f"generation {at(content, 'config.gen_kwargs') or 'as the tasks have it'}"
    )
    facts = {
        "model": content.get("model_name") or at(content, "config.model_args"),
        "version.lm_eval": content.get("lm_eval_version"),
        "version.transformers": content.get("transformers_version"),
        "load.seed": at(content, "config.random_seed"),
    }
    known = {name: value for name, value in facts.items() if value is not None}
    record = _record("lm-eval", known, file, "", _stamp(content.get("date")))
    record["llmopt"]["tasks"] = {
        "lm_eval_version": content.get("lm_eval_version"),
        "protocol": protocol,
        "limit": at(content, "config.limit"),
        "chat_template": None,
        "error": None,
        "metrics": rows,
    }
    return ImportedRun(record, items=items_of(samples, rows))

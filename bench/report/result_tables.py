"""Tables of a record: roofline, quality and memory, passes, identity, environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..page.page import Section, Table, number, per_second, percent, size
from ..tasks.items import task_tables
from .run_words import load_words


def roofline_table(series: Mapping[str, Mapping[str, Any] | None]) -> Table:
    """Roofline points of one or several runs."""
    rows = []
    for name, one in series.items():
        for point in one["points"] if one else ():
            rows.append(
                [
                    f"{point['phase']}, {name}" if len(series) > 1 else point["phase"],
                    size(point["bytes_per_step"]),
                    per_second(point["achieved_bandwidth"], "B"),
                    percent(point["mbu"]),
                    per_second(point["achieved_flops"], "FLOP"),
                    percent(point["mfu"]),
                    number(point["intensity"], 1),
                    point["bound"],
                ]
            )
    header = [
        "phase",
        "bytes/step",
        "bandwidth",
        "MBU",
        "arithmetic",
        "MFU",
        "FLOP/byte",
        "limited by",
    ]
    return Table(header, rows)


def quality_and_memory(results: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """Quality and memory of one or several runs."""
    memory_rows, quality_rows = [], []
    for name, result in results.items():
        memory = result["llmopt"]["memory"]
        memory_rows.append(
            [
                name,
                size(memory["weight_bytes"]),
                size(memory["checkpoint_bytes"]),
                size(memory["kv_cache_bytes"]) + _stored(memory),
                size(memory["peak_resident_bytes"]),
            ]
        )
        scored = result["llmopt"]["quality"]
        if scored:
            quality_rows.append(
                [
                    name,
                    number(scored["perplexity"], 4),
                    number(scored["kl_nats"], 5),
                    percent(scored["top1_agreement"], 2),
                    f"{scored['num_tokens']:,}",
                    scored["reference"] or "none",
                ]
            )
    tables = []
    if quality_rows:
        scored = next(r["llmopt"]["quality"] for r in results.values() if r["llmopt"]["quality"])
        tables.append(
            Table(
                ["model", "perplexity", "KL (nats)", "top-1 agreement", "tokens", "reference"],
                quality_rows,
                caption=f"On {scored['source']}: {scored.get('description') or scored['protocol']}; tokens "
                f"{scored['token_sha256'][:12]}.",
            )
        )
    header = ["model", "weights held", "checkpoint on disk", "KV cache", "peak resident"]
    return [*tables, *task_tables(results), Table(header, memory_rows)]


def _stored(memory: Mapping[str, Any]) -> str:
    """Dtype and capacity of the KV cache, where the result has them."""
    if not (cache := memory.get("kv_cache")):
        return ""
    return f" ({cache['dtype']}, {cache['tokens']:,} tokens)"


def pass_sections(result: Mapping[str, Any]) -> list[Section]:
    """Time, CPU usage and disturbances of each pass; nothing for a target whose processes are not seen."""
    runs = result["llmopt"]["runs"]
    if not any(run.get("cpu_seconds") is not None for run in runs):
        return []
    rows = [
        [
            str(number_of_pass),
            number(run["duration"], 3),
            number(run["cpu_seconds"], 3),
            number(run["waiting_seconds"], 3),
            number(run["run_delay_seconds"], 3),
            number(run["instructions"], 0),
            number(run["involuntary_switches"], 0),
            number(run["steal_seconds"], 2),
            run["disturbed_because"] or "",
        ]
        for number_of_pass, run in enumerate(runs, 1)
    ]
    header = [
        "pass",
        "wall (s)",
        "CPU (s)",
        "waiting (s)",
        "run queue (s)",
        "instructions",
        "involuntary switches",
        "steal (s)",
        "disturbed",
    ]
    reason = result["llmopt"]["environment"].get("instructions_not_counted_because")
    words = (f"Instructions are not counted: {reason}.",) if reason else ()
    return [Section("Passes", words, (), (Table(header, rows),))]


def identity_table(result: Mapping[str, Any]) -> Table:
    """The run's identity, which decides comparability."""
    ours = result["llmopt"]
    identity, workload = ours["identity"], ours["workload"]
    engine = ", ".join(f"{k} {v}" for k, v in identity["engine"].items() if v is not None)
    rows = [
        ["Model", f"{identity['model']}, {identity['model_hash'][:30]}"],
        ["Precision", f"{identity['dtype']}, quantization {identity['quantization'] or 'none'}"],
        [
            "Workload",
            f"{workload['source']}: {_counted(ours)}, "
            f"{workload['prompt_tokens']:,} prompt and {workload['output_tokens']:,} output tokens, "
            f"sha256 {identity['workload_sha256'][:16]}",
        ],
        ["Load", f"{load_words(identity['load'])}; {ours['num_warmups']} warm-up requests before"],
        [
            "Outputs",
            f"{'fixed lengths (end tokens ignored)' if identity['load']['ignore_eos'] else 'free lengths'}, "
            f"temperature {identity['load']['temperature']:g}, seed {identity['load']['seed']}",
        ],
        ["Passes", f"{ours['num_runs']}, prefix cache emptied before each"],
        ["Engine", f"{identity['target']}, {engine}"],
        ["Machine", f"{identity['machine']}, device {identity['device']}"],
        ["Hardware", facts_text(identity.get("hardware"))],
    ]
    if server := identity.get("server"):
        rows.append(["Server", facts_text(server)])
    return Table(["", ""], rows, is_prose=True)


def facts_text(facts: Mapping[str, Any] | None) -> str:
    """Facts of the hardware or of a server; an older result has none."""
    if not facts:
        return "not recorded"
    return ", ".join(f"{name.replace('_', ' ')} {flat(value)}" for name, value in facts.items())


def _counted(record: Mapping[str, Any]) -> str:
    """`48 requests`, or `12 conversations with 48 requests`."""
    requests = f"{record['workload']['num_requests']} requests"
    talks = record.get("conversations")
    return f"{talks['num_conversations']} conversations with {requests}" if talks else requests


def environment_table(environment: Mapping[str, Any]) -> Table:
    """Everything about the machine, flattened."""
    rows = []
    for key, value in environment.items():
        if isinstance(value, Mapping):
            rows += [[f"{key}: {inner}", flat(v)] for inner, v in value.items()]
        elif isinstance(value, list):
            rows.append([key, " ".join(map(str, value))])
        else:
            rows.append([key, flat(value)])
    return Table(["", ""], rows, is_prose=True)


def flat(value: Any) -> str:
    """A value of the environment as text; missing values read as unknown."""
    if value is None:
        return "unknown"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {flat(inner)}" for key, inner in value.items())
    return " ".join(map(flat, value)) if isinstance(value, list) else str(value)

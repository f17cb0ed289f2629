"""Parts that reports share: sentences on a run, the formulas, the files of a page, and its quality: scores in
their order, the passages that lost most, errors of the layers, distances by depth.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...base.atomic_io import write_atomically
from ...quant.model.checkpoint import read_json
from ..gate.limits import SCORED
from ..load.fleet import FORMULAS as CLIENT_FORMULAS
from ..metrics import metrics, run_statistics
from ..metrics.names import FORMULAS as METRIC_FORMULAS
from ..metrics.step_words import DRAFTING, FORMULA, PARTS, reason_in_words, split_sentence
from ..page.page import (
    MarkedText,
    Page,
    ReportTable,
    flat,
    number,
    page_of,
    percent,
    sentence,
    size,
    span,
    to_html,
    to_markdown,
)
from ..quality import summary
from ..quality.summary import score_of
from ..quality.task_items import metric_name, score_words, task_rows
from ..quality.tool_calls import call_sentence
from ..record.comparable import served_weight_bytes


def report_page(template: str, **record: Any) -> Page:
    return page_of(template, **shared(), **record)


def shared() -> dict[str, Any]:
    functions = (facts, felt_table, formula_table, known, layer_rows, load_words, marked)
    functions += (call_sentence, depth_curves, depth_table, reason_in_words, split_sentence)
    functions += (metric_name, score_words, scores_table, task_rows)
    constants = {"SHADES": SHADES, "STEP_FORMULA": FORMULA}
    constants |= {"COST_FORMULAS": run_statistics.COST_FORMULAS, "STEP_PARTS": PARTS | DRAFTING}
    return constants | {function.__name__: function for function in functions}


def known(results: Mapping[str, Mapping[str, Any]], key: str) -> dict[str, Any]:
    """{name: the part of the record under `key`}, of the runs that have it."""
    return {name: part for name, run in results.items() if (part := run["llmopt"].get(key))}


def load_words(load: Mapping[str, Any]) -> str:
    """`8 requests at a time`, `5 requests/s`, `8 conversations at a time for 60 s`."""
    what = "conversations" if load.get("history") else "requests"
    seconds = load.get("duration")
    return _arrivals(load, what) + (f" for {seconds:g} s" if seconds else "")


def _arrivals(load: Mapping[str, Any], what: str) -> str:
    if "request_rate" not in load:  # of a tool that says it in its own words, or not at all
        known = ", ".join(f"{key} {value}" for key, value in load.items())
        return f"load: {known}" if known else "load unknown"
    limit = load.get("max_concurrency")
    closed = f"{limit} {what if limit != 1 else what[:-1]} at a time"
    if strategy := load.get("ramp_up_strategy"):
        first, last = load["ramp_up_start_rps"], load["ramp_up_end_rps"]
        ramp = f"{strategy} ramp from {first:g} to {last:g} {what}/s"
        return f"{ramp}, at most {limit} in flight" if limit else ramp
    if load["request_rate"] == "inf":
        return closed if limit else f"all {what} at once"
    burstiness = load.get("burstiness", 0)
    shape = {1: "Poisson", math.inf: "constant"}.get(burstiness or math.inf)
    if load.get("arrivals") == "replayed":
        shape = "mean of the replayed times"
    elif "burstiness" not in load:
        shape = "arrivals unknown"
    shape = shape or f"gamma, burstiness {burstiness}"
    rate = f"{load['request_rate']:g} {what}/s ({shape})"
    return f"{rate}, at most {limit} in flight" if limit else rate


SUMMARY = ("weights", "perplexity", "KL nats", "top-1", "tokens/s", "TTFT", "TPOT")


def summary_cells(result: Mapping[str, Any]) -> list[str]:
    """Memory, quality and speed of a run, in the columns of `SUMMARY`."""
    record = result["llmopt"]
    scored, metrics = record["quality"] or {}, record["metrics"]
    return [
        size(served_weight_bytes(result)),
        number(scored.get("perplexity"), 3),
        number(scored.get("kl_nats"), 4),
        percent(scored.get("top1_agreement")),
        number(result["output_throughput"], 0),
        f"{number(metrics['ttft']['median'], 1)} ms",
        f"{number(metrics['tpot']['median'], 2)} ms",
    ]


def warnings(result: Mapping[str, Any]) -> list[str]:
    """Caveats that change how the verdict is read: certification, silent failures, injected delay,
    preemptions, and a disturbance of every pass."""
    record = result["llmopt"]
    caveats = []
    if (client := record.get("client")) and not client["certified"]:
        caveats += [f"Not certified: {reason}." for reason in client["reasons"]]
    caveats += map(sentence, record.get("silent_failures") or ())
    if record["slowdown"] != 1.0:
        caveats.append(
            f"Every {'sampling phase' if record.get('slowdown_where') == 'sampler' else 'step'} was "
            f"made {record['slowdown']:g} times as long on purpose (--slowdown)."
        )
    if record["runs"] and all(run.get("disturbed") for run in record["runs"]):
        caveats.append(
            "Other programs disturbed every pass: the speeds are not those of the model."
        )
    if record["preemptions"]:
        caveats.append(
            f"{record['preemptions']} sequences were preempted: the KV cache was too small."
        )
    return caveats


def remarks(result: Mapping[str, Any]) -> list[str]:
    """Caveats on the measurement: workload, disturbed passes, few samples, speculation and images."""
    record = result["llmopt"]
    notes = [sentence(note) for note in record["workload"]["notes"]]
    reasons = [run["disturbed_because"] for run in record["runs"] if run.get("disturbed")]
    if reasons:
        count = f"{len(reasons)} of {len(record['runs'])}"
        notes.append(f"{count} passes were disturbed: {reasons[0]}.")
    if rejected := record.get("rejected_passes"):
        why = rejected[0]["disturbed_because"]
        notes.append(f"Passes measured again because they were disturbed: {len(rejected)} ({why}).")
    metric_count = record["metrics"]["e2el"]["count"]
    if 0 < metric_count < 300:
        notes.append(
            f"p99 of {metric_count} requests is close to their maximum: read it as such, and use "
            "more prompts to learn about the tail."
        )
    if speculation := record.get("speculation"):
        notes.append(
            f"Speculation ({speculation['method']}): {speculation['num_accepted']:,} of "
            f"{speculation['num_guesses']:,} draft tokens were accepted, {speculation['acceptance']:.1%}."
        )
    if images := record.get("images"):
        parts = images["mean_ttft_parts_ms"]
        split = ", ".join(f"{name} {ms:,.1f}" for name, ms in parts.items() if ms is not None)
        notes.append(
            f"{images['num_images']:,} images in {images['num_requests']:,} requests, "
            f"{images['image_tokens']:,} tokens; mean TTFT in ms: {split}."
        )
    return notes


def named_caveats(results: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """{"warnings" and "notes": the caveats of several runs, each once}, for `caveats` of the templates."""
    return {"warnings": named(results, warnings), "notes": named(results, remarks)}


def named(
    results: Mapping[str, Mapping[str, Any]], read: Callable[[Mapping[str, Any]], list[str]]
) -> list[str]:
    """Caveats that `read` finds in several runs, each once: first those of all runs, then the others with the
    names."""
    holders: dict[str, list[str]] = {}
    for name, result in results.items():
        for note in read(result):
            holders.setdefault(note, []).append(name)
    notes = [f"Every run: {note}" for note, names in holders.items() if len(names) == len(results)]
    by_names: dict[str, list[str]] = {}
    for note, names in holders.items():
        if len(names) < len(results):
            by_names.setdefault(", ".join(names), []).append(note)
    return notes + [f"{names}: {' '.join(some)}" for names, some in by_names.items()]


def facts(known: Mapping[str, Any] | None) -> str:
    """Facts of the hardware or of a server as text; an older result has none."""
    if not known:
        return "not recorded"
    return ", ".join(f"{name.replace('_', ' ')} {flat(value)}" for name, value in known.items())


def formula_table() -> ReportTable:
    formulas = METRIC_FORMULAS | run_statistics.STEADY_FORMULAS | metrics.TURN_FORMULAS
    formulas |= summary.FORMULAS | run_statistics.ROOFLINE_FORMULAS | CLIENT_FORMULAS
    caption = "Latency and throughput definitions are those of vllm bench serve."
    rows = [[name, text] for name, text in formulas.items()]
    return ReportTable(["metric", "formula"], rows, caption, is_prose=True)


def write_page(page: Page, folder: Path) -> None:
    for section in page.sections:
        for figure in section.figures:
            svg = '<?xml version="1.0" encoding="utf-8"?>\n' + figure.svg
            write_atomically(folder / f"{figure.name}.svg", svg)
    write_atomically(folder / "report.md", to_markdown(page))
    write_atomically(folder / "report.html", to_html(page))


# KL divergence in nats from which a token gets each shade.
SHADES = (0.05, 0.25, 1.0, 3.0)
_FOUR, _FIVE, _SHARE = (
    partial(number, digits=4),
    partial(number, digits=5),
    partial(percent, digits=2),
)
SCORES = (
    ("Perplexity", "perplexity", _FOUR),
    ("Perplexity of the reference", "reference_perplexity", _FOUR),
    ("Perplexity ratio to the reference", "perplexity_ratio", _FIVE),
    ("KL from the reference, mean (nats)", "kl_nats", _FIVE),
    ("KL, median", "median_kl_nats", _FIVE),
    ("KL, p90", "p90_kl_nats", _FIVE),
    ("KL, p95", "p95_kl_nats", _FIVE),
    ("KL, p99", "p99_kl_nats", _FIVE),
    ("KL, p99.9", "p999_kl_nats", _FIVE),
    ("KL, largest", "max_kl_nats", _FIVE),
    ("Top-1 agreement", "top1_agreement", _SHARE),
    ("Tokens whose rank moved", "rank_moved", _SHARE),
)


def scores_table(quality: Mapping[str, Any]) -> ReportTable:
    """Scores of all positions, with their intervals."""
    rows = []
    for label, key, shown in SCORES:
        if quality.get(key) is not None:
            sides = quality["intervals"].get(key)
            rows.append([label, shown(quality[key]), span(sides, shown) if sides else ""])
    caption = (
        f"{quality['num_tokens']:,} positions of {quality['source']}, protocol {quality['protocol']}: "
        f"{quality['description']}. Reference: {quality['reference'] or 'none'}. "
        f"Intervals: {quality['interval_method']}."
    )
    return ReportTable(["", "value", "95 % interval"], rows, caption)


def felt_table(quality: Mapping[str, Any]) -> ReportTable | None:
    """The scores where users notice them: at sure positions, by domain, and flips; None without any."""
    rows = []
    for key, scored in SCORED.items():
        if not scored.is_felt or (score := score_of(quality, scored.name)) is None:
            continue
        shown = _SHARE if scored.unit == "share" else _FIVE
        part, unit = scored.name.rsplit(".", 1)[0], "items" if key == "flips" else "tokens"
        count = score_of(quality, f"{part}.num_{unit}")
        of = "" if count is None else f"{count[0]:,} {unit}"
        rows.append([scored.label, shown(score[0]), span(score[1] or (None, None), shown), of])
    caption = (
        "Where users feel it: the positions where the reference is sure (p ≥ 0.9), the bundled texts by "
        "domain, and answers to the bundled multiple-choice items."
    )
    return ReportTable(["", "value", "95 % interval", "of"], rows, caption) if rows else None


LAYER = re.compile(r"\.layers?\.(\d+)\.|\.h\.(\d+)\.")


def marked(passage: Mapping[str, Any]) -> MarkedText:
    """A hurt passage as text, its tokens shaded by their KL divergence."""
    tokens: Sequence[str] = passage["tokens"]
    where = f"Window {passage['window']}, from token {passage['position']}"
    caption = f"{where}: mean KL {passage['mean_kl_nats']:.3f} nats"
    pieces = [
        (token, sum(value >= limit for limit in SHADES), f"{value:.3f} nats")
        for token, value in zip(tokens, passage["kl_nats"], strict=True)
    ]
    return MarkedText(pieces, caption)


def layer_errors(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Per decoder layer: mean relative output error of its linears, and the name of the worst one. Modules
    without a measured error, such as those of a conversion, are skipped."""
    by_layer: dict[int, list[tuple[float, str]]] = {}
    for record in manifest["modules"]:
        match = LAYER.search(f".{record['module']}.")
        if match is not None and record.get("error") is not None:
            layer = match.group(1) or match.group(2)
            within = record["module"].rpartition(f".{layer}.")[2]
            by_layer.setdefault(int(layer), []).append((record["error"], within))
    means = {layer: sum(e for e, _ in errors) / len(errors) for layer, errors in by_layer.items()}
    return [
        {"layer": layer, "error": means[layer], "worst": max(errors)[1]}
        for layer, errors in sorted(by_layer.items())
    ]


def recorded_layer_errors(folder: Path) -> list[dict[str, Any]]:
    """Layer errors of a checkpoint written by `llmopt quantize`; empty for any other."""
    from ...quant.plan.manifest import MANIFEST_NAME  # imports torch and transformers

    path = folder / MANIFEST_NAME
    return layer_errors(read_json(path)) if path.is_file() else []


def layer_rows(
    results: Mapping[str, Mapping[str, Any]],
) -> list[tuple[int, list[Mapping[str, Any] | None]]]:
    """(layer, its errors in each run whose checkpoint has some), by layer."""
    recorded = [result["llmopt"].get("layer_errors") for result in results.values()]
    columns = [{error["layer"]: error for error in errors} for errors in recorded if errors]
    layers = sorted({layer for column in columns for layer in column})
    return [(layer, [column.get(layer) for column in columns]) for layer in layers]


def depth_curves(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """{name for readers: distances by depth} of the weights of every run, and of its caches of
    `--quality-kv`; of several runs the names begin with theirs."""
    curves: dict[str, Mapping[str, Any]] = {}
    for name, result in results.items():
        quality, prefix = result["llmopt"]["quality"] or {}, f"{name}: " if len(results) > 1 else ""
        curves[f"{prefix}from the reference"] = quality.get("depth") or {}
        for dtype, depths in (quality.get("kv") or {}).items():
            curves[f"{prefix}{dtype} KV cache"] = depths
    return {name: depths for name, depths in curves.items() if any(depths.values())}


def depth_table(curves: Mapping[str, Mapping[str, Any]]) -> ReportTable:
    """KL with its interval and top-1 agreement, a row for each curve and a column for each depth."""
    depths = list(dict.fromkeys(depth for curve in curves.values() for depth in curve))
    rows = [
        [name, *(_distance_words(curve.get(depth)) for depth in depths)]
        for name, curve in curves.items()
    ]
    return ReportTable(["depth", *depths], rows)


def _distance_words(scored: Mapping[str, Any] | None) -> str:
    if scored is None:
        return ""
    low, high = scored["intervals"]["kl_nats"]
    between = "" if low is None else f" ({number(low, 5)} to {number(high, 5)})"
    return f"{number(scored['kl_nats'], 5)}{between}, {percent(scored['top1_agreement'], 1)}"

"""The report of one run: what it found first, then the pictures, then how every number came about."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..client import certify
from ..files.run_folder import write_whole
from ..load.step_split import split_sentence, split_table
from ..machine import roofline
from ..metrics import metrics, steady
from ..metrics.step_trace import CAPTION as STEPS_CAPTION
from ..metrics.step_trace import step_trace_sentence
from ..metrics.trace import LoadPass
from ..page.page import Card, Figure, Page, Section, Table, Verdict, to_html, to_markdown
from ..page.text import bounds, interval, number, per_second, percent, size
from ..quality import quality
from ..quality.eval_tasks import task_tables
from ..quality.layer_errors import layer_sections
from .client_words import client_section
from .money import money_sections
from .plan_residuals import plan_section
from .plots import SHORT, run_figures

CAPTIONS = {
    "distributions": "How many of the values lie at or below a latency. ITL pools the gaps of all "
    "requests; the other three have one value per request.",
    "timeline": "First pass. Requests that wait for a place under the concurrency limit are grey.",
    "steps": STEPS_CAPTION,
    "roofline": "Points are model bytes and model FLOP over measured time. The roofs were measured on "
    "this machine just after the run, with the same threads.",
}


def write_report(result: Mapping[str, Any], passes: Sequence[LoadPass], folder: Path) -> None:
    """`report.html`, `report.md` and one SVG file per figure, into an existing folder."""
    figures = run_figures(result, passes)
    write_page(run_page(result, figures), folder)


def write_page(page: Page, folder: Path) -> None:
    """The files of a page, the HTML last, so that it is there only when everything is."""
    for section in page.sections:
        for figure in section.figures:
            write_whole(folder / f"{figure.name}.svg", standalone(figure.svg))
    write_whole(folder / "report.md", to_markdown(page))
    write_whole(folder / "report.html", to_html(page))


def standalone(svg: str) -> str:
    """The SVG as a file of its own."""
    return '<?xml version="1.0" encoding="utf-8"?>\n' + svg


def run_page(result: Mapping[str, Any], figures: Mapping[str, str]) -> Page:
    """The page of one run from its record and its figures."""
    ours = result["llmopt"]
    found = [Figure(name, svg, CAPTIONS[name]) for name, svg in figures.items()]
    latency = [f for f in found if f.name == "distributions"]
    timeline = [f for f in found if f.name == "timeline"]
    steps = [f for f in found if f.name == "steps"]
    roof = [f for f in found if f.name == "roofline"]
    sections = [
        Section("Latency", (), latency, latency_tables(result)),
        Section("Timeline", (phase_sentence(ours),), timeline),
    ]
    if steps:
        sections.append(Section("Steps", (step_trace_sentence(ours["step_trace"]),), steps))
    if roof:
        words = [point["explanation"] for point in ours["roofline"]["points"]]
        tables = [roofline_table({ours["name"]: ours["roofline"]})]
        if table := split_table({ours["name"]: result}):
            tables.append(table)
            words.append(split_sentence(result) or "")
        sections.append(Section("Roofline", words, roof, tables))
    if plan := ours.get("plan"):
        sections.append(plan_section(plan))
    sections += [
        client_section(ours)
        if ours.get("client")
        else Section("Quality and memory", (), (), quality_and_memory({ours["name"]: result})),
        *layer_sections({ours["name"]: result}),
        *money_sections({ours["name"]: result}),
        Section("What was run", (), (), (identity_table(result),)),
        Section("How each number is made", (), (), (formula_table(),)),
        Section("Environment", (), (), (environment_table(ours["environment"]),), folded=True),
    ]
    return Page(
        title=f"Benchmark of {ours['name']}",
        subtitle=subtitle(result),
        verdict=run_verdict(result),
        cards=cards(result),
        sections=sections,
        warnings=warnings(result),
    )


def subtitle(result: Mapping[str, Any]) -> str:
    """Model, precision, load and machine in one line."""
    identity = result["llmopt"]["identity"]
    precision = identity["quantization"] or identity["dtype"]
    return (
        f"{identity['model']} ({precision}) · {identity['workload']} · {load_words(identity['load'])} · "
        f"{identity['device']} · {identity['machine']} · {result['date']}"
    )


def load_words(load: Mapping[str, Any]) -> str:
    """`closed loop of 8`, `5 requests/s`."""
    limit = load["max_concurrency"]
    if strategy := load.get("ramp_up_strategy"):
        first, last = load["ramp_up_start_rps"], load["ramp_up_end_rps"]
        ramp = f"{strategy} ramp from {first:g} to {last:g} requests/s"
        return f"{ramp}, at most {limit} in flight" if limit else ramp
    if load["request_rate"] == "inf":
        return f"closed loop of {limit}" if limit else "all requests at once"
    shape = {1: "Poisson", math.inf: "constant"}.get(
        load["burstiness"] or math.inf, f"gamma, burstiness {load['burstiness']}"
    )
    if load.get("arrivals") == "replayed":
        shape = "mean of the replayed times"
    rate = f"{load['request_rate']:g} requests/s ({shape})"
    return f"{rate}, at most {limit} in flight" if limit else rate


def run_verdict(result: Mapping[str, Any]) -> Verdict:
    """What this run says, in one breath."""
    if result["completed"] == 0:
        return Verdict("bad", "No request succeeded.", "There is nothing to measure.")
    seen = result["llmopt"]["metrics"]
    said = [f"Median request: first token after {number(seen['ttft']['median'], 1)} ms"]
    tpot = seen["tpot"]["median"]
    if tpot is not None:
        said.append(f"then one token every {number(tpot, 2)} ms")
    headline = (
        f"{number(result['output_throughput'], 0)} output tokens/s under a "
        f"{load_words(result['llmopt']['identity']['load'])}"
    )
    if result["llmopt"]["interrupted"]:
        return Verdict("unsure", "Interrupted: " + headline, "Only what finished is counted.")
    if result["failed"]:
        share = result["failed"] / (result["failed"] + result["completed"])
        said.append(f"but {result['failed']} requests failed ({percent(share)})")
        return Verdict("bad", headline, ", ".join(said) + ".")
    return Verdict("plain", headline, ", ".join(said) + "; no request failed.")


def cards(result: Mapping[str, Any]) -> list[Card]:
    """The key numbers of a run."""
    ours = result["llmopt"]
    found = [
        Card("Output throughput", number(result["output_throughput"], 0), "tokens/s"),
        Card("Request throughput", number(result["request_throughput"], 2), "requests/s"),
    ]
    for metric in ("ttft", "tpot"):
        one = ours["metrics"][metric]
        found.append(
            Card(
                f"Median {SHORT[metric]}",
                number(one["median"], 2),
                "ms",
                f"p99 {number(one['p99'], 2)} ms",
            )
        )
    if result["request_goodput"] is not None:
        found.append(Card("Goodput", number(result["request_goodput"], 2), "requests/s"))
    if ours["quality"]:
        scored = ours["quality"]
        note = ""
        if scored["kl_nats"] is not None:
            note = f"KL {scored['kl_nats']:.4f} nats, top-1 {percent(scored['top1_agreement'])}"
        found.append(Card("Perplexity", number(scored["perplexity"], 3), "", note))
    memory = ours["memory"]
    if client := ours.get("client"):
        error = client["client_ttft_error_ms"]
        note = f"TTFT error {number(error['median'])} ms" if error else "not checked"
        found.append(Card("Client", "certified" if client["certified"] else "disturbed", "", note))
        return found
    found.append(
        Card(
            "Weights",
            size(memory["weight_bytes"]),
            "",
            f"KV cache {size(memory['kv_cache_bytes'])}",
        )
    )
    return found


def warnings(result: Mapping[str, Any]) -> list[str]:
    """What a reader must know before believing a number."""
    ours = result["llmopt"]
    found = []
    if (client := ours.get("client")) and not client["certified"]:
        found += [f"Not certified: {reason}." for reason in client["reasons"]]
    if ours["slowdown"] != 1.0:
        found.append(
            f"Every {'draw of the sampler' if ours.get('slowdown_where') == 'sampler' else 'step'} was "
            f"made {ours['slowdown']:g} times as long on purpose (--slowdown)."
        )
    found += [f"{note[0].upper()}{note[1:]}." for note in ours["workload"]["notes"]]
    metric_count = ours["metrics"]["ttft"]["count"]
    if 0 < metric_count < 300:
        found.append(
            f"p99 of {metric_count} requests is close to their maximum: read it as such, and use "
            "more prompts to learn about the tail."
        )
    if ours["preemptions"]:
        found.append(f"{ours['preemptions']} sequences were preempted: the KV cache was too small.")
    if guessed := ours.get("speculation"):
        found.append(
            f"Speculation ({guessed['method']}): {guessed['num_accepted']:,} of "
            f"{guessed['num_guesses']:,} guesses stood, {guessed['acceptance']:.1%}."
        )
    return found


def latency_tables(result: Mapping[str, Any]) -> list[Table]:
    """Latencies, their spread between passes, and the steady state where there was one."""
    ours = result["llmopt"]
    tables = [latency_table(ours), percentile_table(ours), spread_table(ours)]
    if found := ours.get("steady_state"):
        tables.append(steady_table(result, found))
    return tables


def steady_table(result: Mapping[str, Any], found: Mapping[str, Any]) -> Table:
    """The steady state beside the whole run, ramp and drain included."""
    metrics = result["llmopt"]["metrics"]
    window = sum(one["duration_s"] for one in found["windows"])
    short = [one for one in found["windows"] if one["warning"]]
    rows = [
        [name, number(result[key]), number(found[key])]
        for name, key in (
            ("Requests/s", "request_throughput"),
            ("Output tokens/s", "output_throughput"),
            ("All tokens/s", "total_token_throughput"),
        )
    ]
    rows += [
        [f"Median {SHORT[m]}, ms", number(metrics[m]["median"]), number(found[f"median_{m}_ms"])]
        for m in ("ttft", "tpot", "itl", "e2el")
    ]
    caption = (
        f"Steady: with at least {found['windows'][0]['threshold_abs']} requests in flight, "
        f"{window:.1f} s of {result['duration']:.1f} s."
    )
    if short:
        caption += " Its windows are shorter than 10 s or a tenth of a pass: read them as a hint."
    return Table(["", "whole run", "steady state"], rows, caption=caption)


def latency_table(ours: Mapping[str, Any]) -> Table:
    """Every metric with its percentiles and the interval of its mean."""
    names = {
        "ttft": "TTFT",
        "tpot": "TPOT",
        "itl": "ITL, per chunk",
        "token_gap": "ITL, per token",
        "e2el": "End to end",
        "client_queue_time": "Client queue",
        "ttft_from_schedule": "TTFT from schedule",
        "e2el_including_client_queue": "End to end from schedule",
    }
    rows = []
    for metric, name in names.items():
        one = ours["metrics"][metric]
        rows.append(
            [
                name,
                *(number(one[key]) for key in ("mean", "median", "p90", "p95", "p99", "std")),
                interval(one["interval_95"]["mean"]),
                f"{one['count']:,}",
            ]
        )
    header = ["ms", "mean", "median", "p90", "p95", "p99", "std", "95 % interval of the mean", "n"]
    return Table(header, rows)


def percentile_table(ours: Mapping[str, Any]) -> Table:
    """How sure the percentiles are."""
    return Table(
        ["ms", "p50", "p90", "p95", "p99"],
        percentile_rows(ours),
        caption="95 % order-statistic intervals: two of the measured values that enclose the percentile "
        "whatever the distribution. Unbounded: there are too few requests to say.",
    )


def percentile_rows(ours: Mapping[str, Any]) -> list[list[str]]:
    """The order-statistic intervals of the metrics that have one value a request."""
    names = {"ttft": "TTFT", "tpot": "TPOT", "e2el": "End to end"}
    found = []
    for metric, name in names.items():
        intervals = ours["metrics"][metric].get("order_interval_95")
        if intervals:
            found.append([name, *(bounds(intervals[q]) for q in ("p50", "p90", "p95", "p99"))])
    return found


def spread_table(ours: Mapping[str, Any]) -> Table:
    """Spread between the passes, and what a comparison could see."""
    names = {
        "output_throughput": "Output throughput",
        "median_ttft_ms": "Median TTFT",
        "median_tpot_ms": "Median TPOT",
        "median_e2el_ms": "Median end to end",
    }
    rows = []
    for key, name in names.items():
        if key not in ours["spread"]:
            continue
        one = ours["spread"][key]
        values = ", ".join(number(run[key]) for run in ours["runs"])
        cv = percent(one["run_cv"]) + (" (assumed)" if one["run_cv_is_assumed"] else "")
        mean = interval(one.get("interval_95"))
        rows.append([name, values, mean, cv, percent(one["smallest_visible_change"])])
    return Table(
        ["per pass", "values", "95 % interval of the mean", "CV", "smallest visible change"],
        rows,
        caption="CV: standard deviation over mean. "
        "Smallest visible change: what a comparison with an equal run would notice in four of "
        "five cases, (t₀.₉₅ + t₀.₈) · CV · √(2 / passes).",
    )


def phase_sentence(ours: Mapping[str, Any]) -> str:
    """Where the time went."""
    phases = ours["phases"]
    peaks = (
        f"At most {ours['peaks']['requests_in_flight']:.0f} requests were in flight, and at most "
        f"{ours['peaks']['output_tokens_in_one_second']:,.0f} tokens came within one second."
    )
    if phases is None:
        rate = ours["prefix_cache_hit_rate"]
        said = f"The server says that its prefix cache gave {percent(rate)} of the prompt tokens. "
        return (said if rate is not None else "") + peaks
    return (
        f"Over all passes {number(phases['prefill_seconds'])} s went to steps that compute prompts, "
        f"{number(phases['decode_seconds'])} s to steps that only decode, and "
        f"{number(phases['between_steps_seconds'])} s to the client between {phases['num_steps']:,} "
        f"steps. The prefix cache gave {percent(ours['prefix_cache_hit_rate'])} of the prompt tokens. "
        + peaks
    )


def roofline_table(series: Mapping[str, Mapping[str, Any] | None]) -> Table:
    """Points of one or several runs, as numbers."""
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
                caption=f"On {scored['source']}: {scored['protocol']}; tokens {scored['token_sha256'][:12]}.",
            )
        )
    header = ["model", "weights held", "checkpoint on disk", "KV cache", "peak resident"]
    return [*tables, *task_tables(results), Table(header, memory_rows)]


def _stored(memory: Mapping[str, Any]) -> str:
    """How the cache was stored and what it held, where the result tells."""
    if not (cache := memory.get("kv_cache")):
        return ""
    return f" ({cache['dtype']}, {cache['tokens']:,} tokens)"


def identity_table(result: Mapping[str, Any]) -> Table:
    """What decides whether another run may be compared with this one."""
    ours = result["llmopt"]
    identity, workload = ours["identity"], ours["workload"]
    engine = ", ".join(f"{k} {v}" for k, v in identity["engine"].items() if v is not None)
    rows = [
        ["Model", f"{identity['model']}, {identity['model_hash'][:30]}"],
        ["Precision", f"{identity['dtype']}, quantization {identity['quantization'] or 'none'}"],
        [
            "Workload",
            f"{workload['source']}: {workload['num_requests']} requests, "
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
    ]
    return Table(["", ""], rows, is_prose=True)


def formula_table() -> Table:
    """The formula of every metric that a report shows."""
    return Table(
        ["metric", "formula"],
        [[name, text] for name, text in formulas().items()],
        is_prose=True,
        caption="Latency and throughput definitions are those of vllm bench serve.",
    )


def formulas() -> dict[str, str]:
    """{metric: formula}, all of them."""
    return {
        **metrics.FORMULAS,
        **steady.FORMULAS,
        **quality.FORMULAS,
        **roofline.FORMULAS,
        **certify.FORMULAS,
    }


def flat(value: Any) -> str:
    """A value of the environment as text; what the machine does not tell is said to be unknown."""
    if value is None:
        return "unknown"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {flat(inner)}" for key, inner in value.items())
    return " ".join(map(flat, value)) if isinstance(value, list) else str(value)


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

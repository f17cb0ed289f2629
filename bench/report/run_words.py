"""Sentences of a run report: load, time per phase, and warnings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..page.page import number, percent


def subtitle(result: Mapping[str, Any]) -> str:
    """Model, precision, load and machine in one line."""
    identity = result["llmopt"]["identity"]
    precision = identity["quantization"] or identity["dtype"]
    return (
        f"{identity['model']} ({precision}) · {identity['workload']} · {load_words(identity['load'])} · "
        f"{identity['device']} · {identity['machine']} · {result['date']}"
    )


def load_words(load: Mapping[str, Any]) -> str:
    """`closed loop of 8`, `5 requests/s`, `closed loop of 8 conversations for 60 s`."""
    what = "conversations" if load.get("history") else "requests"
    seconds = load.get("duration")
    return _arrivals(load, what) + (f" for {seconds:g} s" if seconds else "")


def _arrivals(load: Mapping[str, Any], what: str) -> str:
    limit = load["max_concurrency"]
    closed = f"closed loop of {limit}" + (" conversations" if what == "conversations" else "")
    if strategy := load.get("ramp_up_strategy"):
        first, last = load["ramp_up_start_rps"], load["ramp_up_end_rps"]
        ramp = f"{strategy} ramp from {first:g} to {last:g} {what}/s"
        return f"{ramp}, at most {limit} in flight" if limit else ramp
    if load["request_rate"] == "inf":
        return closed if limit else f"all {what} at once"
    shape = {1: "Poisson", math.inf: "constant"}.get(
        load["burstiness"] or math.inf, f"gamma, burstiness {load['burstiness']}"
    )
    if load.get("arrivals") == "replayed":
        shape = "mean of the replayed times"
    rate = f"{load['request_rate']:g} {what}/s ({shape})"
    return f"{rate}, at most {limit} in flight" if limit else rate


def phase_sentence(record: Mapping[str, Any]) -> str:
    """Time per phase, concurrency and prefix-cache hits, as sentences."""
    phases = record["phases"]
    peaks = (
        f"At most {record['peaks']['requests_in_flight']:.0f} requests were in flight, and at most "
        f"{record['peaks']['output_tokens_in_one_second']:,.0f} tokens came within one second."
    )
    if phases is None:
        rate = record["prefix_cache_hit_rate"]
        hits = f"The server reports that {percent(rate)} of the prompt tokens came from its prefix cache. "
        return (hits if rate is not None else "") + peaks
    return (
        f"Over all passes {number(phases['prefill_seconds'])} s went to steps with prefill, "
        f"{number(phases['decode_seconds'])} s to decode-only steps, and "
        f"{number(phases['between_steps_seconds'])} s to the client between {phases['num_steps']:,} "
        f"steps. The prefix cache gave {percent(record['prefix_cache_hit_rate'])} of the prompt tokens. "
        + peaks
    )


def disturbed_words(record: Mapping[str, Any]) -> list[str]:
    """Which passes were rejected by their own evidence, and which of those could not be measured again."""
    kept = [run["disturbed_because"] for run in record["runs"] if run.get("disturbed")]
    rejected = [run["disturbed_because"] for run in record.get("rejected_passes", ())]
    notes = []
    if kept:
        notes.append(f"{len(kept)} of {len(record['runs'])} passes were disturbed: {kept[0]}.")
    if rejected:
        notes.append(
            f"Passes measured again because they were disturbed: {len(rejected)} ({rejected[0]})."
        )
    return notes


def warnings(result: Mapping[str, Any]) -> list[str]:
    """Caveats: certification, injected delay, disturbed passes, few samples, preemptions; and what
    speculation and images did."""
    record = result["llmopt"]
    notes = []
    if (client := record.get("client")) and not client["certified"]:
        notes += [f"Not certified: {reason}." for reason in client["reasons"]]
    if record["slowdown"] != 1.0:
        notes.append(
            f"Every {'sampling phase' if record.get('slowdown_where') == 'sampler' else 'step'} was "
            f"made {record['slowdown']:g} times as long on purpose (--slowdown)."
        )
    notes += [f"{note[0].upper()}{note[1:]}." for note in record["workload"]["notes"]]
    notes += disturbed_words(record)
    metric_count = record["metrics"]["e2el"]["count"]
    if 0 < metric_count < 300:
        notes.append(
            f"p99 of {metric_count} requests is close to their maximum: read it as such, and use "
            "more prompts to learn about the tail."
        )
    if record["preemptions"]:
        notes.append(
            f"{record['preemptions']} sequences were preempted: the KV cache was too small."
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

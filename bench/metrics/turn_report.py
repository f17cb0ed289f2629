"""Conversations and fixed durations in reports: a sentence, a table and a plot by turn, and the window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..page.page import Figure, Section, Table, number, percent
from ..page.plot_style import DECODE, MUTED, PREFILL, canvas, title, to_svg

FIGURE = "turns"
CAPTION = (
    "Left: time to first token by turn, median and p99. Right: mean prompt tokens of a turn, of which the "
    "prefix cache gave the darker part."
)


def turn_section(part: Mapping[str, Any]) -> Section:
    """The section of `llmopt.conversations`."""
    figures = [Figure(FIGURE, turns_svg(part["turns"]), CAPTION)]
    return Section(
        "Conversation turns", (turn_sentence(part),), figures, (turn_table(part["turns"]),)
    )


def turn_sentence(part: Mapping[str, Any]) -> str:
    """Conversations, history and prefix-cache hits against those expected."""
    whose = "the model's own" if part["history"] == "model" else "the data set's"
    words = (
        f"{part['num_conversations']} conversations of up to {len(part['turns'])} turns, with {whose} "
        f"answers in the history and {number(part['mean_think_seconds'])} s of think time on average. "
        f"{percent(part['history_share'])} of the prompt tokens repeat the turn before."
    )
    if (expected := part["expected_prefix_cache_hit_rate"]) is not None:
        words += (
            f" Block arithmetic expects a prefix cache that evicts nothing to give {percent(expected)} of "
            "the prompt tokens."
        )
    return words


def turn_table(turns: Sequence[Mapping[str, Any]]) -> Table:
    """One row per turn: counts, lengths, cached tokens and latencies."""
    header = ["turn", "requests", "failed", "prompt", "new", "cached", "output"]
    rows = [
        [
            str(turn["turn"]),
            str(turn["completed"]),
            str(turn["failed"]),
            number(turn["mean_prompt_len"], 0),
            number(turn["mean_new_tokens"], 0),
            percent(turn["prefix_cache_hit_rate"]),
            number(turn["mean_output_len"], 0),
            number(turn["ttft_ms"]["median"]),
            number(turn["ttft_ms"]["p99"]),
            number(turn["tpot_ms"]["median"]),
            number(turn["e2el_ms"]["median"]),
        ]
        for turn in turns
    ]
    latencies = ["median TTFT, ms", "p99 TTFT, ms", "median TPOT, ms", "median E2EL, ms"]
    return Table(
        [*header, *latencies],
        rows,
        caption="Prompt, new and output: mean tokens; new is what a turn adds to the one before and its "
        "answer. Cached: share of the prompt tokens.",
    )


def turns_svg(turns: Sequence[Mapping[str, Any]]) -> str:
    """TTFT by turn, and the growth of the prompt with its cached part."""
    figure, (latency, length) = canvas(2, width=11, height=3.2)
    seen = [turn for turn in turns if turn["completed"]]
    numbers = np.array([turn["turn"] for turn in seen])
    for key, style in (("median", "-"), ("p99", ":")):
        values = [turn["ttft_ms"][key] for turn in seen]
        latency.plot(
            numbers, values, style, marker="o", markersize=4, color=PREFILL, label=f"{key} TTFT"
        )
    title(latency, "Time to first token")
    latency.set_ylabel("ms")
    latency.set_ylim(bottom=0)
    prompts = [turn["mean_prompt_len"] for turn in seen]
    cached = [turn["mean_cached_tokens"] for turn in seen]
    length.bar(numbers, prompts, color=MUTED, alpha=0.4, label="prompt")
    length.bar(numbers, cached, color=DECODE, label="from the prefix cache")
    title(length, "Prompt tokens")
    for axis in (latency, length):
        axis.set_xlabel("turn")
        axis.locator_params(axis="x", integer=True)
        axis.legend(fontsize=9, frameon=False)
    return to_svg(figure, "Time to first token and prompt tokens by turn")


def turns_in_words(part: Mapping[str, Any]) -> str:
    """First against last turn in one line, for the console."""
    seen = [turn for turn in part["turns"] if turn["completed"]]
    if not seen:
        return "No turn was answered"
    ends = seen[:1] if len(seen) == 1 else [seen[0], seen[-1]]
    words = ", ".join(
        f"turn {turn['turn']}: median TTFT {number(turn['ttft_ms']['median'])} ms, "
        f"{number(turn['mean_prompt_len'], 0)} prompt tokens, {percent(turn['prefix_cache_hit_rate'])} cached"
        for turn in ends
    )
    return f"{part['num_conversations']} conversations; {words}"


def window_sentence(window: Mapping[str, Any]) -> str:
    """What a run of fixed duration sent, and what was in flight when the window closed."""
    passes = len(window["seconds"])
    return (
        f"{passes} {'pass' if passes == 1 else 'passes'} of {number(window['seconds'][0], 1)} s sent "
        f"{sum(window['sent'])} requests; {sum(window['drained'])} were in flight at the end and "
        "drained: their latencies count, the throughput does not have what came after the window"
    )

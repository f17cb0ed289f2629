"""Client overhead and certification, for reports and the console."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ..load.certify import ClientError
from ..page.page import Section, Table, number


def client_section(ours: Mapping[str, Any]) -> Section:
    """The client's own error beside what it measured."""
    client = ours["client"]
    rows = []
    for name, key in (("TTFT", "client_ttft_error_ms"), ("ITL", "client_itl_error_ms")):
        if error := client[key]:
            measured = ours["metrics"][name.lower()]["median"]
            values = [number(error[part]) for part in ("median", "mean", "p99", "max")]
            rows.append([f"{name} error", *values, number(measured)])
    lag = client["loop_lag_ms"]
    rows.append(["event loop lag", "", *(number(lag[part]) for part in ("mean", "p99", "max")), ""])
    counted = ", ".join(f"{count} by {name}" for name, count in client["token_counts_by"].items())
    words = [
        certificate(client),
        f"Sent by {client['workers']} worker process{'es' if client['workers'] > 1 else ''} to "
        f"{ours['server']['url']}{ours['server']['path']}; output tokens of answers counted: "
        f"{counted or 'none'}; {client['late_connections']} connections were opened while the clock ran.",
    ]
    if started := ours["server"].get("started"):
        words.append(
            f"The server was started for this run ({started['preset']}, version "
            f"{started['version'] or 'unknown'}) and was ready after {started['seconds_to_ready']:.1f} s: "
            f"{shlex.join(started['command'])}"
        )
    header = ["client, ms", "median", "mean", "p99", "max", "measured median"]
    return Section("The client", words, (), (Table(header, rows),))


def server_metrics_sections(ours: Mapping[str, Any]) -> list[Section]:
    """The server's own metrics during the passes, or the reason why there are none."""
    if not (metrics := ours.get("server_metrics")):
        return []
    if metrics["reason"]:
        return [Section("The server's metrics", (f"None: {metrics['reason']}.",), (), ())]
    gauges = [
        [name, number(value["mean"], 3), number(value["max"], 3)]
        for name, value in sorted(metrics["gauges"].items())
    ]
    counters = [[name, f"{value:,.10g}"] for name, value in sorted(metrics["counters"].items())]
    means = [[name, number(value, 4)] for name, value in sorted(metrics["means"].items())]
    scrapes = sum(each["num_scrapes"] for each in metrics["runs"] if each)
    words = (
        f"{scrapes} scrapes of {metrics['url']}: at the start and the end of each pass and every second "
        "between. The server's other clients are counted too."
    )
    tables = [
        Table(["gauge", "mean", "max"], gauges),
        Table(["counter", "rise over all passes"], counters),
        Table(["histogram", "mean of what it observed"], means),
    ]
    return [Section("The server's metrics", (words,), (), [t for t in tables if t.rows])]


def certificate(client: Mapping[str, Any]) -> str:
    """One sentence: certified or not, and why."""
    if not client["certified"]:
        return f"Not certified: {'; '.join(client['reasons'])}."
    ttft, itl = client["client_ttft_error_ms"], client["client_itl_error_ms"]
    return (
        f"Certified: against a server of known latency at this concurrency the client's error was "
        f"{number(ttft['median'])} ms of TTFT and {number(itl['median'])} ms of ITL (medians)."
    )


def check_table(errors: Sequence[ClientError]) -> str:
    """The client's error at several numbers of streams, as text."""
    header = (
        f"{'streams':>8} {'workers':>8} {'failed':>7} {'TTFT error ms':>24} {'ITL error ms':>24} "
        f"{'server late ms':>15} {'loop lag ms':>12}"
    )
    under = f"{'':>25} {'median / p99':>24} {'median / p99':>24} {'median':>15} {'p99':>12}"
    lines = [header, under]
    for one in errors:
        ttft, itl = one.client_ttft_error_ms, one.client_itl_error_ms
        lines.append(
            f"{one.streams:>8} {one.workers:>8} {one.failed:>7} "
            f"{number(ttft['median']) + ' / ' + number(ttft['p99']):>24} "
            f"{number(itl['median']) + ' / ' + number(itl['p99']):>24} "
            f"{number(one.server_lateness_ms['median']):>15} {number(one.loop_lag_ms['p99']):>12}"
        )
    return "\n".join(lines)

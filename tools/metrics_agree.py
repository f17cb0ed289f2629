"""Agreement of /metrics with a client's measurements: `python tools/metrics_agree.py [--json FILE]`.

Starts `serve-local` on the bundled model, sends it a load with `llmopt bench --base-url`, which certifies its
own error first, and compares the increase of the histograms with the client's means. The client's times begin
before the request is written and end after the response is read, so they are the longer ones: what is left
beside the client's own error is HTTP on both sides.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from llmopt.bench.machine.environment import machine_name
from prometheus_client.parser import text_string_to_metric_families

LLMOPT = [sys.executable, "-m", "llmopt.cli.main"]
TIMES = {
    "ttft_ms": ("time_to_first_token_seconds", "mean_ttft_ms"),
    "itl_ms": ("inter_token_latency_seconds", "mean_itl_ms"),
    "e2el_ms": ("e2e_request_latency_seconds", "mean_e2el_ms"),
}
COUNTS = {
    "prompt tokens": ("prompt_tokens", "total_input_tokens"),
    "generated tokens": ("generation_tokens", "total_output_tokens"),
}


@contextmanager
def serving() -> Iterator[str]:
    """The address of a server of the bundled model."""
    command = [*LLMOPT, "serve-local", "stories3M", "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        assert server.stdout is not None
        try:
            yield json.loads(server.stdout.readline())["url"]
        finally:
            server.terminate()


def scraped(url: str) -> dict[str, float]:
    """Every sample of our own names."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    samples = (sample for family in families for sample in family.samples)
    return {s.name: s.value for s in samples if s.name.startswith("llmopt_")}


def measured(url: str, concurrency: int, folder: str) -> dict[str, Any]:
    """The client's record of one pass."""
    words = [
        *("bench", "--base-url", url, "--model", "stories3M", "--json", "--result-dir", folder),
        *("--dataset", "random", "--random-input-len", "64", "--random-output-len", "64"),
        *("--num-prompts", "200", "--num-runs", "1", "--num-warmups", "0", "--no-quality"),
        *("--max-concurrency", str(concurrency)),
    ]
    run = subprocess.run([*LLMOPT, *words], stdout=subprocess.PIPE, check=True)
    return json.loads(run.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args()
    with serving() as url, TemporaryDirectory() as folder:
        before = scraped(url)
        client = measured(url, options.concurrency, folder)
        after = scraped(url)

    def gained(name: str) -> float:
        return after[f"llmopt_{name}"] - before.get(f"llmopt_{name}", 0.0)

    rows: dict[str, dict[str, float]] = {}
    for label, (name, field) in COUNTS.items():
        rows[label] = {"server": gained(f"{name}_total"), "client": client[field]}
    for label, (name, field) in TIMES.items():
        mean = 1000 * gained(f"{name}_sum") / gained(f"{name}_count")
        rows[label] = {"server": mean, "client": client[field]}
    error = client["llmopt"]["client"]
    for label, row in rows.items():
        print(f"{label:<18} server {row['server']:12.3f}   client {row['client']:12.3f}")
    print(
        f"the client's own error: {error['client_ttft_error_ms']}, {error['client_itl_error_ms']}"
    )
    if options.json is not None:
        record = {"machine": machine_name("cpu"), "rows": rows, "client": error}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

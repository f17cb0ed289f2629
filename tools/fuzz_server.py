"""Fuzz `serve-local` from its OpenAPI document (schemathesis): no status of 500 or above, no hang, no leak.

    python tools/fuzz_server.py --python ENV/bin/python --json numbers.json

schemathesis lives in an environment of its own (`pip install schemathesis`). `tools/fuzz_driver.py` sends, to
every operation of the document, requests as clients send them, requests as the document allows them, and
requests that it forbids; the same ones for a seed, but for the ids that the server makes. The server is the
soak's: it ends itself if a block or slot is not free whenever it falls idle. Exit code 1 if a status is 500
or above, if an answer takes more than `--hang-seconds`, if fewer than `--requests` were answered, or if fewer
than half of them with 2xx.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from llmopt.bench.machine.environment import machine_name
from llmopt.recipes import MODELS
from prometheus_client.parser import text_string_to_metric_families

HERE = Path(__file__).parent
NO_NETWORK = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
MODEL = "fuzzed"
TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
)


@contextmanager
def serving(model: str, folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server on the bundled model, which also embeds texts, and takes tools."""
    copy = folder / "model"
    shutil.copytree(MODELS / model, copy)
    (copy / "1_Pooling").mkdir()
    (copy / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (folder / "template.jinja").write_text(TEMPLATE)
    command = [
        *(sys.executable, str(HERE / "soak_server.py"), "serve-local", str(copy), "--json"),
        *("--port", "0", "--served-model-name", MODEL, "--scheduling-policy", "priority"),
        *("--chat-template", str(folder / "template.jinja")),
    ]
    with (
        (folder / "server.log").open("wb") as log,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, env=os.environ | NO_NETWORK
        ) as server,
    ):
        assert server.stdout is not None
        try:
            yield json.loads(server.stdout.readline())["url"], server
        finally:
            server.terminate()


def left_behind(url: str) -> list[str]:
    """What is wrong with the server once its clients are gone."""
    wanted = {
        "llmopt_kv_cache_usage_ratio": "KV blocks are still in use",
        "llmopt_num_requests_running": "requests still run",
        "llmopt_num_requests_waiting": "requests still wait",
        "llmopt_failed_steps_total": "steps failed",
    }
    with httpx.Client(base_url=url, trust_env=False, timeout=30) as http:
        if http.get("/health").status_code != 200:
            return ["the server is unhealthy"]
        for _ in range(100):
            values = {
                sample.name: sample.value
                for family in text_string_to_metric_families(http.get("/metrics").text)
                for sample in family.samples
            }
            wrong = [f"{words}: {values[name]:g}" for name, words in wanted.items() if values[name]]
            if not wrong:
                break
            time.sleep(0.1)
    return wrong


def verdict(found: dict[str, Any], num_wanted: int) -> tuple[Counter[str], list[str]]:
    """How often each status came, and what must not be."""
    by_status: Counter[str] = Counter()
    for counts in found["by_operation"].values():
        by_status.update(counts)
    total, good = by_status.total(), sum(n for s, n in by_status.items() if s.startswith("2"))
    failures = list(found["failures"])
    if total < num_wanted:
        failures.append(f"only {total} requests were answered")
    if 2 * good < total:
        failures.append(f"only {good} of {total} requests were answered with 2xx")
    return by_status, failures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", required=True, help="the Python that has schemathesis")
    parser.add_argument("--model", default="stories260K")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument(
        "--model-share", type=float, default=0.4, help="of requests that run the model"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hang-seconds", type=float, default=20)
    parser.add_argument("--json", type=Path, help="write the counts here")
    asked = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(asked.model, Path(folder)) as (url, server),
    ):
        # Hypothesis gives up some of the examples that it is asked for.
        words = [url, MODEL, str(round(asked.requests * 1.1)), str(asked.seed)]
        words += [str(asked.hang_seconds), str(asked.model_share)]
        driver = subprocess.run(
            [asked.python, str(HERE / "fuzz_driver.py"), *words],
            stdout=subprocess.PIPE,
            check=True,
            cwd=folder,
        )
        found = json.loads(driver.stdout)
        by_status, failures = verdict(found, asked.requests)
        failures += left_behind(url) if server.poll() is None else ["the server has ended"]
    for operation, counts in found["by_operation"].items():
        print(f"  {operation}: " + ", ".join(f"{status} × {n}" for status, n in counts.items()))
    total, good = by_status.total(), sum(n for s, n in by_status.items() if s.startswith("2"))
    broken = sum(n for status, n in by_status.items() if status >= "500")
    hangs = sum("no answer in time" in failure for failure in failures)
    print(
        f"{total} requests: {good} answered with 2xx ({good / total:.0%}), {broken} with 500 or above, "
        f"{hangs} hangs; slowest answer {found['slowest_seconds']:.1f} s"
    )
    if asked.json:
        record = {
            "machine": machine_name("cpu"),
            "schemathesis": found["schemathesis"],
            "model": asked.model,
            "seed": asked.seed,
            "model_share": asked.model_share,
            "requests": total,
            "answered_2xx": good,
            "answered_5xx": broken,
            "hangs": hangs,
            "hang_seconds": asked.hang_seconds,
            "slowest_seconds": found["slowest_seconds"],
            "status": dict(sorted(by_status.items())),
            "by_operation": found["by_operation"],
            "failures": failures,
        }
        asked.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for failure in failures:
        print(failure, file=sys.stderr)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()

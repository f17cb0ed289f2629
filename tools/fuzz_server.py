"""Fuzz `serve-local` from its OpenAPI document (schemathesis): no status of 500 or above, no hang.

    python tools/fuzz_server.py --schemathesis ENV/bin/schemathesis --json numbers.json

schemathesis lives in an environment of its own (`pip install schemathesis`). It makes requests from the
document, valid and invalid ones, run after run with other seeds, until `--cases` of them have a response;
statuses are counted in the server's own access log. A request that takes more than `--hang-seconds` counts
as a hang. Between two runs the server must be healthy, and in the end its KV
blocks must be free. Exit code 1 if any of this does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx

RUN_SECONDS = 60
ACCESS = re.compile(r'"(?P<method>[A-Z]+) (?P<path>\S*) HTTP/[\d.]+" (?P<status>\d{3})')
NO_NETWORK = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def answers(log: Path, paths: list[str]) -> Counter[tuple[str, int]]:
    """(path of the document, status) → how often, from the access log."""
    found: Counter[tuple[str, int]] = Counter()
    for match in ACCESS.finditer(log.read_text(encoding="utf-8", errors="replace")):
        asked = match["path"].partition("?")[0]
        known = [
            path
            for path in paths
            if path == asked or ("{" in path and asked.startswith(path[: path.index("{")]))
        ]
        found[known[0] if known else "other", int(match["status"])] += 1
    return found


def is_its_own(said: str) -> bool:
    """Whether the failure is schemathesis' own, not the server's."""
    stumbled = "Runtime Error" in said or "Internal Error" in said
    return stumbled and "Failures:" not in said and "Network Error" not in said


def fuzz(program: str, url: str, seed: int, hang_seconds: float, report: Path) -> tuple[int, str]:
    """One run of schemathesis: exit code and the end of its output."""
    command = [
        program, "run", f"{url}/openapi.json", "--checks", "not_a_server_error", "--workers", "2",
        "--phases", "coverage,fuzzing", "--seed", str(seed), "--max-examples", "150", "--no-color",
        "--max-time", str(RUN_SECONDS), "--request-timeout", str(hang_seconds),
        "--continue-on-failure", "--suppress-health-check", "all",
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=3 * RUN_SECONDS, cwd=report
        )
    except subprocess.TimeoutExpired:
        # Generating a request may take that long; the server's own requests are checked afterwards.
        return 1, "Internal Error: it did not end by itself"
    return done.returncode, done.stdout[-6000:]


def earlier(record: Path | None) -> tuple[Counter[tuple[str, int]], int]:
    """Responses and runs that the file holds already."""
    found: Counter[tuple[str, int]] = Counter()
    if record is None or not record.exists():
        return found, 0
    old = json.loads(record.read_text())
    for path, statuses in old["by_path"].items():
        found.update({(path, int(status)): count for status, count in statuses.items()})
    return found, old["runs"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schemathesis", required=True, help="the schemathesis program")
    parser.add_argument("--model", default="stories260K")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--hang-seconds", type=float, default=20)
    parser.add_argument("--json", type=Path, help="add to what the file holds, if it is there")
    asked = parser.parse_args()
    serve = [
        sys.executable, "-c", "from llmopt.cli.main import main; main()", "serve-local",
        asked.model, "--port", "0", "--json",
    ]  # fmt: skip
    failures: list[str] = []
    before, num_runs = earlier(asked.json)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with (
            log.open("w") as out,
            subprocess.Popen(
                serve, stdout=subprocess.PIPE, stderr=out, env=os.environ | NO_NETWORK
            ) as server,
            httpx.Client(trust_env=False, timeout=30) as http,
        ):
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["url"]
            paths = list(http.get(f"{url}/openapi.json").json()["paths"])
            try:
                while sum((before + answers(log, paths)).values()) < asked.cases and not failures:
                    begin = time.monotonic()
                    code, said = fuzz(
                        asked.schemathesis, url, num_runs, asked.hang_seconds,
                        Path(folder),
                    )  # fmt: skip
                    num_runs += 1
                    if code and is_its_own(said):
                        print(f"run {num_runs}: schemathesis failed by itself", file=sys.stderr)
                    elif code:
                        failures.append(said)
                    if http.get(f"{url}/health").status_code != 200:
                        failures.append("the server is unhealthy")
                    count = sum((before + answers(log, paths)).values())
                    print(
                        f"run {num_runs}: {count} answers in all, {time.monotonic() - begin:.0f} s",
                        file=sys.stderr,
                    )
                used = 1.0
                for _ in range(100):
                    match = re.search(
                        r"^vllm:kv_cache_usage_perc\S* (\S+)$",
                        http.get(f"{url}/metrics").text,
                        re.MULTILINE,
                    )
                    used = 1.0 if match is None else float(match[1])
                    if used == 0:
                        break
                    time.sleep(0.1)
                if used:
                    failures.append(f"KV blocks are still in use: {used:.1%}")
            finally:
                server.terminate()
        found = before + answers(log, paths)
    by_status = Counter[int]()
    by_path: dict[str, dict[str, int]] = {}
    for (path, status), count in sorted(found.items()):
        by_status[status] += count
        by_path.setdefault(path, {})[str(status)] = count
    total, broken = sum(by_status.values()), sum(n for s, n in by_status.items() if s >= 500)
    if broken:
        failures.append(f"{broken} answers of 500 or above")
    print(f"{total} requests in {num_runs} runs: {broken} answered with 500 or above")
    for path, statuses in by_path.items():
        print(f"  {path}: " + ", ".join(f"{status} × {n}" for status, n in statuses.items()))
    if asked.json:
        record = {
            "schemathesis": subprocess.run(
                [asked.schemathesis, "--version"], capture_output=True, text=True
            ).stdout.split()[-1],
            "model": asked.model,
            "requests": total,
            "runs": num_runs,
            "hang_seconds": asked.hang_seconds,
            "status": {str(status): count for status, count in sorted(by_status.items())},
            "by_path": by_path,
            "failures": failures,
        }
        asked.json.write_text(json.dumps(record, indent=1) + "\n")
    for failure in failures:
        print(failure, file=sys.stderr)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()

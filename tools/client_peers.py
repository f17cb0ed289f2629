"""Compare the TTFT error of load clients: ours, vLLM's benchmark and AIPerf, on one server that stamps its
chunks.

    python -m tools.client_peers --vllm ENV/bin/vllm --aiperf ENV/bin/aiperf -o client-peers.json

Every client sends the same number of streams at the same rate; the error is its median TTFT less the
server's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from urllib.request import urlopen

from llmopt.bench.load.fleet import ROUNDS, TTFT_MS, Fleet, default_workers, known_pass, timetable
from llmopt.bench.machine.environment import describe
from llmopt.recipes import MODELS

from tests.support.odd_known_server import odd_server

STREAMS = (1, 100, 500, 1000)
TOKENIZER = str(MODELS / "stories3M")


def ours(program: str, port: int, streams: int, folder: Path) -> float:
    with Fleet(default_workers(streams)) as fleet:
        found = known_pass(fleet, port, streams, timetable(streams)[0])
    return 1000 * median(one.answer.times[0] - one.sent for one in found.exchanges)


def load(streams: int) -> tuple[int, int, float]:
    """(requests, tokens, requests per second) of `known_pass`."""
    itl, tokens = timetable(streams)
    return streams * ROUNDS, tokens, streams / (TTFT_MS + (tokens - 1) * itl) * 1000


def vllm(program: str, port: int, streams: int, folder: Path) -> float:
    count, tokens, rate = load(streams)
    words = ["bench", "serve", "--backend", "openai", "--base-url", f"http://127.0.0.1:{port}"]
    words += ["--model", TOKENIZER, "--dataset-name", "random", "--random-input-len", "8"]
    words += ["--random-output-len", str(tokens), "--num-prompts", str(count), "--ignore-eos"]
    words += ["--request-rate", f"{rate:.3f}", "--burstiness", "1000", "--disable-tqdm"]
    words += ["--max-concurrency", str(streams), "--save-result", "--result-dir", str(folder)]
    run(program, words)
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text())["median_ttft_ms"]


def aiperf(program: str, port: int, streams: int, folder: Path) -> float:
    count, tokens, rate = load(streams)
    words = ["profile", "--model", "stories3M", "--tokenizer", TOKENIZER, "--streaming"]
    words += ["--url", f"http://127.0.0.1:{port}", "--endpoint-type", "completions"]
    words += ["--request-count", str(count), "--request-rate", f"{rate:.3f}", "--isl", "8"]
    words += ["--concurrency", str(streams), "--osl", str(tokens), "--arrival-pattern", "constant"]
    # Offline, which is any value of the variables, it looks for every tokenizer in the hub's cache.
    run(program, [*words, "--artifact-dir", str(folder), "--ui", "none"], is_offline=False)
    (path,) = folder.rglob("profile_export_aiperf.json")
    return json.loads(path.read_text())["time_to_first_token"]["p50"]


def run(program: str, words: list[str], *, is_offline: bool = True) -> None:
    switches = dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    environment = {key: value for key, value in os.environ.items() if key not in switches}
    environment |= switches if is_offline else {}
    done = subprocess.run([program, *words], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{program} failed:\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}")


CLIENTS: dict[str, Callable[[str, int, int, Path], float]] = {
    "llmopt": ours,
    "vllm": vllm,
    "aiperf": aiperf,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm")
    parser.add_argument("--aiperf")
    parser.add_argument("--streams", type=int, nargs="*", default=STREAMS)
    parser.add_argument("--rounds", type=int, default=3, help="Of each client, in turns.")
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    programs = {"llmopt": sys.executable, "vllm": given.vllm, "aiperf": given.aiperf}
    rows = []
    for streams in given.streams:
        errors: dict[str, list[float]] = {name: [] for name in CLIENTS if programs[name]}
        for _ in range(given.rounds):
            for name in errors:
                with (
                    odd_server(TTFT_MS, timetable(streams)[0]) as port,
                    tempfile.TemporaryDirectory() as folder,
                ):
                    told = CLIENTS[name](programs[name], port, streams, Path(folder))
                    with urlopen(f"http://127.0.0.1:{port}/times") as answer:
                        errors[name].append(told - median(json.load(answer)["ttft"]))
        row = {name: {"median": median(each), "rounds": each} for name, each in errors.items()}
        rows.append({"streams": streams, "ttft_error_ms": row})
        print(json.dumps(rows[-1]), flush=True)
    environment = describe("cpu")
    known = {key: environment[key] for key in ("machine", "load_average", "python", "commit")}
    given.output.write_text(json.dumps({"environment": known, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

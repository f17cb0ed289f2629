"""Load clients compared on one `serve-local`: guidellm, aiperf and ours, as a Markdown table.

    python tools/external_clients.py --guidellm ENV/bin/guidellm --aiperf ENV/bin/aiperf

Each tool lives in an environment of its own (`python -m venv ENV && ENV/bin/pip install guidellm`). All
send the same 48 prompts to `/v1/completions` at the same concurrency and ask for the same number of tokens;
they are interleaved, `--rounds` times, and each round begins with another one, so that no client always
follows the same one. The table holds the median of the rounds. Ours comes twice: once asking for the count
of tokens in every chunk, as `llmopt bench` does, and once for the total at the end, as the others do: the
server pays for the difference. `server CPU` is what the server's process took. Nothing leaves the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from llmopt.bench.options.options import BenchOptions
from llmopt.bench.workloads.datasets import build_workload
from llmopt.quant.load_processor import load_tokenizer
from llmopt.recipes import DEFAULT_MODEL, MODELS

PROMPTS, OUTPUT_LEN, CONCURRENCY = 48, 64, 4
CONTEXT = 512
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
LIMIT_SECONDS = 180
COUNTS_AT_THE_END = ("--extra-body", '{"stream_options": {"include_usage": true}}')
Row = dict[str, float]


def run(command: list[str], **environment: str) -> None:
    """Run a client; its output is shown only when it fails."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        env=os.environ | OFFLINE | environment,
    )
    if done.returncode:
        sys.exit(f"{command[0]} failed:\n{(done.stdout + done.stderr)[-3000:]}")


def ours(url: str, work: Path, *more: str) -> Row:
    """llmopt over HTTP, or with `--num-threads` in place of a URL, in this process."""
    target = [*(["--base-url", url] if url else ["--num-threads", "1"]), "--no-quality"]
    results = work / f"llmopt{len(list(work.iterdir()))}"
    sizes = ["--num-prompts", str(PROMPTS), "--output-len", str(OUTPUT_LEN), "--num-runs", "1"]
    llmopt = str(Path(sys.executable).with_name("llmopt"))
    concurrency = ["--max-concurrency", str(CONCURRENCY), "--result-dir", str(results)]
    run([llmopt, "bench", *target, *sizes, *concurrency, *more])
    result = json.loads(next(results.glob("*/result.json")).read_text())
    return {
        "TTFT": result["mean_ttft_ms"],
        "TPOT": result["mean_tpot_ms"],
        "ITL": result["mean_itl_ms"],
        "request latency": result["mean_e2el_ms"],
        "output tokens/s": result["output_throughput"],
        "prompt tokens": result["total_input_tokens"],
        "output tokens": result["total_output_tokens"],
        "our TPOT, all tokens alike": sum(
            (trace["last"] - trace["first"]) for trace in spans(results)
        )
        * 1000
        / (result["total_output_tokens"] - PROMPTS),
        "our latency / tokens": result["mean_e2el_ms"] * PROMPTS / result["total_output_tokens"],
    }


def spans(results: Path) -> list[dict[str, float]]:
    """First and last chunk of each request."""
    import pyarrow.parquet as pq

    table = pq.read_table(next(results.glob("*/requests.parquet"))).to_pydict()
    pairs = zip(table["first_chunk_s"], table["last_chunk_s"], strict=True)
    return [{"first": first, "last": last} for first, last in pairs]


def guidellm(program: str, url: str, work: Path, prompts: Path) -> Row:
    """`guidellm run` with a concurrent profile; means over successful requests."""
    out = work / "guidellm.json"
    body = {
        "ignore_eos": True,
        "min_tokens": OUTPUT_LEN,
        "max_tokens": OUTPUT_LEN,
        "temperature": 0,
    }
    backend = {
        "kind": "openai_http",
        "target": url,
        "model": DEFAULT_MODEL,
        "request_format": "/v1/completions",
        "extras": {"body": body},
    }
    run(
        [
            program, "run", "--backend", json.dumps(backend),
            "--profile", f"kind=concurrent,streams={CONCURRENCY}",
            "--constraint", f"kind=max_requests,count={PROMPTS}",
            "--data", f"kind=json_file,path={prompts}",
            "--output", f"kind=json,path={out}", "--disable-console",
        ]
    )  # fmt: skip
    one = json.loads(out.read_text())["benchmarks"][0]
    metrics = {
        name: value["successful"]
        for name, value in one["metrics"].items()
        if value and "successful" in value
    }
    return {
        "TTFT": metrics["time_to_first_token_ms"]["mean"],
        "TPOT": metrics["time_per_output_token_ms"]["mean"],
        "ITL": metrics["inter_token_latency_ms"]["mean"],
        "request latency": metrics["request_latency"]["mean"] * 1000,
        "output tokens/s": metrics["output_tokens_per_second"]["mean"],
        "prompt tokens": metrics["prompt_token_count"]["total_sum"],
        "output tokens": metrics["output_token_count"]["total_sum"],
    }


def aiperf(program: str, url: str, work: Path, prompts: Path) -> Row:
    """`aiperf profile`; averages over requests. It knows tokenizers by hub name only, so it gets a cache
    that holds the bundled one."""
    cache = work / "hub" / "models--bundled--model"
    if not cache.exists():
        (cache / "refs").mkdir(parents=True)
        (cache / "refs" / "main").write_text("0" * 40)
        (cache / "snapshots").mkdir()
        (cache / "snapshots" / ("0" * 40)).symlink_to(MODELS / DEFAULT_MODEL)
    out = work / "aiperf"
    run(
        [
            program, "profile", "-m", DEFAULT_MODEL, "--url", url, "--endpoint-type", "completions",
            "--streaming", "--concurrency", str(CONCURRENCY), "--request-count", str(PROMPTS),
            "--warmup-request-count", str(CONCURRENCY), "--input-file", str(prompts),
            "--custom-dataset-type", "single_turn", "--osl", str(OUTPUT_LEN),
            "--extra-inputs", "ignore_eos:true", "--extra-inputs", f"min_tokens:{OUTPUT_LEN}",
            "--extra-inputs", "temperature:0", "--tokenizer", "bundled/model", "--use-server-token-count",
            "--ui", "none", "--output-artifact-dir", str(out), "--workers-max", "1",
        ],
        HF_HUB_CACHE=str(work / "hub"),
    )  # fmt: skip
    found = json.loads(next(out.rglob("profile_export_aiperf.json")).read_text())
    return {
        "TTFT": found["time_to_first_token"]["avg"],
        "TPOT": found["inter_token_latency"]["avg"],
        "ITL": found["inter_chunk_latency"]["avg"]
        if "inter_chunk_latency" in found
        else float("nan"),
        "request latency": found["request_latency"]["avg"],
        "output tokens/s": found["output_token_throughput"]["avg"],
        "prompt tokens": found["total_isl"]["avg"],
        "output tokens": found["total_osl"]["avg"],
    }


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has had, from Linux's /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def write_prompts(path: Path) -> None:
    """The texts of our workload, one JSON object a line."""
    tokenizer = load_tokenizer(MODELS / DEFAULT_MODEL)
    options = BenchOptions(num_prompts=PROMPTS, output_len=OUTPUT_LEN)
    with path.open("w", encoding="utf-8") as out:
        for item in build_workload(options, tokenizer, CONTEXT).items:
            text = tokenizer.decode(item.prompt_token_ids, skip_special_tokens=True)
            out.write(json.dumps({"text": text}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--guidellm", help="the guidellm program")
    parser.add_argument("--aiperf", help="the aiperf program")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write every round's numbers to this file")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work, prompts = Path(folder), Path(folder) / "prompts.jsonl"
        write_prompts(prompts)
        code = "from llmopt.cli.main import main; main()"
        # Without the prefix cache a client gains nothing from those that ran before it.
        serve = [
            sys.executable,
            "-c",
            code,
            "serve-local",
            "--port",
            "0",
            "--json",
            "--no-enable-prefix-caching",
        ]
        with subprocess.Popen(
            serve, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ | OFFLINE
        ) as server:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["url"]
            clients: dict[str, Callable[[], Row]] = {
                "llmopt": lambda: ours(url, work),
                "llmopt, counts at the end": lambda: ours(url, work, *COUNTS_AT_THE_END),
            }
            if asked.guidellm:
                clients["guidellm"] = lambda: guidellm(asked.guidellm, url, work, prompts)
            if asked.aiperf:
                clients["aiperf"] = lambda: aiperf(asked.aiperf, url, work, prompts)
            clients["llmopt, in process"] = lambda: ours("", work, "--no-enable-prefix-caching")
            rounds: dict[str, list[Row]] = {name: [] for name in clients}
            try:
                for number in range(asked.rounds):
                    rotation = number % len(clients)
                    order = [*clients][rotation:] + [*clients][:rotation]
                    for name in order:
                        print(f"round {number + 1}: {name}", file=sys.stderr)
                        before = cpu_seconds(server.pid)
                        row = clients[name]()
                        spent = cpu_seconds(server.pid) - before
                        rounds[name].append(row | ({"server CPU, s": spent} if spent else {}))
            finally:
                server.terminate()
    if asked.json:
        asked.json.write_text(json.dumps(rounds, indent=1) + "\n")
    rows = list(rounds["llmopt"][0])
    print(f"| | {' | '.join(rounds)} |\n|---|{'---:|' * len(rounds)}")
    for row in rows:
        cells = [
            f"{statistics.median(one[row] for one in found):,.2f}" if row in found[0] else ""
            for found in rounds.values()
        ]
        print(f"| {row} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

"""Record starts of the bundled model, for the error rates of the gate.

    RECORD="python tools/record_gate_runs.py docs/measured/cpu"
    $RECORD/identical-starts.parquet --blocks 30
    $RECORD/paired-passes.parquet --turns --passes 10 --sides 1 1 spin1.1 sleep1.1 --blocks 28

A start is a fresh process that loads the model, warms up and makes a block of passes. A block of starts goes
through the sides and back (ABBA, ABCCBA), one process after the other. With `--turns` a block is one
process of each side, alive together, whose passes go through the sides and back. Blocks are appended to the
file, which is written after each. The table has a row a pass: block, start, place in the block, side and
its work, the wall time of the start (with `--turns` of the block) and its peak memory; and of the pass its
duration, CPU time, waiting time, time in the run queue, steal, involuntary switches and median latencies.
`llmopt.bench.gate.error_rates` reads it.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SIDE = re.compile(r"(spin|sleep)?(\d+(?:\.\d+)?)")
LATENCIES = ("ttft_ms", "tpot_ms", "e2el_ms")
USAGE = (
    "cpu_seconds",
    "waiting_seconds",
    "run_delay_seconds",
    "steal_seconds",
    "involuntary_switches",
)
"""Columns of a pass in the recording."""
Rows = list[dict[str, Any]]


class Start:
    """A start in this process: the loaded session and its passes with their clocks."""

    def __init__(self, side: str, given: argparse.Namespace) -> None:
        from llmopt.base.progress import Silent
        from llmopt.bench.load.inprocess import InjectedDelay, spin
        from llmopt.bench.machine.pass_usage import PassMeter
        from llmopt.bench.options.options import BenchOptions
        from llmopt.bench.session.target_sessions import EngineSession

        options = BenchOptions(
            num_prompts=given.num_prompts,
            output_len=given.output_len,
            num_runs=given.passes,
            num_threads=1,
            quality=False,
        )
        self._session = EngineSession(options, Silent())
        kind, factor = read_side(side)
        if factor != 1.0:
            wait = time.sleep if kind == "sleep" else spin
            self._session.engine.hook = InjectedDelay("step", factor, wait)
        # Each pass begins with a collection, which would scan torch's objects and count as its CPU time.
        gc.collect()
        gc.freeze()
        self._meter = PassMeter()
        self._clocks: list[dict[str, float]] = []

    def run_pass(self) -> None:
        self._meter.start()
        self._session.run_pass()
        usage = asdict(self._meter.stop())
        self._clocks.append({name: usage[name] for name in USAGE})

    def rows(self) -> Rows:
        """A row a pass."""
        from llmopt.bench.record.result import requests_table

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        rows = []
        for number, (load, clock) in enumerate(
            zip(self._session.passes, self._clocks, strict=True)
        ):
            table = requests_table([load])
            medians = {
                f"median_{latency}": statistics.median(v for v in table[latency] if v is not None)
                for latency in LATENCIES
            }
            row = {"peak_resident_bytes": peak, "pass": number, "duration": load.duration}
            rows.append({**row, **clock, **medians})
        return rows


def one_start(side: str, given: argparse.Namespace) -> None:
    """A start in this process, rows as JSON on stdout; with `--turns` a pass for every line on stdin."""
    start = Start(side, given)
    if not given.turns:
        for _ in range(given.passes):
            start.run_pass()
    else:
        print("ready", flush=True)
        for _ in sys.stdin:
            start.run_pass()
            print("done", flush=True)
    print(json.dumps(start.rows()), flush=True)


def read_side(side: str) -> tuple[str, float]:
    """(`spin` or `sleep`, factor) of a side such as `1`, `spin1.1` or `sleep1.1`."""
    match = SIDE.fullmatch(side)
    if match is None:
        raise SystemExit(f"--sides {side}: write 1, spin1.1 or sleep1.1")
    return match[1] or "spin", float(match[2])


def fresh_start(side: str) -> tuple[Rows, float]:
    """(`one_start` in a new process, its wall time in seconds)."""
    begun = time.perf_counter()
    words = [sys.executable, *sys.argv, "--one-start", side]
    done = subprocess.run(words, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout), time.perf_counter() - begun


def starts_in_turns(sides: list[str], passes: int) -> tuple[list[Rows], float]:
    """(the rows of new processes whose passes take turns, their common wall time in seconds)."""
    begun = time.perf_counter()
    processes = [
        subprocess.Popen(
            [sys.executable, *sys.argv, "--one-start", side],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for side in sides
    ]
    for process in processes:
        await_line(process, "ready")
    for number in range(passes):
        for process in processes if number % 2 == 0 else processes[::-1]:
            print("pass", file=process.stdin, flush=True)
            await_line(process, "done")
    rows = [json.loads(process.communicate()[0]) for process in processes]
    return rows, time.perf_counter() - begun


def await_line(process: subprocess.Popen[str], words: str) -> None:
    """Wait until a start says these words.

    Raises:
        SystemExit: it says something else, or ended.
    """
    said = process.stdout.readline().strip() if process.stdout else ""
    if said != words:
        raise SystemExit(f"a start ended early: {said or 'it said nothing'}")


def write_rows(path: Path, rows: Rows) -> None:
    """The rows as a Parquet file with 4-byte floats, replaced at once."""
    table = pa.Table.from_pylist(rows)
    fields = [
        pa.field(f.name, pa.float32() if pa.types.is_floating(f.type) else f.type)
        for f in table.schema
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    pq.write_table(table.cast(pa.schema(fields)), beside, compression="zstd")
    beside.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("output", type=Path)
    parser.add_argument("--blocks", type=int, default=1, help="blocks to add to the file")
    parser.add_argument("--sides", nargs="+", default=["1", "1"])
    parser.add_argument("--turns", action="store_true", help="passes of a block take turns")
    parser.add_argument("--passes", type=int, default=8)
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--output-len", type=int, default=16)
    parser.add_argument("--one-start", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one_start:
        one_start(given.one_start, given)
        return
    for side in given.sides:
        read_side(side)
    rows: Rows = pq.read_table(given.output).to_pylist() if given.output.is_file() else []
    block = max((row["block"] for row in rows), default=-1) + 1
    number = max((row["start"] for row in rows), default=-1) + 1
    order = [*enumerate(given.sides), *reversed([*enumerate(given.sides)])]
    for _ in range(given.blocks):
        results, seconds = iter(()), 0.0
        if given.turns:
            together, seconds = starts_in_turns(given.sides, given.passes)
            order, results = [*enumerate(given.sides)], iter(together)
        for place, (side, words) in enumerate(order):
            start, wall = (next(results), seconds) if given.turns else fresh_start(words)
            keys = {"block": block, "start": number, "place": place, "side": side, "work": words}
            rows += [{**keys, "start_seconds": wall, **row} for row in start]
            number += 1
        write_rows(given.output, rows)
        block += 1
        print(f"{number} starts", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

"""Record identical runs of the bundled model, for the error rates of the gate.

    python tools/record_gate_runs.py docs/measured/cpu/identical-runs.parquet

Every start loads the model anew and makes as many passes as `llmopt bench` does. The table has a row a
request: start, pass, the pass's duration and the background load of the machine,
and the request's latencies. `llmopt.bench.gate.rates` reads it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from llmopt.bench.options.options import BenchOptions
from llmopt.bench.record.requests_table import requests_table
from llmopt.bench.session.session import BenchSession
from llmopt.quant.base.progress import Silent

COLUMNS = ("request_id", "output_len", "ttft_ms", "tpot_ms", "e2el_ms")


def one_start(number: int, options: BenchOptions) -> list[dict[str, Any]]:
    """The rows of one loaded model."""
    session = BenchSession(options, Silent())
    for _ in range(options.num_runs):
        session.run_pass()
    run = session.finish()
    loads = [one["other_load"] for one in run.result["llmopt"]["runs"]]
    durations = [one.duration for one in run.passes]
    table = requests_table(run.passes)
    return [
        {
            "start": number,
            "pass": table["run"][row],
            "duration_s": durations[table["run"][row]],
            "other_load": loads[table["run"][row]],
            **{column: table[column][row] for column in COLUMNS},
        }
        for row in range(len(table["run"]))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("output", type=Path)
    parser.add_argument("--starts", type=int, default=24)
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--output-len", type=int, default=16)
    given = parser.parse_args()
    options = BenchOptions(
        num_prompts=given.num_prompts,
        output_len=given.output_len,
        num_threads=1,
        quality=False,
    )
    rows: list[dict[str, Any]] = []
    for number in range(given.starts):
        rows += one_start(number, options)
        print(f"start {number + 1} of {given.starts}", flush=True)
    table = pa.Table.from_pylist(rows)
    single = {"duration_s", "other_load", "ttft_ms", "tpot_ms", "e2el_ms"}
    fields = [pa.field(f.name, pa.float32() if f.name in single else f.type) for f in table.schema]
    given.output.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.cast(pa.schema(fields)), given.output, compression="zstd")


if __name__ == "__main__":
    main()

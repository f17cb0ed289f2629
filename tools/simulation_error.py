"""Error of the simulated server against `llmopt bench` on this machine, in TTFT and TPOT.

    python tools/simulation_error.py stories3M
    python tools/simulation_error.py "$(python tools/real_model.py build/real)" --runs 2

The step model is a table of this machine: `bench` is run at each `--concurrency`, and the time of a step is
fitted to those of every other pass (piecewise linear in its tokens, linear in the tokens attended to). The
requests of the passes between them are simulated. `drift` is how much longer the steps of those passes took
than the table says, because of a neighbour on the core or the clock; `error` is with it, so that it is the
simulation's own, and `error_with_drift` without. Exits with 1 where an `error` is past `--most`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from llmopt.engine.planner.cache_size import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
)
from llmopt.engine.planner.simulation import SimulatedServer, Simulation
from llmopt.engine.planner.step_model import StepWork
from llmopt.engine.scheduling.scheduler_config import SchedulerConfig

KNOTS = np.array([0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048])
BLOCK = DEFAULT_BLOCK_SIZE["cpu"]


class StepTable:
    """Seconds of a step: piecewise linear in its tokens and linear in those attended to, fitted to steps.

    No coefficient is negative. Times that a neighbour on the core stretched count as they came: a mean is
    wanted.
    """

    def __init__(self, steps: pd.DataFrame) -> None:
        columns = self._columns(steps)
        self._coefficients = positive_fit(columns, steps["seconds"].to_numpy(float))

    def drift(self, steps: pd.DataFrame) -> float:
        """Seconds of steps over those that the table has for them."""
        return float(steps["seconds"].sum() / (self._columns(steps) @ self._coefficients).sum())

    def seconds(self, work: StepWork) -> float:
        attended = work.decode_context_tokens + work.prefill_context_tokens
        tokens = work.decode_sequences + work.prefill_tokens
        return float(self._row(tokens, attended) @ self._coefficients)

    def _columns(self, steps: pd.DataFrame) -> np.ndarray:
        prefill, decode = (
            steps[f"{kind}_tokens"].to_numpy(float) for kind in ("prefill", "decode")
        )
        held = (steps["kv_blocks_used"] * BLOCK - steps["kv_slots_unfilled"]).to_numpy(float)
        share = decode / steps["num_rows"].to_numpy(float)
        attended = held * share + (1 - share) * prefill**2 / 2
        pairs = zip(prefill + decode, attended, strict=True)
        return np.stack([self._row(tokens, read) for tokens, read in pairs])

    @staticmethod
    def _row(tokens: float, attended: float) -> np.ndarray:
        # Slopes between the knots, so that a time grows with the tokens.
        passed = np.clip(tokens - KNOTS[:-1], 0, np.diff(KNOTS))
        return np.array([1.0, *passed, attended])


def positive_fit(columns: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Least squares without the columns whose coefficients would be negative."""
    used = columns.any(axis=0)
    while True:
        found = np.zeros(columns.shape[1])
        found[used] = np.linalg.lstsq(columns[:, used], values, rcond=None)[0]
        if (found >= 0).all():
            return found
        used &= found >= 0


def bench(
    model: str, concurrency: int, options: argparse.Namespace
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Requests and steps of a run of `llmopt bench`."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [
            sys.executable,
            "-m",
            "llmopt.cli.main",
            "bench",
            model,
            "--json",
            "--no-quality",
        ]
        command += ["--max-concurrency", str(concurrency), "--num-runs", str(options.runs)]
        command += ["--num-prompts", str(options.prompts), "--output", str(run)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        requests = pd.read_parquet(run / "requests.parquet")
        steps = pd.read_parquet(run / "steps.parquet")
    ends = steps.start + steps.step_seconds
    before = ends.groupby(steps["run"]).shift()
    # From one step's outputs to the next one's: a closed loop always has work, and the client's share counts.
    steps["seconds"] = ends - before.fillna(steps["start"])
    steps["overlaps"] = steps["start"] < before
    return requests, steps


def simulated(requests: pd.DataFrame, table: StepTable, concurrency: int, overlapped: bool) -> dict:
    """Mean virtual TTFT and TPOT of a pass of these requests, in milliseconds."""
    lengths = [
        (int(p), int(o)) for p, o in zip(requests.prompt_len, requests.output_len, strict=True)
    ]
    sequences, longest = DEFAULT_MAX_NUM_SEQS["cpu"], max(map(sum, lengths))
    tokens = max(DEFAULT_MAX_NUM_BATCHED_TOKENS["cpu"], sequences)
    limits = SchedulerConfig(tokens, sequences, BLOCK, longest)
    blocks = 2 + (concurrency + 1) * limits.num_blocks(longest)
    server = SimulatedServer(limits, blocks, overlapped=overlapped)
    run = Simulation(server, table, lengths, [0.0] * min(concurrency, len(lengths)))
    run.run()
    timings = [one.timing for one in run.ended]
    return {
        "ttft": 1e3 * float(np.mean([one.ttft for one in timings])),
        "tpot": 1e3 * float(np.mean([one.tpot for one in timings if one.output_tokens > 1])),
    }


def rows_of(options: argparse.Namespace) -> list[dict]:
    """One row per concurrency: measured, simulated, and the difference as a share of the measured."""
    runs = {count: bench(options.model, count, options) for count in options.concurrency}
    table = StepTable(pd.concat([steps.query("run % 2 == 0") for _, steps in runs.values()]))
    rows = []
    for concurrency, (requests, steps) in runs.items():
        unseen, own = requests.query("run % 2 == 1"), steps.query("run % 2 == 1")
        overlapped = bool(steps["overlaps"].mean() > 0.5)
        virtual = simulated(unseen.query("run == 1"), table, concurrency, overlapped)
        row: dict = {"concurrency": concurrency, "requests": len(unseen)}
        row["drift"] = round(drift := table.drift(own), 4)
        for name in ("ttft", "tpot"):
            measured = float(unseen[f"{name}_ms"].to_numpy(float).mean())
            row[name] = {
                "measured_ms": round(measured, 3),
                "simulated_ms": round(virtual[name], 3),
                "error": round(drift * virtual[name] / measured - 1, 4),
                "error_with_drift": round(virtual[name] / measured - 1, 4),
            }
        rows.append(row)
    return rows


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=rows_of.__doc__)
    parser.add_argument("model", nargs="?", default="stories3M")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--runs", type=int, default=6, help="passes of each bench run")
    parser.add_argument("--most", type=float, default=0.15, help="largest error that exits with 0")
    options = parser.parse_args(words)
    rows = rows_of(options)
    print(json.dumps({"model": Path(options.model).name, "rows": rows}, indent=1))
    worst = max(abs(row[name]["error"]) for row in rows for name in ("ttft", "tpot"))
    print(f"largest error {worst:.1%}, limit {options.most:.0%}", file=sys.stderr)
    return 0 if worst <= options.most else 1


if __name__ == "__main__":
    sys.exit(main())

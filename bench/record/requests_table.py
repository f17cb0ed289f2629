"""Per-request table of a run: `requests.parquet` and `requests.csv`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..metrics.trace import LoadPass

REQUESTS_NAME = "requests.parquet"
REQUESTS_CSV_NAME = "requests.csv"


def requests_table(passes: Sequence[LoadPass]) -> dict[str, list[Any]]:
    """One row a request: every time (seconds from the start of its pass) and every length."""
    rows: list[dict[str, Any]] = []
    for number, load_pass in enumerate(passes):
        for t in load_pass.traces:
            seen = bool(t.chunk_times)
            tpot = t.tpot if seen else None
            rows.append(
                {
                    "run": number,
                    "request_id": t.request_id,
                    "conversation": t.conversation,
                    "turn": t.turn + 1,
                    "cycle": t.cycle,
                    "drained": load_pass.is_drained(t),
                    "prompt_len": t.prompt_len,
                    "wanted_len": t.wanted_len,
                    "output_len": t.output_len,
                    "success": t.success,
                    "error": t.error,
                    "scheduled_s": t.scheduled,
                    "sent_s": t.sent,
                    "first_chunk_s": t.chunk_times[0] if seen else None,
                    "last_chunk_s": t.chunk_times[-1] if seen else None,
                    "ttft_ms": t.ttft * 1000 if t.output_len else None,
                    "tpot_ms": tpot * 1000 if tpot is not None else None,
                    "e2el_ms": t.e2el * 1000 if seen else None,
                    "client_queue_ms": t.queued * 1000,
                    "cached_tokens": t.cached_tokens,
                    "lora": t.lora,
                    "chunk_times_s": list(t.chunk_times),
                    "chunk_tokens": list(t.chunk_tokens),
                    "text": t.text,
                }
            )
    return {key: [row[key] for row in rows] for key in rows[0]} if rows else {}


def write_requests(path: Path, passes: Sequence[LoadPass]) -> None:
    """`requests.parquet`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(requests_table(passes)), path)


def write_requests_csv(path: Path, passes: Sequence[LoadPass]) -> None:
    """`requests.csv`: the columns of the Parquet table; lists are JSON, a missing value is empty."""
    import csv

    table = requests_table(passes)
    with path.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.writer(handle)
        writer.writerow(table)
        for row in zip(*table.values(), strict=True):
            writer.writerow([json.dumps(cell) if isinstance(cell, list) else cell for cell in row])

"""Results of benchmark runs with chosen speeds, as `llmopt bench` writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

IDENTITY: dict[str, Any] = {
    "model": "stories3M",
    "model_hash": "sha256:1",
    "quantization": None,
    "dtype": "float32",
    "target": "in-process",
    "workload": "sharegpt",
    "workload_sha256": "a" * 64,
    "load": {"max_concurrency": 8},
    "engine": {"block_size": 16},
    "device": "cpu",
    "machine": "A CPU, 2 CPUs",
    "hardware": {"fingerprint": "0123456789abcdef", "cpu_model": "A CPU", "microcode": "0x1"},
}


def result_of(
    number: int,
    tpot: float,
    *,
    identity: Mapping[str, Any] = IDENTITY,
    other_load: float | None = 0.0,
    failed: int = 0,
    commit: str | None = None,
) -> dict[str, Any]:
    """The result of run `number`, of three passes with this TPOT in ms."""
    one_pass = {
        "output_throughput": 1000 / tpot,
        "median_ttft_ms": 7 * tpot,
        "median_tpot_ms": tpot,
        "median_e2el_ms": 40 * tpot,
        "other_load": other_load,
    }
    record = {
        "schema": 1,
        "run_id": f"{number:032x}"[::-1],
        "name": f"run {number}",
        "arms": None,
        "metrics": {},
        "interrupted": False,
        "identity": dict(identity),
        "runs": [one_pass] * 3,
        "quality": {"perplexity": 4.0, "kl_nats": None, "top1_agreement": None},
        "memory": {"weight_bytes": 1000, "peak_resident_bytes": None},
        "preemptions": 0,
        "environment": {"commit": commit or f"c{number:03}"},
    }
    date = f"202601{number // 24 + 1:02}-{number % 24:02}0000"
    counts = {"failed": failed, "completed": 100 - failed, "total_output_tokens": 1000}
    return {"date": date, **counts, "llmopt": record}


def write_results(folder: Path, results: Sequence[Mapping[str, Any]]) -> list[Path]:
    """A run folder for each result."""
    paths = []
    for number, result in enumerate(results):
        path = folder / f"run-{number:04}"
        path.mkdir(parents=True)
        (path / "result.json").write_text(json.dumps(result))
        paths.append(path)
    return paths

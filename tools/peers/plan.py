"""Rows and cases of tools/cpu_peers.py: engines on checkpoints, and workloads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Case:
    """One workload; with one new token the prefill is timed, else decoding.

    A long context is computed in the first round and kept for those that follow.
    """

    batch: int
    context: int
    new: int
    is_kept: bool = False


CASES = {
    "alone": Case(1, 32, 24),
    "batch 8": Case(8, 32, 16),
    "batch 16": Case(16, 32, 16),
    "prefill 512": Case(1, 512, 1),
    "alone at 2048": Case(1, 2000, 24, is_kept=True),
    "alone at 8192": Case(1, 8000, 24, is_kept=True),
    "alone at 32768": Case(1, 32000, 24, is_kept=True),
    "batch 8 at 2048": Case(8, 2000, 24, is_kept=True),
}
LONG = tuple(name for name, case in CASES.items() if case.is_kept)


@dataclass(frozen=True, slots=True)
class Row:
    """An engine with some options on a checkpoint: without a label, with its defaults.

    Attributes:
        package: whose engine.
        checkpoint: its name in the table.
        path: the folder, or the GGUF file.
        cases: those that it takes part in; empty for all.
        most: sequences at most.
    """

    package: str
    checkpoint: str
    path: Path
    label: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    cases: tuple[str, ...] = ()
    most: int = 16

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.package, self.checkpoint, self.label)))

    def takes(self, case: str) -> bool:
        return (not self.cases or case in self.cases) and CASES[case].batch <= self.most


BESIDE = "beside"  # the row of another checkout
EIGHT_BIT_KV = {"kv_cache_dtype": "int8"}


def rows_of(checkpoint: str, path: Path) -> list[Row]:
    """Every engine that reads a checkpoint; "fastest" is ours with an option that costs quality."""
    if path.suffix == ".gguf":
        return [
            Row("llmopt", checkpoint, path),
            Row("llmopt", checkpoint, path, "fastest", EIGHT_BIT_KV, LONG),
            Row("llamacpp", checkpoint, path),
            Row("llamacpp", checkpoint, path, "8-bit KV", EIGHT_BIT_KV, LONG),
            Row("openvino", checkpoint, path, most=1),
        ]
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    stored = config.get("quantization_config")
    rows = [Row("llmopt", checkpoint, path), Row("vllm", checkpoint, path)]
    if stored is None:
        rows.append(Row("transformers", checkpoint, path))
    elif not any(one.get("input_activations") for one in stored.get("config_groups", {}).values()):
        rows.insert(1, Row("llmopt", checkpoint, path, "fastest", {"cpu_activations": 8}))
    return rows


def ratios_of(rows: Sequence[Row], cases: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """(ours, a peer, case), with the same checkpoint and, where both have one, label for label."""
    for ours in rows:
        for theirs in rows:
            is_peer = theirs.package != "llmopt" or theirs.label == BESIDE
            if ours.package != "llmopt" or ours.label == BESIDE or not is_peer:
                continue
            is_same = ours.checkpoint == theirs.checkpoint
            if is_same and (theirs.label == "8-bit KV") == (ours.options == EIGHT_BIT_KV):
                both = (case for case in cases if ours.takes(case) and theirs.takes(case))
                yield from ((ours.name, theirs.name, case) for case in both)

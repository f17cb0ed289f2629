"""What the line `ready:` of `serve-local` says of 8-bit activations."""

from __future__ import annotations

import json
from pathlib import Path

from llmopt.cli.serve_local import GGUF_KL

RECORD = Path(__file__).parents[2] / "docs/measured/cpu/cpu-activations.json"


def test_the_cost_of_8_bit_activations_is_the_recorded_one() -> None:
    rows = {row["cpu_activations"]: row for row in json.loads(RECORD.read_text())["rows"]}
    assert round(rows[8]["kl_nats"], 4) == GGUF_KL

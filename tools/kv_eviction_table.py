"""The table of KV eviction in docs/engine.md, from the file that `tools/kv_eviction.py` writes:
`python tools/kv_eviction_table.py [--check]`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from document_part import put_part
from llmopt.bench.page.page import markdown_table

MEASURED = Path(__file__).resolve().parents[1] / "docs" / "measured" / "cpu" / "kv-eviction.json"
NAMES = {
    "full": "full cache",
    "sinks": "4 sinks + window",
    "snapkv": "`snapkv`",
    "h2o": "`h2o`",
}
HEADER = ("", "budget", "tokens", "pass keys", "KL, nats", "KV cache, MiB", "while prefilled, MiB")


def made() -> str:
    """One line about the run, and a row for each policy and budget."""
    run = json.loads(MEASURED.read_text(encoding="utf-8"))
    about = (
        f"{run['model']}, prompts of {run['prompt_tokens']:,} tokens, blocks of {run['block_size']}; "
        f"{run['outcomes'][0]['asked']} pass keys at depths of {min(run['depths']):.0%} to "
        f"{max(run['depths']):.0%}; KL over {run['forced_tokens']} tokens:"
    )
    rows = [row(each) for each in run["outcomes"]]
    return "\n".join([about, "", *markdown_table(HEADER, rows)])


def row(outcome: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        NAMES[outcome["policy"]],
        f"{outcome['share']:.0%}",
        f"{outcome['budget']:,}",
        f"{outcome['hits']} of {outcome['asked']}",
        f"{outcome['kl']:.4f}",
        f"{outcome['kv_bytes'] / 2**20:.1f}",
        f"{outcome['peak_kv_bytes'] / 2**20:.1f}",
    )


if __name__ == "__main__":
    put_part("docs/engine.md", "kv_eviction_table.py", __doc__, made)

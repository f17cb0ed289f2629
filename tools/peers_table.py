"""The tables of docs/peers.md, from records of `tools/cpu_peers.py`: `python tools/peers_table.py [--check]`.

With `--check` nothing is written, and tables that are not those of the records end with exit code 1.
"""

from __future__ import annotations

import json
from pathlib import Path

from cpu_peers import show
from document_part import put_part

RECORDS = Path(__file__).resolve().parents[1] / "docs" / "measured" / "cpu"
NAMES = ("cpu-peers-1.1B", "cpu-peers-1.1B-16-bit", "cpu-peers-0.13B")


def made() -> str:
    """The tables of each record under its name."""
    parts = []
    for name in NAMES:
        record = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))
        parts.append(f"### {name}.json\n\n{show(record)}")
    return "\n\n".join(parts)


if __name__ == "__main__":
    put_part("docs/peers.md", "peers_table.py", __doc__, made)

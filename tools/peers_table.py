"""Write the tables of docs/peers.md from its records: `python tools/peers_table.py [--check]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tools.document_part import put_part
from tools.peers_record import show

RECORDS = Path(__file__).resolve().parents[1] / "docs" / "measured" / "cpu"


def made() -> str:
    """The tables of each record under its name."""
    parts = []
    for path in sorted(RECORDS.glob("cpu-peers-*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        parts.append(f"### {path.name}\n\n{show(record)}")
    return "\n\n".join(parts)


if __name__ == "__main__":
    put_part("docs/peers.md", "peers_table.py", __doc__, made)

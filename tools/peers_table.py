"""The tables of docs/peers.md, from records of `tools/cpu_peers.py`: `python tools/peers_table.py [--check]`.

The last is the profile of our steps that `tools/cpu_step_profile.py --json` wrote beside them, where there is
one. With `--check` nothing is written, and tables that are not those of the records end with exit code 1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from document_part import put_part

sys.path.insert(0, str(Path(__file__).parents[1]))
from tools.peers_record import show

RECORDS = Path(__file__).resolve().parents[1] / "docs" / "measured" / "cpu"
PROFILE = "cpu-step-profile.json"


def made() -> str:
    """The tables of each record under its name."""
    parts = []
    for path in sorted(RECORDS.glob("cpu-peers-*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        parts.append(f"### {path.name}\n\n{show(record)}")
    if (RECORDS / PROFILE).exists():
        profile = json.loads((RECORDS / PROFILE).read_text(encoding="utf-8"))
        parts.append(f"### {PROFILE}\n\n{profile_table(profile)}")
    return "\n\n".join(parts)


def profile_table(profile: Mapping[str, Any]) -> str:
    """What each part of a step takes, in milliseconds; parts that no row has are left out."""
    rows = profile["rows"]
    parts = [part for part in rows[0]["parts_ms"] if any(row["parts_ms"][part] for row in rows)]
    lines = [
        f"{profile['processor']}, {profile['threads']} threads, {profile['path']}; milliseconds, medians",
        "",
        "| | step | " + " | ".join(parts) + " | of the roof |",
        "|---|---|" + "---|" * (len(parts) + 1),
    ]
    for row in rows:
        spent = " | ".join(f"{row['parts_ms'][part]:,.2f}" for part in parts)
        name = f"{row['checkpoint']}, {row['case']}"
        lines.append(f"| {name} | {row['step_ms']:,.2f} | {spent} | {row['of_roof']:.0%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    put_part("docs/peers.md", "peers_table.py", __doc__, made)

"""The figures of GPUs in docs/gpu.md, from the files of `make gpu-bench` under docs/measured:
`python tools/gpu_table.py [--check]`.

A run counts once it is committed as docs/measured/<GPU>/gpu-bench.json. Figures
without a run are left out.
"""

from __future__ import annotations

import json
from pathlib import Path

from document_part import put_part
from gpu.figure import markdown

MEASURED = Path(__file__).resolve().parents[1] / "docs" / "measured"


def made() -> str:
    """A table for each GPU, or a sentence."""
    runs = [json.loads(path.read_text()) for path in sorted(MEASURED.glob("*/gpu-bench.json"))]
    if not runs:
        return "Nothing has been measured on a GPU yet."
    return "\n\n".join(markdown(run) for run in runs)


if __name__ == "__main__":
    put_part("docs/gpu.md", "gpu_table.py", __doc__, made)

"""Refuse files above 1 MB, measured records above 300 kB: `python tools/large_files.py [FILE ...]`, or all
tracked ones.

A clone carries every version of a large file for ever. What a tool measures with is written below build/,
which git ignores; what the product needs in its package is named here, with its reason.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_BYTES = 1_000_000
MEASURED, MAX_MEASURED_BYTES = "docs/measured/", 300_000
ALLOWED = {
    "recipes/models/stories3M/model.safetensors": "the bundled model of the product's first lines",
    "recipes/data/calibration_mixed.jsonl.xz": "the bundled calibration text",
}


def tracked() -> Iterator[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    yield from (ROOT / name for name in filter(None, listing.stdout.split("\0")))


def too_large(paths: Iterable[Path]) -> Iterator[str]:
    """One line for every file beyond the limit that is not allowed."""
    for path in paths:
        name = (path.parent.resolve() / path.name).relative_to(ROOT).as_posix()
        if name in ALLOWED or not path.is_file():
            continue
        num_bytes = path.stat().st_size
        if name.startswith(MEASURED) and num_bytes > MAX_MEASURED_BYTES:
            yield (
                f"{name}: {num_bytes / 1e3:.0f} kB, the limit of a record is {MAX_MEASURED_BYTES / 1e3:.0f} "
                "kB: keep what documents take from it"
            )
        elif num_bytes > MAX_BYTES:
            yield (
                f"{name}: {num_bytes / 1e6:.1f} MB, the limit is {MAX_BYTES / 1e6:.0f} MB: write it "
                f"below build/, or name it in tools/{Path(__file__).name}"
            )


def main() -> int:
    faults = list(too_large(map(Path, sys.argv[1:]) if sys.argv[1:] else tracked()))
    print(*faults, sep="\n", end="\n" if faults else "")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

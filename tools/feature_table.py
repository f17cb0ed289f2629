"""Write the table of docs/measured/feature-pairs.md: `python tools/feature_table.py [--check]`.

It is made from `engine/config/compatibility.py`, which also refuses at start the pairs that the table
marks "no".
"""

from __future__ import annotations

from itertools import count

from document_part import put_part
from llmopt.engine.config.compatibility import ALTERNATIVES, FEATURES, REFUSALS, refusal_line


def table() -> str:
    """The Markdown between the markers: half a square, and the reasons below it."""
    keys = list(FEATURES)
    notes = dict(zip(REFUSALS, map(str, count(1)), strict=False))

    def cell(row: str, column: str) -> str:
        pair = frozenset({row, column})
        if pair in REFUSALS:
            return f"no<sup>{notes[pair]}</sup>"
        return "–" if pair in ALTERNATIVES else "✓"

    header = ["", "turned on by", *(letters(place) for place in range(len(keys) - 1))]
    lines = [line(header), line(["---", "---", *[":-:"] * (len(keys) - 1)])]
    for place, key in enumerate(keys):
        cells = [cell(key, other) for other in keys[:place]]
        padded = [*cells, *[""] * (len(keys) - 1 - place)]
        name = f"**{letters(place)}** {FEATURES[key].name}"
        lines.append(line([name, FEATURES[key].source, *padded[: len(keys) - 1]]))
    lines += ["", "✓ works together, – alternatives of one option, no: refused at start-up."]
    for pair, reason in REFUSALS.items():
        lines += ["", f"<sup>{notes[pair]}</sup> {refusal_line(pair)}: {reason}."]
    return "\n".join(lines)


def letters(place: int) -> str:
    """a to z, then aa, ab, ..."""
    before, last = divmod(place, 26)
    return (chr(ord("a") + before - 1) if before else "") + chr(ord("a") + last)


def line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    put_part("docs/measured/feature-pairs.md", "feature_table.py", __doc__, table)

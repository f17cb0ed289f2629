"""The table of engines, cards and codes in docs/measured/loaders.md, from the rules of `llmopt check`.

python tools/loader_table.py          # writes the page; --check ends with 1 where it would change
"""

from __future__ import annotations

import sys
from pathlib import Path

from llmopt.engine.planner.devices import find_device
from llmopt.quant.check.kernels import Codes, Question, engine_rules, kernel_for, kernel_rows

PAGE = Path(__file__).resolve().parent.parent / "docs" / "measured" / "loaders.md"
CARDS = ("T4", "A100 80GB SXM", "L40S", "H100 SXM", "B200", "RTX 5090")
CASES = {
    "int4 g128": ("compressed-tensors", Codes("int4", "", 128)),
    "int4 g128, `gptq`": ("gptq", Codes("int4", "", 128)),
    "int4 g128 with zero points, `awq`": ("awq", Codes("int4", "", 128, symmetric=False)),
    "int8, inputs int8": ("compressed-tensors", Codes("int8", "", inputs="int8")),
    "fp8 by channel, inputs by token": ("compressed-tensors", Codes("fp8", "", inputs="fp8")),
    "fp8 in blocks, `fp8`": ("fp8", Codes("fp8-block", "", 128, inputs="fp8")),
    "fp8 static, `modelopt`": ("modelopt", Codes("fp8", "", inputs="fp8", static=True)),
    "NVFP4 W4A4": ("compressed-tensors", Codes("nvfp4", "", 16, inputs="nvfp4")),
    "NVFP4 W4A4, `modelopt`": ("modelopt", Codes("nvfp4", "", 16, inputs="nvfp4")),
    "NVFP4 W4A16": ("compressed-tensors", Codes("nvfp4", "", 16)),
    "MXFP4 of gpt-oss, `mxfp4`": ("mxfp4", Codes("mxfp4", "", 32)),
    "nf4, `bitsandbytes`": ("bitsandbytes", Codes("nf4", "", 64)),
}
HEAD = """# Loaders

<!-- made by tools/loader_table.py -->

Kernels by engine, version and card, for linears of usual shapes, by the rules of
[check](../commands/check.md).
In italics: the engine's fast kernel needs another card. A dash: no kernel. Nothing here was run on a
card: the source of each rule is named below the table of its engine.
"""


def table(engine: str, version: str) -> list[str]:
    """Rows of an engine's version: codes, and the kernel on each card."""
    lines = [f"| codes | {' | '.join(CARDS)} |", "|---" * (len(CARDS) + 1) + "|"]
    rules = engine_rules()[engine]
    for name, (method, codes) in CASES.items():
        cells = []
        for card in CARDS:
            capability = find_device(card).capability
            answer = kernel_for(Question(engine, version, method, codes, capability))
            served = answer.answer == "loads" and rules.has(method, version)
            kernel = f"*{answer.kernel}*" if answer.falls_back else answer.kernel
            cells.append(kernel if served else "–")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def page() -> str:
    """The page, versions with equal tables together."""
    parts = [HEAD]
    for engine, rules in engine_rules().items():
        versions: dict[tuple[str, ...], list[str]] = {}
        for version in rules.versions:
            versions.setdefault(tuple(table(engine, version)), []).append(version)
        for lines, same in versions.items():
            parts.append("\n".join([f"## {rules.name} {', '.join(same)}", "", *lines]) + "\n")
        sources = dict.fromkeys(row["source"] for row in kernel_rows() if row["engine"] == engine)
        parts.append("Sources: " + "; ".join(sources) + f". Names: {rules.source}.\n")
    return "\n".join(parts)


def main() -> int:
    text = page()
    if "--check" in sys.argv:
        return int(not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Mock checkpoints next to real ones in the loaders: each has to load the one where it loads the other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmopt.base.errors import BadInput
from llmopt.quant.kinds.registry import format_names
from llmopt.quant.methods.registry import METHODS
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.plan import make_plan
from llmopt.quant.plan.request import QuantizeRequest

from tools.check_truth.load import LOADERS, load_all

SHORT: Mapping[str, Any] = {"num_samples": 2, "seq_len": 64}
"""Calibration that is enough for a layout."""


def write_pairs(model: Path, folder: Path) -> list[str]:
    """The real and the mock checkpoint of every method and format that fit; their names."""
    names = []
    for method in [*METHODS, "Q4_K_M", "Q8_0"]:
        for weight_format in ["gguf"] if method.startswith("Q") else format_names():
            given = {"method": method, "format": weight_format, **SHORT}
            name = f"{method}-{weight_format}".replace(",", "+")
            try:
                make_plan(QuantizeRequest(model, folder / "none", **given))
            except BadInput:
                continue
            for kind in ("real", "mock"):
                output = folder / f"{name}-{kind}"
                if not output.exists():
                    quantize(QuantizeRequest(model, output, mock=kind == "mock", **given))
            names.append(name)
    return names


def compare_pairs(environments: Path, folder: Path, names: list[str]) -> int:
    """Print for each loader which pairs load; return how many mocks differ from the real checkpoint."""
    differ = 0
    for loader in (name for name in LOADERS if name != "llmopt"):  # which refuses mocks
        folders = [folder / f"{name}-{kind}" for name in names for kind in ("real", "mock")]
        answers = load_all(loader, environments, folders)
        tried = [name for name in names if f"{name}-real" in answers]
        loads = {key: "error" not in answer for key, answer in answers.items()}
        other = [name for name in tried if loads[f"{name}-real"] != loads[f"{name}-mock"]]
        count = sum(loads[f"{name}-real"] for name in tried)
        print(
            f"{loader}: {len(tried)} pairs, {count} real ones load, {len(other)} mocks differ",
            *other,
        )
        for name in other:
            print(
                f"  {name}: {answers[f'{name}-real'].get('error')} | {answers[f'{name}-mock'].get('error')}"
            )
        differ += len(other)
    return differ

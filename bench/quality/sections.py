"""Quality for reports: its scores in their order, the passages that lost most, errors of the layers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...quant.model.checkpoint import read_json
from ...quant.plan.manifest import MANIFEST_NAME
from ..page.page import MarkedText

# KL divergence in nats from which a token gets each shade.
SHADES = (0.05, 0.25, 1.0, 3.0)
SCORES = (
    ("Perplexity", "perplexity", 4),
    ("Perplexity of the reference", "reference_perplexity", 4),
    ("Perplexity ratio to the reference", "perplexity_ratio", 5),
    ("KL from the reference, mean (nats)", "kl_nats", 5),
    ("KL, median", "median_kl_nats", 5),
    ("KL, p90", "p90_kl_nats", 5),
    ("KL, p95", "p95_kl_nats", 5),
    ("KL, p99", "p99_kl_nats", 5),
    ("KL, p99.9", "p999_kl_nats", 5),
    ("KL, largest", "max_kl_nats", 5),
)
SHARES = (
    ("Top-1 agreement", "top1_agreement"),
    ("Tokens whose rank moved", "rank_moved"),
)
LAYER = re.compile(r"\.layers?\.(\d+)\.|\.h\.(\d+)\.")


def marked(passage: Mapping[str, Any]) -> MarkedText:
    """A hurt passage as text, its tokens shaded by their KL divergence."""
    tokens: Sequence[str] = passage["tokens"]
    caption = (
        f"Window {passage['window']}, from token {passage['position']}: mean KL "
        f"{passage['mean_kl_nats']:.3f} nats"
    )
    pieces = [
        (token, sum(value >= limit for limit in SHADES), f"{value:.3f} nats")
        for token, value in zip(tokens, passage["kl_nats"], strict=True)
    ]
    return MarkedText(pieces, caption)


def layer_errors(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Per decoder layer: mean relative output error of its linears, and the name of the worst one.

    Modules without a measured error, such as those of a conversion, are skipped.
    """
    by_layer: dict[int, list[tuple[float, str]]] = {}
    for record in manifest["modules"]:
        match = LAYER.search(f".{record['module']}.")
        if match is not None and record.get("error") is not None:
            within = record["module"].rpartition(f".{match.group(1) or match.group(2)}.")[2]
            layer = int(match.group(1) or match.group(2))
            by_layer.setdefault(layer, []).append((record["error"], within))
    return [
        {
            "layer": layer,
            "error": sum(error for error, _ in errors) / len(errors),
            "worst": max(errors)[1],
        }
        for layer, errors in sorted(by_layer.items())
    ]


def recorded_layer_errors(folder: Path) -> list[dict[str, Any]]:
    """Layer errors of a checkpoint written by `llmopt quantize`; empty for any other."""
    path = folder / MANIFEST_NAME
    return layer_errors(read_json(path)) if path.is_file() else []


def layer_rows(
    results: Mapping[str, Mapping[str, Any]],
) -> list[tuple[int, list[Mapping[str, Any] | None]]]:
    """(layer, its errors in each run whose checkpoint has some), by layer."""
    found = [result["llmopt"].get("layer_errors") for result in results.values()]
    columns = [{one["layer"]: one for one in errors} for errors in found if errors]
    layers = sorted({layer for column in columns for layer in column})
    return [(layer, [column.get(layer) for column in columns]) for layer in layers]

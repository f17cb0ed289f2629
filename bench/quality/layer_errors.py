"""Quantization error per decoder layer, from the manifests of the checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...quant.manifest.manifest import MANIFEST_NAME
from ...quant.model.checkpoint import read_json
from ..page.page import Section, Table

LAYER = re.compile(r"\.layers?\.(\d+)\.|\.h\.(\d+)\.")


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


def layer_sections(results: Mapping[str, Mapping[str, Any]]) -> list[Section]:
    """A table with a row per layer and a column per run; nothing where no checkpoint has errors."""
    columns = {
        name: {one["layer"]: one for one in found}
        for name, result in results.items()
        if (found := result["llmopt"].get("layer_errors"))
    }
    layers = sorted({layer for column in columns.values() for layer in column})
    rows = []
    for layer in layers:
        ones = [column.get(layer) for column in columns.values()]
        cells = [
            "" if one is None else f"{one['error']:.5f} ({one['worst'].rpartition('.')[2]})"
            for one in ones
        ]
        rows.append([str(layer), *cells])
    caption = (
        "Mean relative output error of the quantized linears of each layer, and the worst of them."
    )
    table = Table(["layer", *columns], rows, caption=caption)
    return [Section("Layer errors", (), (), (table,))] if rows else []

"""What quantizing cost in each decoder layer, from the manifests of the checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .page import Table

LAYER = re.compile(r"\.layers?\.(\d+)\.|\.h\.(\d+)\.")


def layer_errors(manifest: Mapping[str, Any]) -> dict[int, tuple[float, str]]:
    """{layer: (mean error of its linears, the worst of them by its name within the layer)}."""
    found: dict[int, list[tuple[float, str]]] = {}
    for record in manifest["modules"]:
        match = LAYER.search(f".{record['module']}.")
        if match is not None:
            within = record["module"].rpartition(f".{match.group(1) or match.group(2)}.")[2]
            layer = int(match.group(1) or match.group(2))
            found.setdefault(layer, []).append((record["error"], within))
    return {
        layer: (sum(error for error, _ in ones) / len(ones), max(ones)[1])
        for layer, ones in sorted(found.items())
    }


def layer_table(manifests: Mapping[str, Mapping[str, Any]]) -> Table:
    """A row a layer, a column a checkpoint."""
    errors = {name: layer_errors(manifest) for name, manifest in manifests.items()}
    layers = sorted({layer for one in errors.values() for layer in one})
    rows = []
    for layer in layers:
        cells = []
        for one in errors.values():
            error, worst = one.get(layer, (None, ""))
            cells.append("" if error is None else f"{error:.5f} ({worst.rpartition('.')[2]})")
        rows.append([str(layer), *cells])
    return Table(
        ["layer", *errors],
        rows,
        caption="Mean relative output error of the quantized linears of each layer, and the worst of them.",
    )

"""Report sections: quality with intervals, the passages that lost most, layer errors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...quant.manifest.manifest import MANIFEST_NAME
from ...quant.model.checkpoint import read_json
from ..page.page import MarkedText, Section, Table, bounds, number, percent

# KL divergence in nats from which a token gets each shade.
SHADES = (0.05, 0.25, 1.0, 3.0)
ROWS = (
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


def quality_sections(quality: Mapping[str, Any] | None) -> list[Section]:
    """The section of a run's `llmopt.quality`; none for results of older versions."""
    if not quality or "intervals" not in quality:
        return []
    texts = [marked(passage) for passage in quality.get("hurt") or ()]
    paragraphs = [words for words in (speed_sentence(quality.get("speed")),) if words]
    if texts:
        limits = ", ".join(f"{limit:g}" for limit in SHADES)
        paragraphs.append(
            f"Below the table: the passages that lost most, each token shaded from {limits} nats of KL on."
        )
    table = quality_table(quality)
    return [Section("Quality by position", paragraphs, (), (table,), texts=texts)]


def quality_table(quality: Mapping[str, Any]) -> Table:
    """Every score that the run has, with its 95 % interval."""
    intervals = quality["intervals"]
    rows = []
    for label, key, digits in ROWS:
        if (value := quality.get(key)) is not None:
            interval = intervals.get(key)
            between = bounds(interval, digits) if interval else ""
            rows.append([label, number(value, digits), between])
    for label, key in SHARES:
        if (value := quality.get(key)) is not None:
            sides = intervals.get(key) or ()
            between = " to ".join(percent(side, 2) for side in sides)
            rows.append([label, percent(value, 2), between])
    caption = (
        f"{quality['num_tokens']:,} positions of {quality['source']}, protocol {quality['protocol']}: "
        f"{quality['description']}. Reference: {quality['reference'] or 'none'}. "
        f"Intervals: {quality['interval_method']}."
    )
    return Table(["", "value", "95 % interval"], rows, caption=caption)


def speed_sentence(speed: Mapping[str, Any] | None) -> str:
    """Rate of scoring beside that of prefill."""
    if not speed or speed.get("share_of_prefill_rate") is None:
        return ""
    prefill = f"{number(speed['prefill_tokens_per_second'], 0)}"
    if (other := speed.get("reference_prefill_tokens_per_second")) is not None:
        prefill += f" and {number(other, 0)} (reference)"
    return (
        f"Scored {number(speed['scored_tokens_per_second'], 0)} positions/s, "
        f"{percent(speed['share_of_prefill_rate'], 0)} of the rate of prefill in the same run (512 tokens, "
        f"{prefill} tokens/s)."
    )


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

"""Bytes of a run's weights as they would be served, and where this machine served them otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def served_weight_bytes(result: Mapping[str, Any]) -> int | None:
    """Bytes of the weights; those of a model that is not quantized are at most its file's.

    A machine that needs float32 holds them in twice as many, which is no reason to quantize.
    """
    record = result["llmopt"]
    held, stored = record["memory"]["weight_bytes"], record["memory"].get("checkpoint_bytes")
    if held is None or stored is None or record["identity"].get("quantization"):
        return held
    return min(held, stored)


def weight_share(base: Mapping[str, Any], new: Mapping[str, Any]) -> float | None:
    """Bytes of new's weights over those of base's, both as served."""
    sizes = served_weight_bytes(base), served_weight_bytes(new)
    return sizes[1] / sizes[0] if sizes[0] and sizes[1] else None


def widened_words(name: str, result: Mapping[str, Any]) -> str:
    """A sentence where a model's weights were held in a wider dtype than its file's; else empty."""
    record = result["llmopt"]
    stored = record["memory"].get("checkpoint_dtype")
    if record["identity"]["quantization"] or record["identity"]["dtype"] != "float32":
        return ""
    if stored not in ("bfloat16", "float16"):
        return ""
    return (
        f"This machine ran {name} in float32, its file is in {stored}: bytes are against the file, "
        "speed against float32."
    )


def widened_notes(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """`widened_words` of each of several runs by name; none where no other is quantized."""
    if not any(result["llmopt"]["identity"]["quantization"] for result in results.values()):
        return []
    notes = (widened_words(name, result) for name, result in results.items())
    return [note for note in notes if note]

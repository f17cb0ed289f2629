"""Result of a conversion, and the converted checkpoint's model card."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .manifest import MANIFEST_NAME


@dataclass(frozen=True, slots=True)
class Conversion:
    """A converted checkpoint.

    Attributes:
        modules: records of all quantized linears: `error` 0 and `reason` empty where lossless.
        loads_in: the loaders that support the result.
    """

    output: Path
    source_format: str
    target_format: str
    scheme: str
    modules: dict[str, dict[str, Any]]
    loads_in: str

    @property
    def lossless(self) -> bool:
        """Whether every dequantized weight is unchanged."""
        return not any(module["reason"] for module in self.modules.values())


def conversion_card(result: Conversion, manifest: dict[str, Any]) -> bytes:
    """A short README of a converted checkpoint, made from its manifest."""
    origin = manifest["converted_from"]
    worst = max(manifest["modules"], key=lambda module: module["error"])
    changed = (
        "every dequantized weight is unchanged"
        if result.lossless
        else f"some weights were requantized, `{worst['module']}` the most: by {worst['error']:.2e} "
        "of its square"
    )
    lines = [
        f"# {manifest['model']}, {result.scheme}",
        "",
        f"Converted by llmopt {manifest['llmopt']} from the format `{origin['format']}` to "
        f"`{result.target_format}`: {changed}.",
        "",
        f"Loads in: {result.loads_in}.",
        "",
        f"`{MANIFEST_NAME}` holds digests of every part of every quantized linear and of the files that "
        "they came from; `llmopt verify` checks the files against them.",
        "",
    ]
    return "\n".join(lines).encode()

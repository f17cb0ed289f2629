"""The names of `--dataset`, without their builders."""

from __future__ import annotations

from pathlib import Path

from ...quant.base.errors import BadInput
from ...quant.base.names import offer

TRACES = ("azure", "burstgpt", "mooncake")
NAMES = ("sharegpt", "agentic", "random", "random-mm", "prefix_repetition", "sonnet", "custom")
NAMES += ("custom_image", "hf", *TRACES, "frozen")


def check_dataset(dataset: str) -> None:
    """Raises BadInput where `dataset` is neither a name nor a file."""
    if dataset not in NAMES and not Path(dataset).expanduser().is_file():
        raise BadInput(f"no dataset {dataset!r}: {offer(dataset, NAMES)}, or give a file")

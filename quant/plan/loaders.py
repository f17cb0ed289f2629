"""Loader compatibility: which engines load a checkpoint, and which rule it violates.

The rules are in `transformers_rules` and `vllm_rules`; `docs/formats.md` has the runs that were made.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..families.registry import model_family
from .contents import CheckpointContents
from .transformers_rules import transformers_loads
from .vllm_rules import vllm_loads


@dataclass(frozen=True, slots=True)
class Loader:
    """One row of the table: loader, format, whether it loads, and the reason or requirement."""

    name: str
    format: str
    loads: bool
    reason: str


def loaders(stored: CheckpointContents, format_name: str, tensor_parallel: int = 1) -> list[Loader]:
    """Compatibility of every loader of a format.

    Args:
        tensor_parallel: tensor-parallel ranks of vLLM.
    """
    ranks = "" if tensor_parallel == 1 else f", {tensor_parallel} ranks"
    return [
        Loader(name, format_name, loads, reason)
        for name, (loads, reason) in {
            "llmopt": _llmopt(stored),
            "transformers": transformers_loads(stored, format_name),
            f"vLLM{ranks}": vllm_loads(stored, format_name, tensor_parallel),
            "llama.cpp": (
                (True, "") if format_name == "gguf" else (False, "it reads GGUF files only")
            ),
        }.items()
    ]


def loads_in(table: Iterable[Loader]) -> str:
    """The loaders that support it, each with its requirements."""
    readers = [
        f"{row.name} ({row.reason})" if row.reason else row.name for row in table if row.loads
    ]
    return "; ".join(readers) or "no loader that is known here"


def _llmopt(stored: CheckpointContents) -> tuple[bool, str]:
    families = map(model_family, (stored.family, stored.text_family))
    if any(family is not None and family.choices is not None for family in families):
        return True, ""
    return False, f"its engine does not run {stored.family}; verify and convert do read it"

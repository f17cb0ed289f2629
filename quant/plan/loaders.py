"""Loader compatibility: which engines load a checkpoint, and which rule it violates.

The rules are in `transformers_rules` and `vllm_rules`; `docs/formats.md` has the runs that were made.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .contents import CheckpointContents
from .transformers_rules import transformers_loads
from .vllm_rules import vllm_loads

# Model types that llmopt's engine runs; others are written for other loaders.
ENGINE_TYPES = frozenset(
    {
        "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "phi3",
        "gpt_oss", "llama4_text", "deepseek_v2", "deepseek_v3", "gpt2", "falcon", "cohere", "cohere2",
        "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "gemma", "gemma4_text", "glm", "glm4",
        "glm4_moe", "glm4v_text", "glm4v_moe_text", "granite",
        "granitemoe", "hunyuan_v1_dense", "hunyuan_v1_moe", "minimax_m2", "ministral", "ministral3", "olmo2",
        "olmo3", "qwen2_moe", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text",
        "seed_oss", "smollm3", "gemma3n_text", "granitemoehybrid", "lfm2", "lfm2_moe", "nemotron_h",
        "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
    }
)  # fmt: skip


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
    if not ENGINE_TYPES.isdisjoint((stored.model_type, stored.text_type)):
        return True, ""
    return False, f"its engine does not run {stored.model_type}; verify and convert do read it"

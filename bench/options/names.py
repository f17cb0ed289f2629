"""The names of `--dataset` and `--backend`, without the builders and clients that look them up."""

from __future__ import annotations

from pathlib import Path

from ...quant.base.errors import BadInput
from ...quant.base.names import offer

TRACES = ("azure", "burstgpt", "mooncake")
NAMES = ("sharegpt", "agentic", "random", "random-mm", "prefix_repetition", "sonnet", "custom")
NAMES += ("custom_image", "hf", *TRACES, "frozen")

CHAT, COMPLETIONS, TRANSFORMERS = "openai-chat", "openai", "transformers"
EMBEDDINGS, RERANK, POOLED = "openai-embeddings", "vllm-rerank", "vllm-pooling"
POOLING = (
    EMBEDDINGS,
    RERANK,
    POOLED,
)  # answer once and generate no tokens: their only latency is E2EL
# The request format of each backend; two are vLLM's and our own names for one.
BACKENDS = {
    "openai": COMPLETIONS,
    "vllm": COMPLETIONS,
    "llmopt": COMPLETIONS,
    "openai-chat": CHAT,
    "transformers": TRANSFORMERS,
    **{name: name for name in POOLING},
}


def check_dataset(dataset: str) -> None:
    """Raises BadInput where `dataset` is neither a name nor a file."""
    if dataset not in NAMES and not Path(dataset).expanduser().is_file():
        raise BadInput(f"no dataset {dataset!r}: {offer(dataset, NAMES)}, or give a file")

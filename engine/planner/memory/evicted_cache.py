"""KV cache of sequences under a KV-cache budget (SnapKV, H2O): bytes, and how many run concurrently."""

from __future__ import annotations

from dataclasses import dataclass

from ...config.compatibility import refuse
from ...scheduling.kv_eviction import KvEviction
from ..model.shapes import ModelShape
from .memory import Deployment, Reserve


def check_evictable(shape: ModelShape, rule: KvEviction) -> None:
    """Check that a model caches keys and values of every token, which is what the engine can evict.

    Raises:
        BadInput: it could not.
    """
    because = f"kv_budget = {rule.budget}"
    if shape.state_bytes:
        refuse({"kv-budget", "states"}, because)
    if shape.latent is not None:
        refuse({"kv-budget", "latents"}, because)
    if any(window is not None for window in shape.windows):
        refuse({"kv-budget", "windows"}, because)


@dataclass(frozen=True, slots=True)
class EvictedCache:
    """KV cache of one sequence with a prompt of `num_prompt` of its `num_tokens` tokens.

    Its whole prompt is in the cache until it is computed, then the budget and what follows.
    """

    rule: KvEviction
    deployment: Deployment
    reserve: Reserve
    num_prompt: int
    num_tokens: int

    @property
    def num_slots(self) -> int:
        """Most tokens of it after its prompt."""
        return self.rule.held(self.num_prompt, self.num_tokens)

    @property
    def kv_bytes(self) -> int:
        """Bytes after its prompt, in blocks, on all ranks."""
        return self.deployment.all_kv_bytes(self.num_slots, self.reserve)

    @property
    def prompt_kv_bytes(self) -> int:
        """Bytes while its prompt is computed, on all ranks."""
        return self.deployment.all_kv_bytes(self.num_prompt, self.reserve)

    def max_sequences(self, memory_bytes: int) -> int:
        """Sequences that run concurrently, one of them in its prompt: at most `max_num_seqs`."""
        budget = self.deployment.kv_budget(memory_bytes, self.reserve)
        held = self.deployment.kv_bytes(self.num_slots, self.reserve)
        first = max(held, self.deployment.kv_bytes(self.num_prompt, self.reserve))
        if budget < first:
            return 0
        return min(self.reserve.max_num_seqs, 1 + (budget - first) // held)

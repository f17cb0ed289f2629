"""Expected speed-up of speculative decoding (Leviathan et al., 2023)."""

from __future__ import annotations

from dataclasses import dataclass

from ....quant.base.errors import BadInput


@dataclass(frozen=True, slots=True)
class Speculation:
    """`draft_tokens` draft tokens per step, each accepted with probability `acceptance`; a step of the draft
    model takes `draft_cost` of a target step. The draft model's memory is not counted."""

    draft_tokens: int
    acceptance: float
    draft_cost: float = 0.1

    def __post_init__(self) -> None:
        if self.draft_tokens < 1:
            raise BadInput(f"--draft-tokens {self.draft_tokens}: at least 1 is needed")
        if not 0 <= self.acceptance <= 1:
            raise BadInput(f"--acceptance {self.acceptance}: a probability is needed")
        if not self.draft_cost >= 0:
            raise BadInput(f"--draft-cost {self.draft_cost}: a fraction of a step is needed")

    @property
    def expected_tokens(self) -> float:
        """Expected tokens per verification: (1 - a^(k+1)) / (1 - a), the bonus token included."""
        if self.acceptance == 1:
            return self.draft_tokens + 1.0
        return (1 - self.acceptance ** (self.draft_tokens + 1)) / (1 - self.acceptance)

    def speedup(self, verification: float = 1.0) -> float:
        """Speed-up over plain decoding, where a verification takes `verification` plain steps: nearly 1 if
        memory-bound, up to k + 1 if compute-bound."""
        return self.expected_tokens / (verification + self.draft_tokens * self.draft_cost)

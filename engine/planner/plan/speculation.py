"""What drafting tokens and verifying them together is expected to bring (Leviathan et al., 2023)."""

from __future__ import annotations

from dataclasses import dataclass

from ....quant.base.errors import BadInput


@dataclass(frozen=True, slots=True)
class Speculation:
    """`draft_tokens` drafted per step, each accepted with probability `acceptance`, where a step of the
    draft takes `draft_cost` of a step of the model. The draft's own memory is not counted."""

    draft_tokens: int
    acceptance: float
    draft_cost: float = 0.1

    def __post_init__(self) -> None:
        if self.draft_tokens < 1:
            raise BadInput(f"--draft-tokens {self.draft_tokens}: at least 1 is needed")
        if not 0 <= self.acceptance <= 1:
            raise BadInput(f"--acceptance {self.acceptance}: a probability is needed")
        if not self.draft_cost >= 0:
            raise BadInput(f"--draft-cost {self.draft_cost}: a share of a step is needed")

    @property
    def expected_tokens(self) -> float:
        """Tokens that a verification yields: (1 - a^(k+1)) / (1 - a), its own one among them."""
        if self.acceptance == 1:
            return self.draft_tokens + 1.0
        return (1 - self.acceptance ** (self.draft_tokens + 1)) / (1 - self.acceptance)

    def speedup(self, verification: float = 1.0) -> float:
        """Over plain decoding, where a verification takes so many plain steps: nearly 1 while memory
        bounds it, up to k + 1 where arithmetic does."""
        return self.expected_tokens / (verification + self.draft_tokens * self.draft_cost)

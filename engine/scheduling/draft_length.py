"""Adaptive draft length of speculative decoding, from the acceptance rate of each sequence."""

from __future__ import annotations

from dataclasses import dataclass

_DECAY = 0.9  # of the counts so far, per step: about the last ten steps count
_PRIOR_HITS, _PRIOR_TRIALS = 1.4, 2.0  # begin as if 70 % were accepted


@dataclass(slots=True)
class Acceptance:
    """Acceptance rate of one sequence: positions verified (`trials`) and accepted (`hits`), with decay."""

    hits: float = _PRIOR_HITS
    trials: float = _PRIOR_TRIALS

    @property
    def rate(self) -> float:
        return self.hits / self.trials

    def record(self, num_positions: int, num_accepted: int) -> None:
        """Count a step. Positions after the first rejected one are not verified."""
        verified = num_accepted + (num_accepted < num_positions)
        self.hits = _DECAY * self.hits + num_accepted
        self.trials = _DECAY * self.trials + verified


@dataclass(frozen=True, slots=True)
class DraftLength:
    """The draft length with the highest expected throughput.

    With draft tokens for k positions, each accepted with probability a, a step yields
    `(1 - a^(k+1)) / (1 - a)` tokens in `1 + c k` of its time (Leviathan et al. 2023, section 3.5).

    Attributes:
        longest: maximum number of speculative positions.
        relative_cost: c, of proposing and verifying the draft tokens of one position.
        width: draft tokens per position, on average.
    """

    longest: int
    relative_cost: float
    width: int = 1

    def best(self, rate: float) -> int:
        """Speculative positions for the next step, at least 1, to keep measuring the acceptance rate."""
        rate = min(rate, 0.999)

        def speed(count: int) -> float:
            return (1 - rate ** (count + 1)) / (1 - rate) / (1 + self.relative_cost * count)

        return max(range(1, self.longest + 1), key=speed)

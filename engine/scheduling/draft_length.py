"""How far ahead draft tokens are worth their cost, from how many were accepted."""

from __future__ import annotations

from dataclasses import dataclass

_DECAY = 0.9  # of what was seen before, a step: about the last ten steps count
_PRIOR_HITS, _PRIOR_TRIALS = 1.4, 2.0  # begin as if 70 % were accepted


@dataclass(slots=True)
class Acceptance:
    """Places that one sequence had draft tokens for and that were reached, and those where one was accepted;
    older ones count less."""

    hits: float = _PRIOR_HITS
    trials: float = _PRIOR_TRIALS

    @property
    def rate(self) -> float:
        return self.hits / self.trials

    def record(self, num_positions: int, num_accepted: int) -> None:
        """Take in a step. Behind the first place without an accepted token none is verified."""
        verified = num_accepted + (num_accepted < num_positions)
        self.hits = _DECAY * self.hits + num_accepted
        self.trials = _DECAY * self.trials + verified


@dataclass(frozen=True, slots=True)
class DraftLength:
    """How far ahead draft tokens reach to make most tokens of the time.

    With draft tokens for k places, one of each accepted with probability a, a step brings
    `(1 - a^(k+1)) / (1 - a)` tokens and takes `1 + c k` of its time (Leviathan et al. 2023, section 3.5).

    Attributes:
        longest: places that draft tokens reach ahead, at most.
        relative_cost: c, of making and verifying the draft tokens for one place.
        width: draft tokens for each place, on average.
    """

    longest: int
    relative_cost: float
    width: int = 1

    def best(self, rate: float) -> int:
        """Places for the next step, at least one, so that what was seen can change."""
        rate = min(rate, 0.999)

        def speed(count: int) -> float:
            return (1 - rate ** (count + 1)) / (1 - rate) / (1 + self.relative_cost * count)

        return max(range(1, self.longest + 1), key=speed)

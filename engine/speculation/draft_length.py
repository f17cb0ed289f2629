"""How many guesses are worth their cost, from how many were right."""

from __future__ import annotations

from dataclasses import dataclass

_DECAY = 0.9  # of what was seen before, a step: about the last ten steps count
_PRIOR_HITS, _PRIOR_TRIALS = 1.4, 2.0  # begin as if 70 % were right


@dataclass(slots=True)
class Acceptance:
    """Guesses of one sequence that were checked, and those that were right; older ones count less."""

    hits: float = _PRIOR_HITS
    trials: float = _PRIOR_TRIALS

    @property
    def rate(self) -> float:
        return self.hits / self.trials

    def record(self, num_guesses: int, num_accepted: int) -> None:
        """Take in a step. Behind the first wrong guess none is checked."""
        checked = num_accepted + (num_accepted < num_guesses)
        self.hits = _DECAY * self.hits + num_accepted
        self.trials = _DECAY * self.trials + checked


@dataclass(frozen=True, slots=True)
class DraftLength:
    """The number of guesses that makes most tokens of the time.

    With k guesses, each right with probability a, a step brings `(1 - a^(k+1)) / (1 - a)` tokens and
    takes `1 + c k` of its time (Leviathan et al. 2023, section 3.5).

    Attributes:
        longest: guesses in a step, at most.
        relative_cost: c, of making and checking one guess.
    """

    longest: int
    relative_cost: float

    def best(self, rate: float) -> int:
        """Guesses for the next step, at least one, so that what was seen can change."""
        rate = min(rate, 0.999)

        def speed(count: int) -> float:
            return (1 - rate ** (count + 1)) / (1 - rate) / (1 + self.relative_cost * count)

        return max(range(1, self.longest + 1), key=speed)

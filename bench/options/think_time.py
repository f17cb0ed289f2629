"""Think time: the distribution of pauses between an answer and the next turn of its conversation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ...quant.base.errors import BadInput

# Parameters of each distribution, in seconds.
SHAPES = {
    "constant": ("SECONDS",),
    "exponential": ("MEAN",),
    "uniform": ("LOW", "HIGH"),
    "normal": ("MEAN", "STD"),
    "lognormal": ("MEAN", "STD"),
}
SPELLINGS = "SECONDS, " + ", ".join(
    ":".join((name, *words)) for name, words in SHAPES.items() if name != "constant"
)


@dataclass(frozen=True, slots=True)
class ThinkTime:
    """A distribution of seconds; a sample below 0 (of the normal one) counts as 0.

    The parameters of `lognormal` are mean and standard deviation of the times, not of their logarithms.
    """

    shape: str = "constant"
    seconds: tuple[float, ...] = (0.0,)

    @classmethod
    def parse(cls, text: str) -> ThinkTime:
        """`2`, `2s`, `exponential:2`, `uniform:1:5`, `normal:3:1` or `lognormal:3:2`.

        Raises:
            BadInput: none of these, or a parameter that is negative or not a number.
        """
        shape, *words = text.strip().split(":")
        if shape not in SHAPES:
            shape, words = "constant", [shape, *words]
        try:
            seconds = [float(word.removesuffix("s")) for word in words]
        except ValueError:
            seconds = []
        legal = len(seconds) == len(SHAPES[shape]) and all(0 <= s < math.inf for s in seconds)
        if legal and shape == "uniform":
            legal = seconds[0] <= seconds[1]
        if legal and shape == "lognormal":
            legal = seconds[0] > 0
        if not legal:
            raise BadInput(f"--think-time {text!r}: write {SPELLINGS}, in seconds")
        return cls(shape, tuple(seconds))

    def sample(self, rng: np.random.Generator, count: int) -> list[float]:
        """`count` pauses in seconds."""
        first, second = self.seconds[0], self.seconds[-1]
        if self.shape == "exponential":
            values = rng.exponential(first, count)
        elif self.shape == "uniform":
            values = rng.uniform(first, second, count)
        elif self.shape == "normal":
            values = rng.normal(first, second, count)
        elif self.shape == "lognormal":
            variance = math.log1p((second / first) ** 2)
            values = rng.lognormal(math.log(first) - variance / 2, math.sqrt(variance), count)
        else:
            values = np.full(count, first)
        return np.maximum(values, 0.0).tolist()

"""Bytes per cached element, exact for vectors of several widths."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Self


class ElementBytes(Fraction):
    """Mean bytes per element, with the bytes of a vector of each width (`by_width`).

    Scales are per vector, so layers whose vectors differ in width take different bytes per element.
    """

    __slots__ = ("by_width",)
    by_width: Mapping[int, Fraction]

    def __new__(cls, mean: Fraction, by_width: Mapping[int, Fraction]) -> Self:
        """The mean is the number's value."""
        number = super().__new__(cls, mean.numerator, mean.denominator)
        number.by_width = by_width
        return number


def vector_bytes(bytes_per_element: float | Fraction, width: int) -> Fraction:
    """Bytes of a vector of `width` elements."""
    if isinstance(bytes_per_element, ElementBytes):
        return bytes_per_element.by_width[width]
    return width * Fraction(bytes_per_element)

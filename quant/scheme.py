"""What a quantization promises: how many bits, who shares a scale, and where zero lies."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import BadInput

SUPPORTED_BITS = (4, 8)
PER_CHANNEL = -1


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """Integer weights of one width with one scale per group of input channels.

    Attributes:
        bits: Width of a code, 4 or 8.
        group_size: Consecutive input channels that share a scale; -1 is one group per output channel.
        symmetric: Whether the zero code is fixed at the middle, `2**(bits-1)`.

    Raises:
        BadInput: a width or a group size that no method here can produce.
    """

    bits: int
    group_size: int
    symmetric: bool

    def __post_init__(self) -> None:
        if self.bits not in SUPPORTED_BITS:
            raise BadInput(f"{self.bits}-bit weights are not supported: choose 4 or 8")
        if self.group_size != PER_CHANNEL and self.group_size < 1:
            raise BadInput(
                f"a group size of {self.group_size} means nothing: give a positive number, "
                "or -1 for one scale per output channel"
            )

    @property
    def max_code(self) -> int:
        """The largest code; the smallest is 0."""
        return 2**self.bits - 1

    @property
    def middle(self) -> int:
        """The zero code of the symmetric form."""
        return 2 ** (self.bits - 1)

    def divides(self, in_features: int) -> bool:
        """Whether rows of this width split into whole groups."""
        return self.group_size == PER_CHANNEL or in_features % self.group_size == 0

    def num_groups(self, in_features: int) -> int:
        """Groups in one row of `in_features` weights."""
        if not self.divides(in_features):
            raise BadInput(f"group size {self.group_size} does not divide {in_features} inputs")
        return 1 if self.group_size == PER_CHANNEL else in_features // self.group_size

    @property
    def label(self) -> str:
        """Short form for tables, such as `int4 g128 asym`."""
        group = "channel" if self.group_size == PER_CHANNEL else f"g{self.group_size}"
        return f"int{self.bits} {group} {'sym' if self.symmetric else 'asym'}"

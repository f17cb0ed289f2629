"""The scheme of integers on a uniform grid."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from ....base.errors import BadInput
from ...base.scheme import PER_CHANNEL, SUPPORTED_BITS, Activations, Scheme

_GROUPS = (128, 64, 32, PER_CHANNEL)
_GGML_TYPES = {4: "Q4_0", 8: "Q8_0"}
_GGML_BLOCK = 32


@dataclass(frozen=True, slots=True)
class IntScheme(Scheme):
    """Integer weights of one width; a scale per group of input channels, -1: per output channel. `symmetric`:
    the zero code is `2**(bits-1)`. Raises BadInput: no method here can produce it."""

    kind_name: ClassVar[str] = "int"
    searches_ranges: ClassVar[bool] = True
    searched_widths: ClassVar[tuple[tuple[int, ...], ...]] = ((4, 8), (2, 3, 4, 8))

    bits: int
    group_size: int
    symmetric: bool
    activations: Activations | None = None
    permuted: bool = False

    def __post_init__(self) -> None:
        if self.bits not in SUPPORTED_BITS:
            widths = ", ".join(map(str, SUPPORTED_BITS))
            raise BadInput(f"{self.bits}-bit weights are not supported: choose one of {widths}")
        if self.group_size != PER_CHANNEL and self.group_size < 1:
            raise BadInput(
                f"a group size of {self.group_size} means nothing: give a positive number, "
                "or -1 for one scale per output channel"
            )

    @property
    def max_code(self) -> int:
        return 2**self.bits - 1

    @property
    def middle(self) -> int:
        return 2 ** (self.bits - 1)

    def divides(self, in_features: int) -> bool:
        return self.group_size == PER_CHANNEL or in_features % self.group_size == 0

    def num_groups(self, in_features: int) -> int:
        if not self.divides(in_features):
            raise BadInput(f"group size {self.group_size} does not divide {in_features} inputs")
        return 1 if self.group_size == PER_CHANNEL else in_features // self.group_size

    def check_groups(self, module: str, in_features: int) -> None:
        """Raises BadInput naming the module whose rows the group size does not divide."""
        if not self.divides(in_features):
            raise BadInput(
                f"group size {self.group_size} does not divide the {in_features} inputs of {module}: "
                "choose one that does, or leave --group-size out"
            )

    def bits_per_weight(self, out_features: int, in_features: int) -> float:
        zero_bits = 0 if self.symmetric else self.bits
        return self.bits + (16 + zero_bits) * self.num_groups(in_features) / in_features

    @property
    def asymmetric(self) -> bool:
        return not self.symmetric

    @property
    def scale_group(self) -> int:
        return 0 if self.group_size == PER_CHANNEL else self.group_size

    def run_length(self, in_features: int) -> int:
        return in_features // self.num_groups(in_features)

    @property
    def ggml_type(self) -> str | None:
        whole = self.group_size == PER_CHANNEL or self.group_size % _GGML_BLOCK == 0
        plain = self.symmetric and not self.permuted and self.activations is None
        return _GGML_TYPES.get(self.bits) if plain and whole else None

    def at_width(self, bits: int, group_size: int) -> IntScheme:
        return replace(self, bits=bits, group_size=group_size)

    @classmethod
    def nearest_to(cls, other: Scheme) -> Iterator[tuple[int, Scheme]]:
        first = not other.asymmetric
        sizes = (other.group_size, *_GROUPS) if isinstance(other, IntScheme) else _GROUPS
        widths = dict.fromkeys((other.bits, 4 if other.bits <= 4 else 8, 4))
        for bits in (bits for bits in widths if bits in SUPPORTED_BITS):
            for size in dict.fromkeys(sizes):
                for symmetric in (first, not first):
                    yield 1, IntScheme(bits, size, symmetric)

    @property
    def label(self) -> str:
        group = "channel" if self.group_size == PER_CHANNEL else f"g{self.group_size}"
        text = f"int{self.bits} {group} {'sym' if self.symmetric else 'asym'}"
        if self.permuted:
            text += " act-order"
        return text if self.activations is None else f"{text} {self.activations.label}"

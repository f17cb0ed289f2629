"""The cells of the real model's table: package, method, grid and width, with the options of each worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmopt.quant.methods.registry import METHODS
from llmopt.quant.plan.request import QuantizeRequest

WIDTHS = (8, 6, 5, 4, 3, 2)
GROUP_SIZE = 64
"""The largest usual group that divides 576 channels."""
GGUF_TYPES = {
    "Q8_0": 8,
    "Q6_K": 6,
    "Q5_K_M": 5,
    "Q5_K_S": 5,
    "Q4_K_M": 4,
    "Q4_K_S": 4,
    "Q4_0": 4,
    "IQ4_NL": 4,
    "IQ4_XS": 4,
    "Q3_K_L": 3,
    "Q3_K_M": 3,
    "Q3_K_S": 3,
    "IQ3_S": 3,
    "IQ3_XXS": 3,
    "Q2_K": 2,
    "IQ2_S": 2,
    "IQ2_XS": 2,
    "IQ2_XXS": 2,
}
"""Mixes of llama.cpp with their nominal width; on the 768-wide twin, whose width 256 divides."""
TRELLIS_BESIDE = {"IQ4_XS": 4, "IQ3_S": 3, "IQ2_XS": 2}
"""Types of llama.cpp that trellis and lattice codes of fewer bits a weight are held against."""
GPTAQ = {"asymmetric": True}  # which the command takes by default
ITERS = 50
"""Steps of sign gradient descent for each layer; the paper's 200 take hours on a CPU."""
TARGETS = {"target_bpw": "bits", "target_bytes": "bytes"}
NEED_IMATRIX = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
"""Types that llama.cpp makes from an imatrix only; those of 3 bits could do without, at a loss."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One package, method and grid.

    Attributes:
        grid: the cells of a grid are compared with each other: `int4` in groups of 64, or a GGUF mix.
        options: of the package's worker, beside `bits`, `group_size` and the calibration tokens.
            `tables` in a GGUF file: the embedding and the output head count, too. `samples`: so many of the
            calibration's, in place of all.
    """

    package: str
    method: str
    grid: str
    bits: float
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Unique; what `--only` is matched with, and a row's key in the JSON file."""
        words = [self.package, self.method, self.grid]
        for key, value in self.options.items():
            if key == "symmetric":
                words.append("sym" if value else "asym")
            elif value is True:
                words.append(key)
            elif key == "solver":
                words.append(value)
            elif key in TARGETS:
                words.append(f"{value} {TARGETS[key]}")
            elif key == "finetune_steps":
                words.append("tuned")
            elif key == "samples":
                words.append(f"{value} samples")
            elif key == "rotations":
                words += value
        return " ".join(words)

    @property
    def is_gguf(self) -> bool:
        return "gguf_type" in self.options or self.options.get("format") == "gguf"

    @property
    def on_twin(self) -> bool:
        """Whether its blocks need the 768-wide twin: of 256 weights, or transforms of 128 channels."""
        return self.is_gguf or self.grid in GGUF_TYPES


def cells() -> Iterator[Cell]:
    """Every cell, peers first: theirs do not change with this package."""
    yield from _integer("llmcompressor", "rtn", WIDTHS)
    yield from _integer("gptqmodel", "gptq", (8, 4, 3, 2))
    yield from _integer("llmcompressor", "gptq", WIDTHS)
    yield from _integer("hqq", "hqq", WIDTHS, symmetric=(False,))
    yield from _integer("torchao", "intx", WIDTHS)
    yield from _integer("gptqmodel", "awq", (4,), symmetric=(False,))
    yield from _integer("llmcompressor", "awq", (4, 3), symmetric=(False,))
    yield from _gguf("llamacpp", "quantize", imatrix=(False, True))
    yield from _integer("autoround", "autoround", (4, 3, 2, 8), iters=ITERS)
    for method in ("rtn", "gptq", "awq"):
        yield from _integer("llmopt", method, WIDTHS)
    yield from _integer("llmopt", "awq", (4, 3), symmetric=(False,), solver="nearest")
    yield from _integer("llmopt", "hqq", WIDTHS, symmetric=(False,))
    yield from _four_bit_floats()
    if "autoround" in METHODS:
        yield from _integer("llmopt", "autoround", (4, 3, 2, 8), iters=ITERS)
    if "rotations" in QuantizeRequest.__dataclass_fields__:
        for method in ("gptq", "awq"):
            yield from _integer("llmopt", method, (4, 3), (False,), rotations=("R2",))
        for bits in WIDTHS:  # what the command takes by default
            options = {"symmetric": False, "rotations": ("R2",), "asymmetric": True}
            yield Cell("llmopt", "awq", f"int{bits}", bits, options)
    for method in ("rtn", "gptq", "awq"):
        yield from _gguf("llmopt", method, imatrix=(True,))
    for grid, bits in TRELLIS_BESIDE.items():
        yield Cell("llmopt", "trellis", grid, bits, GPTAQ)
        yield Cell("llmopt", "trellis", grid, bits, GPTAQ | {"finetune_steps": 100})
        yield Cell("llmopt", "quip", grid, bits, GPTAQ)
        yield Cell("llmopt", "quip", f"e8p{bits}", bits, GPTAQ)  # any width: of the model itself
        yield Cell("llmopt", "squeezellm", f"lookup{bits}", bits)
    yield Cell("llmopt", "trellis", "IQ2_S", 2, GPTAQ | {"target_bpw": 2.5})


def _four_bit_floats() -> Iterator[Cell]:
    """Blocks of 16 with e4m3 scales, and of 32 with powers of two; weights only."""
    for scheme in ("nvfp4", "mxfp4"):
        options = {"scheme": f"{scheme.upper()}A16"}
        for method in ("rtn", "gptq"):
            yield Cell("llmcompressor", method, scheme, 4, options)
        if scheme in METHODS:
            yield Cell("llmopt", scheme, scheme, 4, options)


def _integer(
    package: str,
    method: str,
    widths: tuple[int, ...],
    symmetric: tuple[bool, ...] = (False, True),
    **options: Any,
) -> Iterator[Cell]:
    for bits in widths:
        for each in symmetric:
            yield Cell(package, method, f"int{bits}", bits, {"symmetric": each, **options})


def _gguf(package: str, method: str, imatrix: tuple[bool, ...]) -> Iterator[Cell]:
    for gguf_type, bits in GGUF_TYPES.items():
        for each in imatrix:
            if each or gguf_type not in NEED_IMATRIX:
                options = {"gguf_type": gguf_type, "imatrix": each}
                yield Cell(package, method, gguf_type, bits, options)

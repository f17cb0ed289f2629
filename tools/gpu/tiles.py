"""Search of launch parameters: stages, warps and tiles of the kernels, timed against what is chosen.

A launch is intercepted, and its parameters are replaced: of the kernels the search knows the names of the
parameters alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from llmopt.engine.kernels.attention.dispatch import PAGED_ATTENTION, AttentionKernelQuery
from llmopt.engine.kernels.common.devices import refuses_triton
from llmopt.engine.kernels.common.verdicts import seconds_of
from llmopt.engine.kernels.linear.quantized_linear import (
    QUANTIZED_LINEAR,
    QuantizedLinearKernelQuery,
    linear_trial,
)
from llmopt.quant.kinds.base.kind import kind_of
from llmopt.quant.kinds.integer.scheme import IntScheme

from .expectation import Expectation, Facts, Finding
from .sections import World

CHANGES: tuple[dict[str, int], ...] = (
    *({"num_stages": count} for count in (1, 2, 3, 4, 5)),
    *({"STAGES": count} for count in (1, 2, 3, 4, 5, 6)),
    *({"num_warps": count} for count in (2, 4, 8)),
    *({"TILE": size} for size in (16, 32, 64, 128)),
)
"""One parameter at a time; where a launch has none of that name, the change is left out."""
WORTH = 1.05
"""A change that is faster by less is noise."""
RESERVED_SECONDS = 20
"""Of the stage's time: what no further change is begun in."""
SIZES = {"whole": (4096, 4096), "small": (128, 256)}


def tiles(world: World) -> Iterator[Finding]:
    """Whether some stages, warps or tiles are faster than those that are chosen."""
    reason = "needs a GPU" if world.device != "cuda" else refuses_triton("cuda")
    if reason is not None:
        yield Expectation("stages, warps and tiles", "none faster", reason, None)
        return
    for what, call in _calls(world):
        yield from _searched(world, what, call)


def _searched(world: World, what: str, call: Callable[[], object]) -> Iterator[Finding]:
    """Every change of a call, as long as there is time: a new kernel is compiled for each."""
    with launches() as usual:
        chosen = seconds_of(call)
    changes = [
        (name, value)
        for each in CHANGES
        for name, value in each.items()
        if any(name in one and one[name] != value for one in usual)
    ]
    seconds: dict[str, float] = {}
    for name, value in changes:
        if world.seconds_left < RESERVED_SECONDS:
            break
        seconds[f"{name}={value}"] = _seconds_with({name: value}, call)
    best = min(seconds, key=seconds.__getitem__, default=None)
    faster = best is not None and seconds[best] * WORTH < chosen
    seen = f"{best} takes {seconds[best] / chosen:.0%}" if best and faster else "none is"
    if len(seconds) < len(changes):
        seen += f", of {len(seconds)} of {len(changes)} that were tried in the time"
    met = None if len(seconds) < len(changes) and not faster else not faster
    yield Expectation(what, "no other stages, warps or tiles faster by 5 %", seen, met)
    rows = [
        (what, change, f"{1e6 * took:.1f}", f"{1e6 * chosen:.1f}")
        for change, took in seconds.items()
    ]
    if rows:
        yield Facts("launch parameters", ("case", "with", "µs", "chosen, µs"), rows)


def _calls(world: World) -> Iterator[tuple[str, Callable[[], object]]]:
    """What decode and prefill spend their time in: attention, and a 4-bit weight."""
    device, dtype = torch.device(world.device), torch.bfloat16
    is_small = bool(world.scale.config)
    query = AttentionKernelQuery(world.device, dtype, 128, 128)
    trial = PAGED_ATTENTION.trial(query)
    assert trial is not None and trial.calls is not None
    decode, prefill = trial.calls(PAGED_ATTENTION.select(query).run)
    yield "attention, decode of 8 sequences", decode
    yield "attention, prefill", prefill
    out, inputs = SIZES["small" if is_small else "whole"]
    scheme = IntScheme(4, 128, True)
    floats = torch.randn(out, inputs, generator=torch.Generator().manual_seed(0))
    weight: Any = kind_of(scheme).round(floats, torch.float32).to(device)
    of_weight = linear_trial(weight, dtype, 16)
    assert of_weight.calls is not None
    linear = QuantizedLinearKernelQuery(world.device, dtype, out, inputs, scheme)
    for tokens, call in zip(
        (1, 16, 64), of_weight.calls(QUANTIZED_LINEAR.select(linear).run), strict=True
    ):
        yield f"4-bit weight, {tokens} tokens", call


def _seconds_with(change: Mapping[str, int], call: Callable[[], object]) -> float:
    """Time of a call with another parameter; infinite where it does not compile, or does not fit."""
    with launches(change):
        try:
            return seconds_of(call)
        except torch.OutOfMemoryError:
            raise
        except Exception:
            return float("inf")


@contextmanager
def launches(change: Mapping[str, int] | None = None) -> Iterator[list[dict[str, Any]]]:
    """The parameters of Triton's launches in this context, made with `change` where they have such."""
    from triton.runtime import jit

    seen: list[dict[str, Any]] = []
    usual: Any = jit.JITFunction.run

    def run(self: Any, *args: Any, **options: Any) -> Any:
        seen.append(dict(options))
        return usual(self, *args, **_changed(options, change or {}))

    jit.JITFunction.run = run
    try:
        yield seen
    finally:
        jit.JITFunction.run = usual


def _changed(options: Mapping[str, Any], change: Mapping[str, int]) -> dict[str, Any]:
    changed = {**options, **{name: value for name, value in change.items() if name in options}}
    if "TILE" in change and "PART_TILES" in options and "TILE" in options:
        # A part of the keys stays as long, and so the partial results have their place.
        part = options["TILE"] * options["PART_TILES"]
        changed["PART_TILES"] = max(1, part // changed["TILE"])
    return changed

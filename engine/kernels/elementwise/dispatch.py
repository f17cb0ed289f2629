"""Dispatch of elementwise kernels and their trials: RMSNorm, gated activations, fused RoPE + KV-cache write
(with QK-norm), and the fused kernels of latent attention, without which attention composes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from ....quant.families.spec_parts import DeltaNetSpec, Mamba2Spec
from ..attention.paged_tensor import PagedTensor
from ..common.devices import package, refuses_device, refuses_native, refuses_rows, serves_all
from ..common.dispatch import Candidate, Operation, lazily
from ..common.verdicts import RandomInputs, Trial, tolerance
from .native_rows import CHANNELS, NativeGate, NativeNorm, NativeRopeAndCache, native_layer
from .recurrence import (
    ConvCall,
    DeltaCall,
    DeltaPlaces,
    DeltaWeights,
    MambaWeights,
    Recurrence,
    RecurrentKernel,
    StateRows,
    StateSpaceCall,
    TorchRecurrence,
    delta_rule,
)
from .reference import (
    TORCH_GATES,
    GatedActivation,
    GateKernel,
    HeadNorms,
    NormKernel,
    RopeAndCacheKernel,
    RopeCall,
    TorchNorm,
    TorchRopeAndCache,
    apply_rotary_emb,
    expand_cos_sin,
)

if TYPE_CHECKING:
    from .triton_cache_write import TritonLatent


@dataclass(frozen=True, slots=True)
class RowKernelQuery:
    """Kernel query of a row-wise kernel: device, dtype, and the row size (or the rotary dimension)."""

    device: str
    dtype: torch.dtype
    size: int

    def __str__(self) -> str:
        return f"rows of {self.size} in {self.dtype} on {self.device}"


COMPARED_ROWS = 33
TIMED_ROWS = (1, 32, 2048)
HEADS, KV_HEADS, BLOCK_SIZE = 8, 2, 16
LATENT_ROPE, RECURRENT_ROWS = 64, 5

CACHE_WRITE = "elementwise.triton_cache_write"
TRITON_GATE = lazily("elementwise.triton_rows", "TritonGate")

Timed = Sequence[Callable[[], object]]


def norm_trial(query: RowKernelQuery) -> Trial[Any]:
    random, size = RandomInputs(query.device, query.dtype), query.size
    weight, x, added = random(size), random(COMPARED_ROWS, size), random(COMPARED_ROWS, size)
    rows = [(random(count, size), random(count, size)) for count in TIMED_ROWS]

    def calls(make: Any) -> Timed:
        norm = make(weight, 1e-5)
        return [lambda pair=pair: norm(*pair) for pair in rows]

    return Trial(lambda make: make(weight, 1e-5)(x, added), tolerance(query.dtype), calls)


def gate_trial(query: RowKernelQuery, *arguments: Sequence[bool]) -> Trial[Any]:
    """A gated activation, made with each of the `arguments`."""
    random, size = RandomInputs(query.device, query.dtype), query.size
    x, up = random(COMPARED_ROWS, size), random(COMPARED_ROWS, size)
    rows = [(random(count, size), random(count, size)) for count in TIMED_ROWS]

    def calls(make: Any) -> Timed:
        gate = make(*arguments[0])
        return [lambda pair=pair: gate(*pair) for pair in rows]

    return Trial(
        lambda make: [make(*given)(x, up) for given in arguments], tolerance(query.dtype), calls
    )


def rope_trial(query: RowKernelQuery, stored: torch.dtype | None = None) -> Trial[Any]:
    """RoPE and KV-cache write of heads of `size` elements, with and without norms; `stored`: of the cache."""
    random, size = RandomInputs(query.device, query.dtype), query.size
    norms, dtype = HeadNorms(random(size), random(size), 1e-6), stored or query.dtype

    def run(make: Any, tokens: int, heads: HeadNorms | None) -> Callable[[], tuple[Any, ...]]:
        stacked = random(tokens, HEADS + 2 * KV_HEADS, size)
        angle = 3 * random(tokens, 1, size // 2)
        cos = torch.cat([angle.cos()] * 2, -1)
        sin = torch.cat([-angle.sin(), angle.sin()], -1)
        num_blocks = 1 + -(-tokens // BLOCK_SIZE)
        keys, values = (
            PagedTensor.zeros(num_blocks, BLOCK_SIZE, KV_HEADS, size, random.device, dtype)
            for _ in "kv"
        )
        slots = torch.arange(BLOCK_SIZE, BLOCK_SIZE + tokens, device=random.device)
        kernel = make()

        def call() -> tuple[Any, ...]:
            queries = kernel(RopeCall(stacked, HEADS, cos, sin, keys, values, slots, heads))
            return queries, keys, values

        return call

    def compute(make: Any) -> list[torch.Tensor]:
        nonlocal random
        random = RandomInputs(query.device, query.dtype)  # the same inputs for each
        compared: list[torch.Tensor] = []
        for heads in (None, norms):
            queries, *cache = run(make, COMPARED_ROWS, heads)()
            blocks = torch.arange(len(cache[0].codes), device=random.device)
            compared += [queries, *(paged.read(blocks, query.dtype) for paged in cache)]
        return compared

    def calls(make: Any) -> Timed:
        return [run(make, count, None) for count in TIMED_ROWS]

    return Trial(compute, tolerance(query.dtype), calls)


def _refuses_native(channels: int) -> Callable[[RowKernelQuery], str | None]:
    def refuses(query: RowKernelQuery) -> str | None:
        reason = f"it is for multiples of {channels} elements" if query.size % channels else None
        return refuses_native(query, native_layer) or reason

    return refuses


def _gate(
    name: str, activation: Callable[..., GatedActivation], *arguments: Sequence[bool]
) -> Operation[RowKernelQuery, Callable[..., GateKernel]]:
    """Gated activation; `activation` names it, from the candidates' arguments. `arguments` are tried."""
    candidates = [
        Candidate("triton", refuses_rows, lambda *given: TRITON_GATE(activation(*given))),
        Candidate("native", _refuses_native(1), lambda *given: NativeGate(activation(*given))),
        Candidate("torch", serves_all, lambda *given: TORCH_GATES[activation(*given)]),
    ]
    return Operation(name, candidates, lambda query: gate_trial(query, *arguments))


NORM: Operation[RowKernelQuery, Callable[[torch.Tensor, float], NormKernel]] = Operation(
    "norm",
    [
        Candidate("triton", refuses_rows, lazily("elementwise.triton_rows", "TritonNorm")),
        Candidate("native", _refuses_native(CHANNELS), NativeNorm),
        Candidate("torch", serves_all, TorchNorm),
    ],
    norm_trial,
)
GATE = _gate("silu gate", lambda: "silu", ())
GELU_GATE = _gate(
    "gelu gate", lambda is_tanh: "gelu_tanh" if is_tanh else "gelu", (True,), (False,)
)
"""The candidates take whether to use the tanh approximation."""
CLAMPED_SWIGLU_GATE = _gate("clamped swiglu gate", lambda: "clamped_swiglu", ())
ROPE_AND_CACHE: Operation[RowKernelQuery, Callable[[], RopeAndCacheKernel]] = Operation(
    "rotation and cache write",
    [
        Candidate("triton", refuses_rows, lazily(CACHE_WRITE, "TritonRopeAndCache")),
        Candidate("native", _refuses_native(2 * CHANNELS), NativeRopeAndCache),
        Candidate("torch", serves_all, TorchRopeAndCache),
    ],
    rope_trial,
)


def latent_trial(query: RowKernelQuery) -> Trial[Any]:
    """Norms, rotation and cache write of a latent, and the queries that read it. Nothing is timed."""
    random, rank, rope = RandomInputs(query.device, query.dtype), query.size, LATENT_ROPE
    both = random(COMPARED_ROWS, 2 * rank + rope)
    queries, latent = both.split([rank, rank + rope], dim=1)
    weights = random(rank), random(rank)
    angle = 3 * random(COMPARED_ROWS, 1, rope // 2)
    cos_sin = expand_cos_sin(angle.cos(), angle.sin())
    absorbed, turned = random(HEADS, COMPARED_ROWS, rank), random(COMPARED_ROWS, HEADS, rope)
    slots = torch.arange(BLOCK_SIZE, BLOCK_SIZE + COMPARED_ROWS, device=random.device)
    blocks = torch.arange(2 + COMPARED_ROWS // BLOCK_SIZE, device=random.device)

    def compute(make: Callable[[], TritonLatent | None]) -> list[torch.Tensor]:
        cache = PagedTensor.zeros(
            len(blocks), BLOCK_SIZE, 1, rank + rope, random.device, query.dtype
        )
        kernel, eps = make(), 1e-6
        if kernel is not None:
            norms = (weights[0], eps), queries, (weights[1], eps)
            normed = kernel.write(latent, *norms, cos_sin, False, cache, slots)
            joined = kernel.queries(absorbed, turned, cos_sin, False)
        else:
            normed = functional.rms_norm(queries, (rank,), weights[1], eps)
            key = apply_rotary_emb(latent[:, None, rank:], *cos_sin)
            own = functional.rms_norm(latent[:, :rank], (rank,), weights[0], eps)
            cache.write(torch.cat([own[:, None], key], dim=-1), slots)
            joined = [absorbed.transpose(0, 1), apply_rotary_emb(turned, *cos_sin)]
            joined = torch.cat(joined, dim=-1)
        assert normed is not None  # queries were given
        return [normed, joined, cache.read(blocks, query.dtype)]

    return Trial(compute, tolerance(query.dtype))


def recurrence_trial(query: RowKernelQuery) -> Trial[Any]:
    """A step of each recurrence, of sequences with a state and without one; nothing is timed."""
    random = RandomInputs(query.device, query.dtype)
    floats = RandomInputs(query.device, torch.float32)
    delta = DeltaNetSpec(2, 4, 32, 32, 4, False)
    mamba = Mamba2Spec(4, 16, 2, 32, 4, True, False, (0.0, math.inf))
    channels = 2 * delta.keys_width + delta.values_width
    width = channels + delta.values_width + 2 * delta.num_value_heads
    columns = torch.arange(width, dtype=torch.int32, device=random.device)
    parts = [channels, delta.values_width, delta.num_value_heads, delta.num_value_heads]
    places = DeltaPlaces(*columns.split(parts))
    of_delta = DeltaWeights(floats(4), floats(4), random(32), 1e-6)
    of_mamba = MambaWeights(-floats(4).exp(), floats(4), floats(4), random(2, 32), 1e-6)
    projected, spaced = random(RECURRENT_ROWS, width), random(RECURRENT_ROWS, 64 + 192 + 4)
    weight, bias, kernel_of_mamba = random(channels, 4), random(192), random(192, 4)
    gated, short = random(RECURRENT_ROWS, 3 * 64), random(64, 3)
    slots = torch.arange(RECURRENT_ROWS, device=random.device) + 1
    rows = StateRows(slots, slots % 2 == 0)
    kept = [
        random(RECURRENT_ROWS + 1, channels, 4),
        floats(RECURRENT_ROWS + 1, 4, 32, 32),
        random(RECURRENT_ROWS + 1, 192, 4),
        floats(RECURRENT_ROWS + 1, 4, 16, 32),
        random(RECURRENT_ROWS + 1, 64, 3),
    ]

    def compute(make: Callable[[], RecurrentKernel]) -> list[torch.Tensor]:
        states, kernel = [state.clone() for state in kept], make()
        call = ConvCall(projected, states[0], rows, weight, None, places.mixed, activated=True)
        given = kernel.conv(call), projected, places, states[1], rows, of_delta, delta
        of_heads = kernel.delta(DeltaCall(*given))
        gate, mixed, length = spaced.split([64, 192, 4], dim=1)
        mixed = kernel.conv(ConvCall(mixed, states[2], rows, kernel_of_mamba, bias, activated=True))
        given = mixed, (gate, length), states[3], rows, of_mamba, mamba
        scanned = kernel.state_space(StateSpaceCall(*given))
        convolved = kernel.conv(ConvCall(gated, states[4], rows, short, None, gated=True))
        return [of_heads, scanned, convolved, *states]

    return Trial(compute, tolerance(query.dtype))


FLA = "fla"


def delta_rule_fla(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    rate: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`delta_rule` by fla-core's chunked kernels: 16 bits, unit queries already scaled, a new state."""
    rows = (x[None].to(torch.bfloat16) for x in (query, key, value))
    out, after = import_module(f"{FLA}.ops.gated_delta_rule").chunk_gated_delta_rule(
        *rows,
        g=log_decay[None],
        beta=rate[None],
        scale=1.0,
        initial_state=state[None],
        output_final_state=True,
    )
    return out[0].to(value.dtype), after[0]


def _refuses_fla(query: RowKernelQuery) -> str | None:
    return refuses_device(query.device, (8, 9, 10, 12), query.dtype) or package(FLA).reason


def delta_rule_trial(query: RowKernelQuery) -> Trial[Any]:
    """Runs of tokens of one sequence, with keys of `size` elements, as prefill brings them."""
    random, heads = RandomInputs(query.device, torch.float32), 4

    def run(tokens: int) -> tuple[torch.Tensor, ...]:
        rows, gates = (tokens, heads, query.size), (tokens, heads)
        directions = (functional.normalize(random(*rows), dim=-1) for _ in "qk")
        decay, rate = -random(*gates).abs(), random(*gates).sigmoid()
        return *directions, random(*rows), decay, rate, random(heads, query.size, query.size)

    compared, timed = run(130), [run(count) for count in (64, 2048)]
    return Trial(
        lambda rule: rule(*compared),
        tolerance(query.dtype, quantizes_inputs=True),
        lambda rule: [lambda given=given: rule(*given) for given in timed],
    )


DELTA_RULE: Operation[RowKernelQuery, Recurrence] = Operation(
    "gated delta rule",
    [Candidate(FLA, _refuses_fla, delta_rule_fla), Candidate("torch", serves_all, delta_rule)],
    delta_rule_trial,
)
RECURRENT_STEP: Operation[RowKernelQuery, Callable[[], RecurrentKernel]] = Operation(
    "recurrent step",
    [
        Candidate(
            "triton", refuses_rows, lazily("elementwise.triton_recurrence", "TritonRecurrence")
        ),
        Candidate("torch", serves_all, TorchRecurrence),
    ],
    recurrence_trial,
)
LATENT: Operation[RowKernelQuery, Callable[[], TritonLatent | None]] = Operation(
    "latent attention's rotation and cache write",
    [
        Candidate("triton", refuses_rows, lazily(CACHE_WRITE, "TritonLatent")),
        Candidate("composed", serves_all, lambda: None),
    ],
    latent_trial,
)

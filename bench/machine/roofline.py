"""Roofline analysis of a run: intensity, MBU and MFU per phase, and the limiting resource.

The ceilings are measured: memory bandwidth and peak matmul FLOP/s, and the health of all devices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...base.errors import BadInput
from ...engine.base.device import choose_device
from ...engine.kernels.common.cpu_measurements import CpuRoofs, NoRoofs
from ...engine.planner.speed import (
    attainable_flops,
    decode_step_bytes,
    decode_step_flops,
    prefill_flops,
    ridge,
    streamed_weight_bytes,
)
from ...quant.families.shapes import ModelShape
from ...quant.source.models import open_checkpoint
from ..metrics.trace import LoadPass, StepRecord
from .kernel_table import self_test

if TYPE_CHECKING:
    from ...engine.core.engine import Engine


FAR_BYTES = 256 << 20
COPIED_BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}
SECONDS_EACH = 0.15
MATRIX_SIDE = {"cpu": 1024, "cuda": 8192}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured roofline ceilings of one device: bytes/s of reading a buffer too large for any cache (far) and
    of repeatedly reading one of the model's size (near), and FLOP/s of a large matmul by dtype."""

    far_bandwidth: float
    near_bandwidth: float
    near_bytes: int
    peak_flops: dict[str, float]

    @property
    def bandwidth(self) -> float:
        """The bandwidth ceiling for this model; that of a cache, if its weights fit one."""
        return max(self.far_bandwidth, self.near_bandwidth)

    @property
    def flops(self) -> float:
        return max(self.peak_flops.values())


def measure_ceilings(device: torch.device, dtype: torch.dtype, model_bytes: int) -> Ceilings:
    """Measure the ceilings in well under two seconds, with torch's current number of threads."""
    near_bytes = max(model_bytes, 1 << 16)
    sides = {torch.float32, dtype}
    return Ceilings(
        far_bandwidth=read_bandwidth(device, FAR_BYTES),
        near_bandwidth=read_bandwidth(device, min(near_bytes, FAR_BYTES)),
        near_bytes=near_bytes,
        peak_flops={str(d).removeprefix("torch."): matmul_flops(device, d) for d in sides},
    )


def device_roofs(device: torch.device) -> dict[str, float]:
    """Ceilings for `llmopt doctor`, by name: copy bandwidth and matmul peak through torch; on a CPU with C
    kernels also the read bandwidth of a plain loop, and 8-bit operations per second in registers."""
    roofs = {
        "copy_bytes_per_second": copy_bandwidth(device),
        "bfloat16_flops": matmul_flops(device, torch.bfloat16),
    }
    if device.type != "cpu":
        return roofs
    with suppress(NoRoofs):
        native = CpuRoofs(torch.get_num_threads())
        for _ in range(5):
            native.measure()
        roofs["read_bytes_per_second"] = max(native.bytes)
        roofs["int8_operations_per_second"] = max(native.operations)
    return roofs


def read_bandwidth(device: torch.device, num_bytes: int) -> float:
    values = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    return num_bytes / best_seconds(lambda: values.sum(), device)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read plus written, of copying a large buffer."""
    num_bytes = COPIED_BYTES.get(device.type, FAR_BYTES)
    if device.type == "cuda":  # small cards, and cards that others use
        free, _ = torch.cuda.mem_get_info(device)
        num_bytes = min(num_bytes, free // 4 // 4 * 4)
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / best_seconds(lambda: target.copy_(source), device)


def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a square matmul; a multiply-add counts as two."""
    side = MATRIX_SIDE.get(device.type, 1024)
    left = torch.randn(side, side, device=device).to(dtype)
    right = torch.randn(side, side, device=device).to(dtype)
    return 2 * side**3 / best_seconds(lambda: left @ right, device)


def best_seconds(work: Callable[[], object], device: torch.device) -> float:
    """The shortest of the repetitions that fit in `SECONDS_EACH`, after one warm-up."""

    def once() -> float:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elif device.type == "mps":
            torch.mps.synchronize()
        return time.perf_counter() - start

    once()
    best, spent = once(), 0.0
    while spent < SECONDS_EACH:
        seconds = once()
        best, spent = min(best, seconds), spent + seconds
    return best


def check_health() -> dict[str, Any]:
    """Every device with its tests and ceilings, as plain JSON values; `passed` covers all tests."""
    kinds = ["cpu", *(["cuda"] if choose_device("auto").type == "cuda" else [])]
    devices = []
    for device in map(torch.device, kinds):
        dtypes = (torch.bfloat16,) if device.type == "cuda" else (torch.bfloat16, torch.float32)
        # Before the tests: a failing kernel may leave the device unusable.
        roofs = device_roofs(device)
        findings = [finding for dtype in dtypes for finding in self_test(device, dtype)]
        results = [asdict(finding) | {"passed": finding.passed} for finding in findings]
        devices.append({"device": device.type, "roofs": roofs, "tests": results})
    tests = [test for device in devices for test in device["tests"]]
    return {"passed": all(test["passed"] for test in tests), "devices": devices}


# Below this fraction of both ceilings, neither memory nor arithmetic is the bottleneck.
OVERHEAD_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class PhasePoint:
    """One phase of a run as a point of the roofline; rates are per second of its steps."""

    phase: str
    num_steps: int
    seconds: float
    bytes_per_step: float
    flops_per_step: float
    intensity: float
    achieved_flops: float
    achieved_bandwidth: float
    mbu: float
    mfu: float
    of_roof: float
    bound: str


@dataclass(frozen=True, slots=True)
class ByteSizes:
    """Bytes that a step moves: of all weights, of an element of the KV cache, of an unquantized weight."""

    weight_bytes: float
    kv_bytes_per_element: float
    unquantized_bytes: float


def decode_point(
    steps: Sequence[StepRecord], shape: ModelShape, ceilings: Ceilings, sizes: ByteSizes
) -> PhasePoint | None:
    """The decode-only steps; None if there were none."""
    chosen = [step for step in steps if step.decode_only]
    moved = computed = 0.0
    element_bytes = sizes.kv_bytes_per_element, sizes.unquantized_bytes
    for step in chosen:
        batch, context = step.num_sequences, step.context_tokens / step.num_sequences
        moved += decode_step_bytes(shape, batch, context, sizes.weight_bytes, *element_bytes)
        computed += decode_step_flops(shape, batch, context)
    return _point("decode", chosen, moved, computed, ceilings)


def prefill_point(
    steps: Sequence[StepRecord], shape: ModelShape, ceilings: Ceilings, sizes: ByteSizes
) -> PhasePoint | None:
    """All other steps (prefill and mixed); decode tokens in mixed steps are included."""
    chosen = [step for step in steps if not step.decode_only and step.computed_tokens]
    moved = computed = 0.0
    for step in chosen:
        tokens, prompts = step.computed_tokens, max(1, step.num_first)
        moved += streamed_weight_bytes(shape, sizes.weight_bytes, tokens, sizes.unquantized_bytes)
        moved += tokens * shape.kv_bytes_per_token(sizes.kv_bytes_per_element)
        computed += prompts * prefill_flops(shape, max(1, tokens // prompts))
    return _point("prefill", chosen, moved, computed, ceilings)


def _point(
    phase: str, steps: Sequence[StepRecord], moved: float, computed: float, ceilings: Ceilings
) -> PhasePoint | None:
    seconds = sum(step.seconds for step in steps)
    if not steps or seconds <= 0:
        return None
    intensity = computed / moved
    achieved = computed / seconds
    mbu = moved / seconds / ceilings.bandwidth
    mfu = achieved / ceilings.flops
    return PhasePoint(
        phase=phase,
        num_steps=len(steps),
        seconds=seconds,
        bytes_per_step=moved / len(steps),
        flops_per_step=computed / len(steps),
        intensity=intensity,
        achieved_flops=achieved,
        achieved_bandwidth=moved / seconds,
        mbu=mbu,
        mfu=mfu,
        of_roof=achieved / attainable_flops(intensity, ceilings.flops, ceilings.bandwidth),
        bound=name_bound(intensity, mbu, mfu, ceilings),
    )


def name_bound(intensity: float, mbu: float, mfu: float, ceilings: Ceilings) -> str:
    """`memory`, `compute`, or `overhead` if the run is far below both ceilings."""
    if max(mbu, mfu) < OVERHEAD_SHARE:
        return "overhead"
    return "memory" if intensity < ridge(ceilings.flops, ceilings.bandwidth) else "compute"


def explain(point: PhasePoint) -> str:
    """One sentence for the report: the limit of this phase, and whether smaller weights can help."""
    reason = {
        "overhead": "neither memory nor arithmetic limits it, its operations are too small for either. A "
        "difference in speed between formats comes from what their kernels cost on so little work, not from "
        "the bytes saved.",
        "memory": "it is limited by reading weights and cache, so a smaller format can make it faster.",
        "compute": "it is limited by arithmetic, so a format that only shrinks the weights cannot make it "
        "faster.",
    }[point.bound]
    share = f"{point.mbu:.1%} of the measured bandwidth and {point.mfu:.1%} of the measured peak"
    return f"{point.phase.capitalize()} uses {share}: {reason}"


def roofline_part(
    steps: Sequence[StepRecord], shape: ModelShape, ceilings: Ceilings, sizes: ByteSizes
) -> dict[str, Any]:
    """`llmopt.roofline` of a result: the measured ceilings, and a point per phase with its explanation."""
    prefill, decode = (
        measure(steps, shape, ceilings, sizes) for measure in (prefill_point, decode_point)
    )
    moved = None
    if decode:
        generated = sum(step.num_sequences for step in steps if step.decode_only)
        moved = decode.bytes_per_step * decode.num_steps / generated
    points = [point for point in (prefill, decode) if point is not None]
    return {
        "ceilings": {**asdict(ceilings), "bandwidth": ceilings.bandwidth, "flops": ceilings.flops},
        "points": [{**asdict(point), "explanation": explain(point)} for point in points],
        "bytes_per_decoded_token": moved,
    }


def memory_part(engine: Engine, model: Path, peak_bytes: int | None) -> dict[str, Any]:
    """`llmopt.memory`: bytes held by the engine, checkpoint size, and peak resident bytes of the process,
    None if other models share the process."""
    checkpoint = open_checkpoint(model)
    text = checkpoint.text_config
    return {
        "weight_bytes": engine.memory.weight_bytes,
        "checkpoint_bytes": checkpoint.weight_bytes,
        "checkpoint_dtype": text.get("dtype") or text.get("torch_dtype"),
        "kv_cache_bytes": engine.memory.kv_cache_bytes,
        "state_bytes": engine.memory.state_bytes,
        "kv_cache": {
            "dtype": engine.stats.kv_dtype,
            "bytes_per_token": engine.memory.kv_bytes_per_token,
            "tokens": engine.stats.kv_tokens_total,
            "blocks": engine.stats.kv_blocks_total,
        },
        "peak_resident_bytes": peak_bytes,
    }


def place_on_roofline(
    engine: Engine, model: Path, passes: Sequence[LoadPass]
) -> dict[str, Any] | None:
    """Measured ceilings and roofline points; None for a model whose shape the planner does not know."""
    from ...quant.families.config import model_shape

    try:
        shape = model_shape(open_checkpoint(model).config)
    except BadInput:
        return None
    memory = engine.memory
    # A tied embedding is also the LM head; the planner counts it once, as read.
    weight_bytes = memory.weight_bytes_per_step if shape.tied else memory.weight_bytes
    return roofline_part(
        [step for load_pass in passes for step in load_pass.steps],
        shape,
        measure_ceilings(engine.device, engine.dtype, weight_bytes),
        ByteSizes(
            weight_bytes,
            kv_bytes_per_element=memory.kv_bytes_per_token / shape.kv_bytes_per_token(1),
            unquantized_bytes=engine.dtype.itemsize,
        ),
    )

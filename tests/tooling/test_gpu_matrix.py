"""Kernels compiled for GPUs that are not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llmopt.engine.kernels.common.devices import split_runs

from tools.gpu_matrix import ARCHITECTURES, SMOKE, WIDE, faults, invariance, may_spill
from tools.triton_code import Compiled, Pipeline, read_pipeline

ROOT = Path(__file__).resolve().parents[2]
LOOP = """
    %ring = ttg.local_alloc : () -> !ttg.memdesc<2x64x128xbf16, #shared, #smem, mutable>
    %scales = ttg.local_alloc : () -> !ttg.memdesc<3x64xf32, #shared1, #smem, mutable>
    %first = tt.load %at : tensor<64x!tt.ptr<i64>, #blocked>
    %acc:2 = scf.for %i = %a to %b step %c iter_args(%next = %first) -> (i64) {
      %token = ttg.async_wait %old, %older {num = 4 : i32}
      %scale = tt.load %place : tensor<64x!tt.ptr<f16>, #blocked>
      %wide = arith.extf %scale : tensor<64xf16> to tensor<64xf32>
      %zero = tt.load %low : tensor<64x!tt.ptr<i8>, #blocked>
      %value = arith.subf %codes, %zero : tensor<64xbf16>
      %stored = ttg.local_alloc %value : (tensor<64xbf16>) -> !ttg.memdesc<64xbf16>
      %sum = tt.dot %value, %x, %zeros : tensor<64x16xf32>
      scf.yield %wide, %sum : tensor<64xf32>
    }
    %done = ttg.async_wait  {num = 0 : i32}
"""
DECODE = Compiled(
    "attend",
    {"IN_PARTS": True, "PRECISION": "tf32", "HAS_SCALES": False, "KEY_DIM": 128},
    warps=4,
    registers=200,
    shared=60 * 1024,
    matrix=("HMMA",),
    pipeline=Pipeline(((2, 16384),), (4,), 0, 0, 0),
)


def test_a_loop_is_read_from_ttgir() -> None:
    """Buffers, waits, round trips, which loads a turn waits for: not those for the next turn; and masks."""
    read = Pipeline(((2, 16384), (3, 256)), (4,), 1, 2, 1, unmasked=1)
    assert read_pipeline(LOOP) == read
    mask = "%m = arith.select %seen, %sum, %none : tensor<64x16xi1, #mma>, tensor<64x16xf32, #mma>"
    masked = LOOP.replace("      scf.yield", f"      {mask}\n      scf.yield")
    assert read_pipeline(masked) == replace(read, unmasked=0)


@pytest.mark.parametrize("variant", [{"HAS_SCALES": True}, {"KEY_DIM": 576}, {"IN_PARTS": True}])
def test_prompts_may_spill_but_on_8_bit_caches_and_latents(variant: dict[str, Any]) -> None:
    prefill = replace(DECODE, variant=DECODE.variant | {"IN_PARTS": False}, stack=8)
    assert may_spill(prefill)
    assert not may_spill(replace(prefill, variant=prefill.variant | variant))


@pytest.mark.parametrize(
    ("kernel", "fault"),
    [
        (replace(DECODE, shared=100 * 1024), "102400 bytes of shared memory, of 101376"),
        (replace(DECODE, tensor_memory=528), "528 columns of tensor memory, of 512"),
        (replace(DECODE, stack=8), "8 bytes spilled"),
        (replace(DECODE, matrix=()), "no tensor-core instruction"),
        (
            replace(DECODE, pipeline=replace(DECODE.pipeline, buffers=((1, 16384),))),
            "1 buffers of a tile",
        ),
        (
            replace(DECODE, pipeline=replace(DECODE.pipeline, waits=(0,))),
            "a wait for every copy",
        ),
    ],
)
def test_what_a_decode_kernel_must_not_do(kernel: Compiled, fault: str) -> None:
    assert list(faults(DECODE, ARCHITECTURES[89])) == []
    assert list(faults(kernel, ARCHITECTURES[89])) == [fault]


def test_sums_of_64_rows_of_latents_spill_nothing_in_their_loop() -> None:
    """They fill the registers: what waits outside of the loop may lie in memory."""
    variant = DECODE.variant | {"KEY_DIM": 576, "ROWS": 64}
    full = replace(DECODE, variant=variant, stack=536, spills=230)
    assert list(faults(full, ARCHITECTURES[89])) == []
    assert list(faults(replace(full, loop_spills=1), ARCHITECTURES[89])) == ["536 bytes spilled"]
    few = replace(full, variant=variant | {"ROWS": 16})
    assert list(faults(few, ARCHITECTURES[89])) == ["536 bytes spilled"]


@pytest.mark.parametrize("name", ["_gemm", "_code_gemm"])
def test_rows_of_a_decode_sized_batch_take_the_same_matrix_instruction(name: str) -> None:
    """Else a token's sums would follow what shares its batch; prefill, and other weights, may differ."""

    def gemm(rows: int, bits: int, matrix: str) -> Compiled:
        return Compiled(name, {"ROWS": rows, "BITS": bits}, matrix=(matrix,))

    kernels = [gemm(16, 4, "HMMA"), gemm(64, 4, "UTCHMMA"), gemm(128, 4, "UTCHMMA")]
    kernels += [gemm(16, 8, "UTCHMMA"), gemm(32, 8, "UTCHMMA")]
    assert invariance(kernels) == {1: "other matrix instructions than ('HMMA',) of fewer rows"}


def test_tensor_memory_limits_the_programs_of_a_multiprocessor() -> None:
    programs = ARCHITECTURES[100].programs
    few = replace(DECODE, registers=32, shared=1024)
    assert programs(few) > programs(replace(few, tensor_memory=256)) == 2


TRITONS = {"3.6.0": (80, 90), "3.7.1": (80, 90, 100)}
"""The lowest that is supported, and that of today's torch, with the capabilities that they compile for."""


@pytest.fixture(scope="module")
def triton(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Triton: where its packages are, "" for the installed one. Another is installed beside it."""
    installed = pytest.importorskip("triton", reason="Triton is for Linux alone")
    if installed.__version__ == request.param:
        return ""
    folder = tmp_path_factory.mktemp("triton")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    done = subprocess.run([*pip, f"triton=={request.param}"], capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.splitlines() or ["it says nothing"])[-1]
        pytest.skip(f"Triton {request.param} cannot be installed: {said}")
    return str(folder)


@pytest.mark.whole
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("triton", "capability"),
    [(name, capability) for name, known in TRITONS.items() for capability in known],
    indirect=["triton"],
)
def test_kernels_compile_for_a_gpu_that_is_not_there(
    tmp_path: Path, triton: str, capability: int
) -> None:
    """In a process of its own: here Triton may be its interpreter, and is one of them alone."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    for name in ("TRITON_INTERPRET", "LLMOPT_TRITON"):
        environment.pop(name, None)
    if triton:
        paths = filter(None, [triton, environment.get("PYTHONPATH")])
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    out = tmp_path / "matrix.json"
    run = [sys.executable, "-m", "tools.gpu_matrix", "--smoke", "--out", str(out)]
    run += ["--capability", str(capability)]
    done = subprocess.run(run, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    table = json.loads(out.read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    assert not any(row["faults"] for row in rows)
    has_fp8 = capability >= 89
    assert {row["launch"] for row in rows} == {
        name.strip() for name in SMOKE if has_fp8 or "inputs" not in name
    }
    for row in rows:
        pipeline, variant = row["pipeline"], row["variant"]
        is_decode = variant.get("IN_PARTS") or (row["name"] == "_gemm" and variant["ROWS"] == 16)
        assert row["programs"] >= (2 if is_decode else 1)
        if is_decode:
            # Nothing waits for scales: they are loaded a turn ahead. Of a latent the 512 elements that are
            # keys and, transposed, values get no ring of buffers from Triton: one load is waited for.
            waited = int(variant.get("KEY_DIM", 0) > WIDE)
            assert pipeline["depth"] >= 2 and pipeline["exposed_loads"] == waited
            assert row["matrix"] and row["stack"] == row["spills"] == 0
        if row["name"] == "_gemm":
            # Codes are decoded where the tensor core reads them.
            assert pipeline["round_trips"] == 0
            # Those of 4 bits need no tensor memory, which holds too little of their sums.
            assert row["tensor_memory"] == 0 or variant["BITS"] == 8
    attention = [row for row in rows if row["name"] == "attend"]
    prompts = [row for row in attention if not row["variant"]["IN_PARTS"]]
    assert 2 * len(prompts) == len(attention) == 6
    # One loop for the tiles that every token sees whole, and one for the others.
    assert {row["pipeline"]["unmasked"] for row in prompts} == {1}
    latents = next(row for row in prompts if row["variant"]["KEY_DIM"] == 576)
    if capability == 90:
        assert latents["matrix"] == ["HGMMA"] and latents["variant"]["ROWS"] == 64
    # Kernels of a step in 16 bits start before their predecessor has ended, where there is such a launch.
    dependent = {row["name"] for row in rows if row["dependent"]}
    step = {
        "attend",
        "reduce_parts",
        "_norm",
        "_gate",
        "_quantized_gate",
        "_rope_and_cache",
        "_gemm",
    }
    assert dependent == (step if capability >= 90 else set())


THRESHOLDS = """
import json
from llmopt.engine.sampling import triton_thresholds as at
from tools.triton_code import compiling
from tools.triton_launches import sampling
took = {}
for rows in (1, 32):
    with compiling(90) as kernels:
        sampling(rows)
    # Turns of each loop; the two searches of `_narrow` take 11 passes each, each of less than a quarter of its code.
    turns = {"_part_tops": 1, "_coarse_sums": at.PART.value // at.COARSE_BLOCK.value, "_compact": 2, "_narrow": 1}
    found = {each.name: each for each in kernels}
    seconds = {name: found[name].issue_seconds(count) for name, count in turns.items()}
    took[rows] = {**seconds, "_narrow": (1 + 22 / 4) * seconds["_narrow"]}
    assert not [name for name in turns if found[name].spills]
print(json.dumps(took))
"""


@pytest.mark.whole
def test_thresholds_of_a_large_vocabulary_are_issued_by_all_multiprocessors(tmp_path: Path) -> None:
    """60 µs for top-k and top-p of 128,256 tokens, alone and in a batch: one program a row took 800."""
    pytest.importorskip("triton", reason="Triton is for Linux alone")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    for name in ("TRITON_INTERPRET", "LLMOPT_TRITON"):
        environment.pop(name, None)
    run = [sys.executable, "-c", THRESHOLDS]
    done = subprocess.run(run, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for rows, took in json.loads(done.stdout).items():
        assert 0 < sum(took.values()) < 60e-6, (rows, took)


@pytest.mark.parametrize(
    ("tiles", "runs", "slots", "each"),
    [(64, 16, 528, 2), (448, 16, 528, 16), (448, 16, 384, 8), (64, 56, 528, 7), (1, 1, 528, 1)],
)
def test_splits_fill_the_gpu(tiles: int, runs: int, slots: int, each: int) -> None:
    """Runs of a split: of a linear of 4,096 outputs on an H100, of 28,672 there and on an RTX 4090."""
    assert split_runs(tiles, runs, slots) == each

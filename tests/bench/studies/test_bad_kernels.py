"""The recipe that `make demo` runs, in small, on a card whose kernels fail at first use: torch's serve it."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llmopt.cli.main import main
from llmopt.engine.kernels.common import devices

from ...support.pretended_cuda import runtime
from ...support.pretended_cuda.card import Card

RECIPE = """name: quickstart
model: stories260K
interleave: true
num_threads: 1
bench: {num_prompts: 2, sharegpt_output_len: 3, max_concurrency: 2, num_runs: 1, quality_tokens: 64, dtype: bfloat16,
        max_redone_passes: 0, check_client: false, max_model_len: 64, max_num_seqs: 2, report: false,
        enforce_eager: true}
variants:
  - name: rtn
    quantize: {method: rtn, bits: 4, symmetric: false, num_samples: 2, group_size: -1}
compare: {gate: false}
"""
DROPPED = {
    "norm": "its error is",
    "silu gate": "it failed: RuntimeError: Triton Error [CUDA]: misaligned address",
    "rotation and cache write": "it failed: TimeoutError: compiling _rope_and_cache took more than",
}


@pytest.mark.whole
@pytest.mark.timeout(900)
def test_kernels_that_are_wrong_raise_or_hang_cost_the_demo_a_warning_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The pretended card runs no kernel, so each is wrong; of three one raises, one hangs in the compiler."""
    import triton.compiler

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(devices, "COMPILE_SECONDS", 0.1)
    released, launch = threading.Event(), runtime._launch
    monkeypatch.setattr(triton.compiler, "compile", lambda source: released.wait())

    def faulty(card: Card, dispatch: Any, name: str, values: list[Any]) -> None:
        if name == "_gate":
            raise RuntimeError("Triton Error [CUDA]: misaligned address\nmore")
        if name == "_rope_and_cache":
            compile_kernel: Any = triton.compiler.compile
            compile_kernel(SimpleNamespace(name=name))
        launch(card, dispatch, name, values)

    monkeypatch.setattr(runtime, "_launch", faulty)
    Path("small.yaml").write_text(RECIPE)
    card = Card()
    try:
        with runtime.pretended_cuda(card), caplog.at_level(logging.WARNING):
            assert _run("on-the-card") == 0
    finally:
        released.set()
    lines = [each.getMessage() for each in caplog.records if " is dropped: " in each.getMessage()]
    assert lines and len(set(lines)) == len(lines)
    for operation, reason in DROPPED.items():
        (line,) = [line for line in lines if line.startswith(f"{operation} for ")]
        assert reason in line and "\n" not in line
    assert _run("on-the-cpu", "--set", "bench.device=cpu") == 0
    for name in ("original", "rtn"):
        got, expected = (
            json.loads((tmp_path / side / name / "result.json").read_text())
            for side in ("on-the-card", "on-the-cpu")
        )
        assert (got["completed"], got["failed"]) == (2, 0)
        assert got["llmopt"]["identity"]["device"].startswith("cuda")
        one, other = (side["llmopt"]["quality"]["perplexity"] for side in (got, expected))
        assert one == pytest.approx(other, rel=0.02)


def _run(folder: str, *words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["run", "small.yaml", "--output", folder, *words])
    return int(stop.value.code or 0)

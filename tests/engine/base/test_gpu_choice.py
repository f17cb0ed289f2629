"""A GPU that cannot be used: the same answer on the CPU with one line, or one line where CUDA was asked for."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.engine.base.device import choose_device, say_on_cpu
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.core.llm import LLM
from llmopt.engine.kernels.attention.dispatch import PAGED_ATTENTION
from llmopt.engine.kernels.common import devices
from llmopt.engine.kernels.common.dispatch import Operation
from llmopt.quant.base import device as quant_device
from llmopt.quant.base.device import device_of

from ...support.model_families import FAMILIES, save_model
from ...support.pretended_cuda.card import Card
from ...support.pretended_cuda.runtime import pretended_cuda

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real CUDA device")
ROOT = Path(__file__).resolve().parents[3]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(autouse=True)
def untold() -> None:
    say_on_cpu.cache_clear()


def _busy(*_: Any, **__: Any) -> Any:
    raise RuntimeError(
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCompile with"
    )


def _full(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")


def _old_driver() -> bool:
    warnings.warn(
        "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040). Please",
        stacklevel=2,
    )
    return False


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "too old": ({"get_device_capability": lambda _: (7, 5)}, "has compute capability 7.5, and 8.0"),
    "busy": ({"zeros": _busy}, "cuda:0 does not compute: CUDA error: CUDA-capable device(s) is/are busy"),
    "full": ({"zeros": _full}, "its memory is full"),
    "no driver": ({"is_available": lambda: False}, "sees no CUDA device"),
    "old driver": ({"is_available": _old_driver}, "The NVIDIA driver on your system is too old"),
    "no CUDA": ({"is_available": lambda: False, "built": None}, "is built without CUDA"),
}  # fmt: skip


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], str]:
    """A machine with a GPU of which something is wrong; returns the words that say so."""

    def make(wrong: str) -> str:
        answers, words = WRONG[wrong]
        usual: dict[str, Any] = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "get_device_name": lambda _: "Quadro RTX 6000",
            "get_device_capability": lambda _: (9, 0),
            "zeros": lambda *_, **__: None,
            "built": "13.0",
        }
        usual |= answers
        monkeypatch.setattr(torch.version, "cuda", usual.pop("built"))
        monkeypatch.setattr(torch, "zeros", usual.pop("zeros"))
        for name, value in usual.items():
            monkeypatch.setattr(torch.cuda, name, value)
        gpu = tmp_path / "0000:41:00.0"
        gpu.mkdir()
        (gpu / "vendor").write_text("0x10de\n")
        (gpu / "class").write_text("0x030200\n")
        monkeypatch.setattr(quant_device, "PCI_DEVICES", tmp_path)
        return words

    return make


@pytest.mark.parametrize("wrong", WRONG)
def test_a_gpu_that_cannot_be_used_is_told_in_one_line(
    wrong: str, machine: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    words = machine(wrong)
    for _ in range(2):
        assert choose_device("auto") == torch.device("cpu")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and words in record.getMessage()
    assert "\n" not in record.getMessage()
    with pytest.raises(BadInput, match=r"--device cuda: .*: take cpu$") as quantized:
        device_of("cuda")
    with pytest.raises(BadInput) as served:
        choose_device("cuda")
    assert "\n" not in f"{quantized.value}{served.value}" and words in str(quantized.value)


OLD_CARD = """
import os, torch
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
torch.cuda.get_device_capability = lambda *_: (7, 5)
torch.cuda.get_device_name = lambda *_: "Tesla T4"
from tests import conftest
from tests.support.triton_world import DEVICE
from tests.gpu import test_gpu_kernels
print(DEVICE, os.environ["TRITON_INTERPRET"], conftest.pytest_report_header())
print(test_gpu_kernels.pytestmark[1].kwargs["reason"])
"""


@pytest.mark.whole
def test_tests_run_on_the_cpu_where_the_gpu_cannot_be_used() -> None:
    """Under `make test` and `make gpu-check`, and a line says why; kernels in Triton's interpreter."""
    pytest.importorskip("triton", reason="Triton is for Linux alone")
    environment = {name: value for name, value in os.environ.items() if "TRITON" not in name}
    run = [sys.executable, "-c", OLD_CARD]
    done = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    problem = "Tesla T4 has compute capability 7.5, and 8.0 is needed"
    chosen = f"cpu 1 on the CPU, as its GPU cannot be used: {problem}"
    assert done.stdout.splitlines() == [chosen, f"no GPU: {problem}"]


def test_a_machine_without_a_gpu_says_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(quant_device, "PCI_DEVICES", tmp_path)
    assert choose_device("auto") == torch.device("cpu") and not caplog.records


def test_a_gpu_that_is_too_small_leaves_the_model_to_the_cpu(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the weights do not fit, and where they leave no room for the largest step and its cache."""
    save_model(tmp_path, *FAMILIES["llama-3.1"])
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 64}
    expected = LLM(tmp_path, device="cpu", **options).generate([[1, 2, 3]], GREEDY)[0].token_ids
    for memory in (1 << 14, 1 << 20):
        say_on_cpu.cache_clear()
        caplog.clear()
        with pretended_cuda(Card(memory_bytes=memory)) as card:
            with pytest.raises(BadInput, match="does not fit on cuda") as refused:
                LLM(tmp_path, device="cuda", **options)
            said = str(refused.value)
            del refused  # its frames hold tensors of the card
            llm = LLM(tmp_path, **options)
            assert llm.engine.device.type == "cpu"
            got = llm.generate([[1, 2, 3]], GREEDY)[0].token_ids
            gc.collect()
            assert not card.held[0]
        assert got == expected and "\n" not in said
        (line,) = [
            each.getMessage() for each in caplog.records if "on the CPU" in each.getMessage()
        ]
        assert "does not fit on cuda" in line and "\n" not in line


def test_without_a_c_compiler_torch_serves_the_gpu_and_one_line_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Driver:
        @property
        def active(self) -> Any:
            raise RuntimeError("Failed to find C compiler. Please specify via CC\nor set")

    import triton.runtime

    with pretended_cuda(Card()):
        monkeypatch.setattr(triton.runtime, "driver", Driver())
        reason, again = (devices.refuses_triton("cuda") for _ in range(2))
    assert reason == again
    assert (
        reason == "Triton's driver does not load: Failed to find C compiler. Please specify via CC"
    )
    (record,) = caplog.records
    assert record.getMessage() == f"kernels of torch serve the GPU, as {reason}"


def test_a_compiler_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where Triton's launch calls it; the trial of the kernel then drops it as any other that fails."""
    import triton.compiler

    given_up = threading.Event()

    def compile_kernel(source: Any, target: Any = None) -> str:
        if source.name == "hangs":
            assert given_up.wait(120)
        if source.name == "fails":
            raise ValueError("out of resource")
        return f"{source.name} for {target}"

    class Source:
        def __init__(self, name: str) -> None:
            self.name = name

    monkeypatch.setattr(triton.compiler, "compile", compile_kernel)
    monkeypatch.setattr(devices, "COMPILE_SECONDS", 60.0)
    for _ in range(2):  # the second time it is limited already
        devices.limit_compilation()
    compile_limited: Any = triton.compiler.compile
    assert compile_limited(Source("adds"), target="sm_90") == "adds for sm_90"
    with pytest.raises(ValueError, match="out of resource"):
        compile_limited(Source("fails"))
    monkeypatch.setattr(devices, "COMPILE_SECONDS", 0.1)
    with pytest.raises(TimeoutError, match="compiling hangs took more than 0 s"):
        compile_limited(Source("hangs"))
    given_up.set()  # it still hangs here


def test_every_operation_is_tried_on_a_gpu() -> None:
    """Else the first use of a kernel that fails there is a step that fails."""
    from llmopt.bench.machine import kernel_table

    assert isinstance(PAGED_ATTENTION, Operation) and kernel_table
    modules = [each for name, each in sys.modules.items() if name.startswith("llmopt.engine")]
    found = {
        one.name: one
        for module in modules
        if isinstance(module, ModuleType)
        for one in vars(module).values()
        if isinstance(one, Operation)
    }
    assert len(found) > 10
    plain = {name for name, one in found.items() if one.trial.__module__ == Operation.__module__}
    # Those of a weight or a layer are tried on it as it is loaded; "linear" has one candidate on a GPU.
    assert plain == {"experts", "linear", "quantized linear"}

"""`LLMOPT_CPU`: every decision is that of the named processor, in this process and in torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from llmopt.base import processor
from llmopt.base.errors import BadInput
from llmopt.base.processor import PATHS, PROFILES, VARIABLE

from ..support.native_paths import needs_x86

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = (processor.PROFILE_VARIABLE, "ONEDNN_MAX_CPU_ISA")
AVX512 = "avx512f avx512bw avx512vl avx512dq"

# What a process decides whose first import is a part of llmopt.
DECISIONS = """
import json
from llmopt.engine.base.device import choose_dtype
from llmopt.engine.kernels.linear.linear import LINEAR, LinearKernelQuery
from llmopt.base import processor
from llmopt.quant.stream.layer_stream import compute_dtype
import torch
path = processor.choose_path()
linear = LINEAR.select(LinearKernelQuery("cpu", torch.bfloat16, 64, 64, torch.bfloat16))
print(json.dumps({
    "dtype": str(choose_dtype("auto", torch.device("cpu"))),
    "compute": str(compute_dtype("auto", torch.bfloat16)),
    "linear": linear.name,
    "path": None if isinstance(path, str) else path.name,
    "options": [] if isinstance(path, str) else path.compiler_options(processor.processor_flags()),
    "torch": processor.torch_capability(),
    "onednn_bf16": torch.ops.mkldnn._is_mkldnn_bf16_supported(),
}))
"""


def decisions(name: str, monkeypatch: pytest.MonkeyPatch) -> dict:
    known = next(known for known in PROFILES if known.name == name)
    if missing := known.flags - processor.machine_flags():
        pytest.skip(f"this processor lacks {', '.join(sorted(missing))}")
    monkeypatch.setenv(VARIABLE, "auto")
    monkeypatch.setenv(processor.PROFILE_VARIABLE, name)
    done = subprocess.run(
        [sys.executable, "-c", DECISIONS], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@needs_x86
@pytest.mark.parametrize(
    ("name", "dtype", "compute", "linear", "path", "torch"),
    [
        ("generic", "float32", "float32", "torch", None, "DEFAULT"),
        ("avx2", "float32", "float32", "torch", "avx2", "AVX2"),
        ("avx512", "bfloat16", "float32", "onednn-prepacked", "avx512vnni", "AVX512"),
        ("avx512_bf16", "bfloat16", "bfloat16", "onednn-prepacked", "avx512vnni", "AVX512"),
        ("amx", "bfloat16", "bfloat16", "onednn-prepacked", "avx512vnni", "AVX512"),
    ],
)
def test_a_profile_makes_every_decision(
    name: str,
    dtype: str,
    compute: str,
    linear: str,
    path: str | None,
    torch: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = decisions(name, monkeypatch)
    assert (made["dtype"], made["compute"]) == (f"torch.{dtype}", f"torch.{compute}")
    assert (made["linear"], made["path"], made["torch"]) == (linear, path, torch)
    assert made["onednn_bf16"] == (dtype == "bfloat16"), "torch decides as llmopt does"
    assert ("-mavx512bf16" in made["options"]) == (compute == "bfloat16")
    assert ("-DHAS_AMX" in made["options"]) == (name == "amx")


def test_a_wrong_profile_is_one_line_at_the_first_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(processor, "machine_flags", lambda: frozenset({"avx2", "fma", "f16c"}))
    monkeypatch.setenv(processor.PROFILE_VARIABLE, "avx9")
    with pytest.raises(BadInput, match="LLMOPT_CPU=avx9: choose native, generic, avx2, avx512,"):
        processor.processor_flags()
    processor.apply_profile()  # says nothing while llmopt is imported
    monkeypatch.setenv(processor.PROFILE_VARIABLE, "avx512")
    with pytest.raises(BadInput, match="LLMOPT_CPU=avx512: this processor lacks avx512_vbmi2"):
        processor.choose_path()
    monkeypatch.setattr(processor.platform, "machine", lambda: "aarch64")
    with pytest.raises(BadInput, match="this is no x86 processor but aarch64; choose native"):
        processor.choose_path()


def test_the_command_line_reports_it_with_exit_code_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "llmopt", "doctor"],
        capture_output=True,
        text=True,
        env={processor.PROFILE_VARIABLE: "avx9"},
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: LLMOPT_CPU=avx9: choose [\w, ]+\n", done.stderr)


@needs_x86
def test_torch_that_came_first_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import torch, llmopt.base.processor"
    monkeypatch.setenv(processor.PROFILE_VARIABLE, "generic")
    for variable in PROFILES[0].libraries:
        monkeypatch.delenv(variable, raising=False)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "LLMOPT_CPU=generic is incomplete: torch was imported before llmopt" in done.stderr


@pytest.mark.parametrize(
    ("line", "widest", "computes", "multiplies"),
    [
        (f"flags\t\t: fpu sse2 avx2 {AVX512}", "", True, False),
        (f"flags\t\t: fpu sse2 avx2 {AVX512} avx512_bf16", "", True, True),
        (f"flags\t\t: fpu sse2 avx2 {AVX512} avx512_bf16", "AVX2", False, False),
        ("flags\t\t: fpu sse2 avx2 avx_ne_convert", "", True, False),
        ("flags\t\t: fpu sse2 avx2 avx512f", "", False, False),
        ("", "", False, False),
    ],
)
def test_the_flags_say_what_is_computed_in_bfloat16(
    line: str,
    widest: str,
    computes: bool,
    multiplies: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor\t: 0\n{line}\n")
    monkeypatch.setattr(processor, "CPUINFO", path)
    monkeypatch.setattr(processor.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(processor, "machine_flags", processor.machine_flags.__wrapped__)
    monkeypatch.delenv(processor.PROFILE_VARIABLE, raising=False)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", widest)
    assert (processor.computes_in_bf16(), processor.multiplies_bf16()) == (computes, multiplies)


def test_a_profile_has_the_flags_of_its_instruction_path() -> None:
    paths = {path.name: path.needs for path in PATHS}
    for known in PROFILES[1:]:
        assert known.flags >= paths["avx2" if known.name == "avx2" else "avx512vnni"]


def test_one_module_asks_about_the_processor() -> None:
    question = re.compile(r"/proc/cpuinfo\"|torch\.cpu\._|mkldnn\._is|get_cpu_capability|HWCAP")
    asking = [
        path.relative_to(ROOT).as_posix()
        for folder in ("base", "bench", "cli", "engine", "package", "quant", "tools")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if question.search(path.read_text(encoding="utf-8"))
    ]
    assert asking == ["base/processor.py"]

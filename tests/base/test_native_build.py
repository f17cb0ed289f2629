"""Compiling the C kernels: the cache, its keys, and the ways in which there is no compiler."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import pytest
from llmopt.base import build, processor
from llmopt.base.errors import BadInput

from ..support.native_paths import native_paths

SOURCE = "int llmopt_answer(void) { return 42; }\n"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if build.shutil.which("cc") is None:
        pytest.skip("no C compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    file = tmp_path / "answer.c"
    file.write_text(SOURCE)
    return file


def test_a_library_is_compiled_once_and_anew_when_anything_changes(source: Path) -> None:
    first = build.compiled(source, ())
    assert first.parent == build.cache_folder()
    written = first.stat().st_mtime_ns
    assert build.compiled(source, ()) == first
    assert first.stat().st_mtime_ns == written
    other_options = build.compiled(source, ("-mavx2",))
    header = source.with_name("part.h")
    header.write_text("/* a part */\n")
    assert build.compiled(source, ()) == first, "a header that it does not include"
    source.write_text('#include "part.h"\n' + SOURCE)
    other_source = build.compiled(source, ())
    header.write_text("/* new */\n")
    other_header = build.compiled(source, ())
    assert len({first, other_options, other_source, other_header}) == 4
    assert build.ctypes.CDLL(str(other_header)).llmopt_answer() == 42
    assert len(list(first.parent.iterdir())) == 4, "nothing half-made remains"


def test_a_broken_source_leaves_one_line_and_no_file(source: Path) -> None:
    source.write_text("int broken(")
    with pytest.raises(build.BuildFailed, match=r"^the C compiler failed: .*error.*$"):
        build.compiled(source, ())
    assert not list(build.cache_folder().iterdir())


def test_without_a_compiler_the_reason_says_so(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -O9")
    with pytest.raises(build.BuildFailed, match=r"there is no C compiler \(no-such-compiler\)"):
        build.compiled(source, ())


def test_a_home_that_cannot_be_written(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_the_way = source.with_name("file")
    in_the_way.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(in_the_way))
    assert build.ctypes.CDLL(str(build.compiled(source, ()))).llmopt_answer() == 42


def test_processes_that_start_together_all_find_it(source: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: build.compiled(source, ()), range(8)))
    assert len(set(found)) == 1
    assert build.ctypes.CDLL(str(found[0])).llmopt_answer() == 42
    assert len(list(build.cache_folder().iterdir())) == 1


def test_the_variable_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(processor.VARIABLE, "avx9")
    with pytest.raises(BadInput, match="LLMOPT_NATIVE=avx9: choose auto, off, avx512vnni"):
        processor.choose_path()
    monkeypatch.setattr(processor, "processor_flags", lambda: frozenset({"avx2", "fma", "f16c"}))
    monkeypatch.setenv(processor.VARIABLE, "avx512vnni")
    with pytest.raises(BadInput, match="this processor lacks avx512_vnni, avx512bw"):
        processor.choose_path()
    monkeypatch.setenv(processor.VARIABLE, "auto")
    chosen = processor.choose_path()
    assert not isinstance(chosen, str) and chosen.name == "avx2"
    monkeypatch.setattr(processor, "processor_flags", frozenset)
    assert "AVX2" in str(processor.choose_path())


def test_the_doctor_says_which_path_is_active(monkeypatch: pytest.MonkeyPatch) -> None:
    from llmopt.bench.machine.kernel_table import examine

    monkeypatch.setenv(processor.VARIABLE, "off")
    native = examine()["native"]
    assert native["path"] is None and native["reason"] == "LLMOPT_NATIVE=off"
    monkeypatch.setenv(processor.VARIABLE, "auto")
    native = examine()["native"]
    assert (native["path"] is None) != (native["reason"] is None)
    assert os.fspath(native["cache"]).endswith("llmopt/native")


SOURCES = sorted(
    file for floor in ("engine", "quant") for file in (build.HEADERS.parent / floor).rglob("*.c")
)


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_every_c_file_compiles_where_there_is_a_compiler(source: Path) -> None:
    """Where one does not, torch takes its place and only the time tells."""
    if not native_paths():
        pytest.skip("no C compiler, or no instruction path of this processor")
    assert build.native(source).reason is None


KERNELS = {
    "engine.kernels.attention.dispatch": ["native_attention"],
    "engine.kernels.elementwise.native_rows": [
        "native_layer",
        "native_rows",
        "native_advance",
        "native_argmax",
    ],
    "engine.kernels.linear.hadamard_linear": [
        "native_trellis",
        "native_trellis_integer",
    ],
    "engine.kernels.linear.native_linear": ["native_lookup", "native_linear"],
    "engine.kernels.linear.linear": ["native_few_rows"],
    "engine.kernels.moe.dispatch": ["native_experts"],
    "quant.kinds.ggml.tensor": ["native_codes"],
    "quant.kinds.trellis.viterbi": ["native_viterbi"],
}


@pytest.mark.parametrize("module", KERNELS)
def test_every_kernel_compiles_where_there_is_a_compiler(module: str) -> None:
    """Their own tests are skipped where a kernel is not there, for whatever reason."""
    if not native_paths():
        pytest.skip("no C compiler, or no instruction path of this processor")
    loaded = import_module(f"llmopt.{module}")
    assert [getattr(loaded, name)().reason for name in KERNELS[module]] == [None] * len(
        KERNELS[module]
    )

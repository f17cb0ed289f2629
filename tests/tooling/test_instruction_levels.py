"""Levels at which the tests are repeated, and the machine without a compiler."""

from __future__ import annotations

import shutil
from pathlib import Path

from llmopt.quant.base.processor import PATHS

from tools.instruction_levels import levels, path_without_compilers

FLAGS = {path.name: path.needs for path in PATHS}


def test_levels_that_a_processor_lacks_are_named() -> None:
    here, notes = levels(FLAGS["avx512vnni"])
    assert here == ["avx512vnni", "avx2"]
    assert notes[0] == "avxvnni: not run, this processor lacks avx_vnni"
    assert "avx512vnni: this processor's own" in notes[1] and "amx_int8" in notes[1]
    here, notes = levels(FLAGS["avx2"])
    assert here == ["avx2"] and [note.partition(":")[0] for note in notes] == [
        "avx512vnni",
        "avxvnni",
        "avx2",
    ]
    assert levels(FLAGS["i8mm"])[0] == ["i8mm", "dotprod", "neon"]


def test_no_name_of_a_compiler_is_left_on_the_path(tmp_path: Path) -> None:
    both, plain, links = (tmp_path / name for name in ("both", "plain", "links"))
    for folder in (both, plain, links):
        folder.mkdir()
    names = ("cc", "gcc-12", "x86_64-linux-gnu-gcc-12", "clang++", "git", "gcov")
    for file in (*(both / name for name in names), plain / "node"):
        file.write_text("#!/bin/sh\n")
        file.chmod(0o755)
    path = path_without_compilers(f"{both}:{plain}:{tmp_path / 'none'}", links)
    assert [name for name in names if shutil.which(name, path=path)] == ["git", "gcov"]
    assert path.endswith(f":{plain}")

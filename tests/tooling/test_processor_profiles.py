"""Settings in which the tests are repeated, and the machine without a compiler."""

from __future__ import annotations

import shutil
from pathlib import Path

from llmopt.base.processor import PATHS, PROFILES

from tools.processor_profiles import (
    DEFAULT,
    NO_COMPILER,
    left_out,
    path_without_compilers,
    settings,
)

PATH_FLAGS = {path.name: path.needs for path in PATHS}
PROFILE_FLAGS = {known.name: known.flags for known in PROFILES}


def test_settings_that_a_processor_lacks_are_named() -> None:
    environments, notes = settings(PROFILE_FLAGS["avx512"])
    assert set(environments) == {"generic", "avx2", "avx512", "avx512vnni", NO_COMPILER}
    assert environments["avx2"] == {"LLMOPT_CPU": "avx2"}, "the profile, not the path alone"
    assert environments["avx512vnni"] == {"LLMOPT_NATIVE": "avx512vnni"}
    assert "avxvnni: not run, this processor lacks avx_vnni" in notes
    assert "avx512_bf16: not run, this processor lacks avx512_bf16" in notes
    assert {"generic", NO_COMPILER} <= set(settings(frozenset())[0])
    assert set(settings(PATH_FLAGS["i8mm"])[0]) == {"i8mm", "dotprod", "neon", NO_COMPILER}
    assert set(DEFAULT) <= {*PATH_FLAGS, *PROFILE_FLAGS, NO_COMPILER}


def test_a_profile_that_takes_nothing_from_a_processor_is_the_processor() -> None:
    zen3 = PROFILE_FLAGS["avx2"] | {"sse4_1", "vaes", "sha_ni"}
    assert not left_out("avx2", zen3)
    assert left_out("avx2", zen3 | {"avx_vnni"}) == {"avx_vnni"}
    assert "avx512_bf16" in left_out("avx2", PROFILE_FLAGS["amx"])
    assert not left_out("amx", PROFILE_FLAGS["amx"])


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

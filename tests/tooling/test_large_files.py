"""No tracked file is larger than code hosts and clones take well; commit hooks are the commands of `make lint`."""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml

from tools import large_files
from tools.large_files import ALLOWED, MAX_BYTES, ROOT

HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]


def test_no_tracked_file_is_large() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    assert list(large_files.too_large(large_files.tracked())) == []


def test_what_is_allowed_is_there_and_needs_it() -> None:
    assert all((ROOT / name).stat().st_size > MAX_BYTES for name in ALLOWED)


def test_the_hook_refuses_a_large_file() -> None:
    """By the command of .pre-commit-config.yaml, with a file's name after it as pre-commit does."""
    [entry] = [hook["entry"] for hook in HOOKS if hook["id"] == "large-files"]
    command = [sys.executable, *entry.split()[1:]]
    path = ROOT / "build" / "large-file-of-a-test.bin"
    path.parent.mkdir(exist_ok=True)
    try:
        path.write_bytes(b"")
        subprocess.run([*command, path], cwd=ROOT, check=True)
        with path.open("wb") as file:
            file.truncate(MAX_BYTES + 1)
        refused = subprocess.run([*command, path], cwd=ROOT, capture_output=True, text=True)
    finally:
        path.unlink()
    assert refused.returncode == 1
    assert refused.stdout.startswith("build/large-file-of-a-test.bin: 1.0 MB, the limit is 1 MB")


def test_a_measured_record_has_a_limit_of_its_own() -> None:
    path = ROOT / "docs" / "measured" / "record-of-a-test.json"
    try:
        path.write_bytes(b" " * 300_001)
        assert list(large_files.too_large([path])) == [
            "docs/measured/record-of-a-test.json: 300 kB, the limit of a record is 300 kB: keep what "
            "documents take from it"
        ]
    finally:
        path.unlink()


def test_the_commit_hooks_are_the_commands_of_make_lint() -> None:
    done = subprocess.run(
        ["make", "--silent", "--dry-run", "--old-file=.venv/installed", "lint"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith(".venv/bin/")]
    assert [hook["entry"] for hook in HOOKS] == lines

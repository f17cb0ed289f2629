"""What `llmopt deploy` writes passes the programs that own its formats, where they are installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.lint_deploy import LINTERS, Linter, report, write_deployments

PROGRAMS = [linter.program for linter in LINTERS]
FAULTS = {
    "hadolint": ("llmopt/docker/Dockerfile.cpu", "RUN apt-get install curl\n"),
    "promtool": ("vllm/compose/rules.yml", "- name: more\n  rules:\n  - {alert: X, expr: sum(}\n"),
    "kubernetes-validate": ("vllm/kubernetes/service.yaml", "extra: 1\n"),
}


@pytest.fixture
def deployments(tmp_path: Path) -> Iterator[Path]:
    write_deployments(tmp_path)
    yield tmp_path


@pytest.mark.parametrize("linter", LINTERS, ids=PROGRAMS)
def test_it_has_no_complaint_and_sees_a_fault(
    linter: Linter, deployments: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if linter.path is None:
        pytest.skip(f"needs {linter.program}: {linter.install}")
    assert report(linter, deployments, require=True), capsys.readouterr().out
    path, fault = FAULTS[linter.program]
    capsys.readouterr()
    with (deployments / path).open("a") as file:
        file.write(fault)
    assert not report(linter, deployments, require=True)
    assert f"{linter.program} {path}: ok" not in capsys.readouterr().out


def test_a_program_that_is_missing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = Linter("no-such-linter", "pip install it", lambda _: iter(()))
    assert report(missing, tmp_path, require=False)
    assert not report(missing, tmp_path, require=True)
    assert "no-such-linter: skipped, it is not here: pip install it" in capsys.readouterr().out

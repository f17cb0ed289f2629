"""Pytest plugin: coverage of the product by the test that ran it, in the processes that tests start as well.

`python -m tools.suite_coverage record` runs it. A context is the node id of a test; what a fixture of a
module or session runs has the context of the test file alone, because all tests of the file depend on it.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest

from tools.structure import FLOORS

# A process that a test starts reads this when it starts: the test is its context.
SETTINGS = """[run]
data_file = {data}
parallel = true
source = {source}
context = ${{PYTEST_CURRENT_TEST-}}
patch = fork, _exit
disable_warnings = no-data-collected, module-not-imported, already-imported, couldnt-parse
"""


class Contexts:
    """The running measurement of a pytest process."""

    def __init__(self, root: Path) -> None:
        data, source = root / "build/coverage/data", ", ".join(str(root / name) for name in FLOORS)
        settings = Path(tempfile.mkstemp(suffix=".coveragerc")[1])
        settings.write_text(SETTINGS.format(data=data, source=source), encoding="utf-8")
        os.environ["COVERAGE_PROCESS_START"] = str(settings)
        self.settings = settings
        self.coverage = coverage.Coverage(config_file=str(settings), context="")
        self.coverage.start()

    @contextlib.contextmanager
    def context(self, name: str) -> Iterator[None]:
        outer = self.coverage.switch_context(name)
        yield
        self.coverage.switch_context(outer or "")

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        with self.context(item.nodeid):
            yield

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
        test = request._pyfuncitem.nodeid
        with self.context(test if fixturedef.scope == "function" else test.partition("::")[0]):
            yield

    def pytest_unconfigure(self) -> None:
        self.coverage.stop()
        self.coverage.save()
        self.settings.unlink()


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("numprocesses", None):  # a worker of xdist, or the only process
        config.pluginmanager.register(Contexts(config.rootpath), "coverage contexts")


def measure_forked_process() -> None:
    """In a fork of a measured process: go on in the context of the test that forked it."""
    if (inherited := coverage.Coverage.current()) is not None:
        inherited.stop()
    coverage.process_startup(force=True)

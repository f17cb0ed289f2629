"""The environment of a server that is started for a benchmark."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from llmopt.base.processor import OPENMP_SPINS
from llmopt.bench.load import started_server
from llmopt.bench.options.options import BenchOptions


class Started(Exception):
    """A server was started; its environment."""


def test_a_server_does_not_inherit_the_bound_of_the_spins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", OPENMP_SPINS)

    def start(command: list[str], **given: Any) -> None:
        raise Started(given["env"])

    monkeypatch.setattr(started_server, "version_of", lambda command: None)
    monkeypatch.setattr(
        started_server, "subprocess", SimpleNamespace(Popen=start, STDOUT=-2, DEVNULL=-3)
    )
    options = BenchOptions(serve="llmopt", serve_program=sys.executable, model="stories260K")
    with pytest.raises(Started) as raised, started_server.served(options):
        pass
    assert raised.value.args[0] == {
        name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"
    }

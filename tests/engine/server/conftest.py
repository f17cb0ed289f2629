"""Servers and the offline model that they are compared with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from llmopt.engine import LLM
from llmopt.engine.server.protocol.server_options import ServerOptions

from ...support.live_server import RunningServer, make_engine, running


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    with running(make_engine()) as it:
        yield it


@pytest.fixture(scope="session")
def llm() -> LLM:
    """The same model offline, to compare with."""
    return LLM("stories3M", dtype="float32", num_threads=1)


@pytest.fixture
def fragile_server() -> Iterator[RunningServer]:
    """One that a test may break."""
    with running(make_engine("stories260K")) as it:
        yield it


@pytest.fixture
def protected_server() -> Iterator[RunningServer]:
    with running(make_engine("stories260K"), ServerOptions(api_keys=("sesame",))) as it:
        yield it

"""`-p tools.jitter.plugin --jitter-seed 1`: stall the process at random, and let `perf_counter` drift.

A test that passes only on a quiet machine fails here. The seed and the test's name determine the stalls, so a
test that failed can be run again by itself. The drift also depends on the time since the machine's start,
which all processes of a test share. `make test-jitter SEED=1,2,3` adds busy processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from .clock import JITTER, patch_asyncio_sleep, patch_sockets, patch_time

VARIABLE = "LLMOPT_JITTER_SEED"

patch_time()
patch_sockets()
patch_asyncio_sleep()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--jitter-seed", type=int, default=0, help="seed of the stalls and of the drift"
    )


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    seed = early_config.known_args_namespace.jitter_seed
    JITTER.drift(seed)
    # Python reads `sitecustomize` of this folder at the start of every subprocess.
    folders = [str(Path(__file__).parent / "processes"), os.environ.get("PYTHONPATH", "")]
    if os.environ.get(VARIABLE) is None:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    os.environ[VARIABLE] = str(seed)


def pytest_report_header(config: pytest.Config) -> str:
    return f"jitter: --jitter-seed {config.getoption('jitter_seed')}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    JITTER.begin(item.config.option.jitter_seed, item.nodeid)
    JITTER.stall("test")
    return (yield)


def pytest_unconfigure() -> None:
    JITTER.end()

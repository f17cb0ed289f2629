"""`-p tests.support.random_order --order-seed 7`: files in a random order, and the tests of each file too.

A file's tests stay together, so that its fixtures are made once and xdist's `loadfile` keeps the order.
"""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--order-seed", type=int, default=0, help="seed of the random order of tests")


def pytest_report_header(config: pytest.Config) -> str:
    return f"random order: --order-seed {config.getoption('order_seed')}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    draw = random.Random(config.getoption("order_seed"))
    files: dict[Path, list[pytest.Item]] = defaultdict(list)
    for item in items:
        files[item.path].append(item)
    order = list(files.values())
    draw.shuffle(order)
    for tests in order:
        draw.shuffle(tests)
    items[:] = [item for tests in order for item in tests]

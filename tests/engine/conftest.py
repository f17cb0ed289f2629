"""Every engine starts on caches of NaN: a kernel that weighs what no token wrote, with 0 too, changes tokens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..support.unwritten_memory import fill_new_memory_with_nan


@pytest.fixture(scope="session", autouse=True)
def unwritten_memory_is_nan() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        fill_new_memory_with_nan(patch)
        yield

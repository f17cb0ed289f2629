"""Charts as readers get them."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def quick_reports() -> None:
    """Leave everything as it is."""

"""Pytest plugin: the tests of the C kernels, on every path of an emulated aarch64.

`python -m pytest -p tests.support.aarch64_plugin tests/engine/kernels/test_native_linear.py ...`
"""

from __future__ import annotations

import gc

import pytest

from .emulated_kernels import missing, pretend_aarch64

_patch = pytest.MonkeyPatch()


def pytest_configure() -> None:
    """Before test modules ask for the processor's paths."""
    if missing() is None:
        pretend_aarch64(_patch)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip everything where the emulation is not installed; the reason names what is missing."""
    reason = missing()
    for item in items if reason else []:
        item.add_marker(pytest.mark.skip(reason=str(reason)))
    gc.collect()
    gc.freeze()  # objects so far hold no memory of a call


def pytest_unconfigure() -> None:
    """This processor again."""
    _patch.undo()

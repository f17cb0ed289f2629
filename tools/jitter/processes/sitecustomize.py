"""Jitter in a subprocess of a test: only its clocks and sleeps, so that it starts as fast as before.

A worker of pytest-xdist is no subprocess of a test; it loads the plugin itself.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

seed, test = os.environ.get("LLMOPT_JITTER_SEED"), os.environ.get("PYTEST_CURRENT_TEST")
if seed is not None and test is not None:
    path = Path(__file__).resolve().parents[1] / "clock.py"
    spec = importlib.util.spec_from_file_location("llmopt_jitter_clock", path)
    assert spec is not None and spec.loader is not None
    clock = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(clock)
    clock.patch_time()
    clock.JITTER.drift(int(seed))
    clock.JITTER.begin(int(seed), test)

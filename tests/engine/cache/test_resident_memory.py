"""Resident memory of a process with an engine: pages of the KV cache come with the tokens that are written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from llmopt.recipes import MODELS

MIB = 2**20
STARTED = """
import json, os, sys
from pathlib import Path
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.engine import Engine

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def start(**options):
    return Engine(EngineConfig(sys.argv[1], device="cpu", num_threads=1, **options))

start(num_blocks=4)
before = resident()
engine = start(kv_cache_memory_bytes=2**31, kv_cache_dtype=sys.argv[2])
started = resident()
engine.add_request("0", [3] * 200, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
while engine.has_unfinished():
    engine.step()
print(json.dumps([engine.memory.kv_cache_bytes, started - before, resident() - before]))
"""


@pytest.mark.sweep(1)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident pages are Linux's")
@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_a_start_and_a_request_commit_a_sliver_of_the_kv_cache(dtype: str) -> None:
    command = [sys.executable, "-c", STARTED, str(MODELS / "stories3M"), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    cache, started, used = json.loads(done.stdout)
    assert cache > 2000 * MIB
    # Weights of 6 MiB packed anew, a null block and one request's; with huge pages 2 MiB for each tensor.
    assert started < 128 * MIB and used < 160 * MIB

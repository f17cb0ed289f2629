"""Pages of the KV cache that the kernel has committed: they come with the tokens that are written."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from llmopt.recipes import MODELS

MIB = 2**20
STARTED = """
import ctypes, json, mmap, sys
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine

mincore = ctypes.CDLL(None, use_errno=True).mincore

def committed(tensor):
    first = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.nbytes - first
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    if mincore(ctypes.c_void_p(first), ctypes.c_size_t(size), pages):
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(page & 1 for page in bytes(pages)) * mmap.PAGESIZE

def cache_bytes():
    return sum(map(committed, parts))

engine = Engine(EngineConfig(
    sys.argv[1], device="cpu", num_threads=1, kv_cache_memory_bytes=2**31, kv_cache_dtype=sys.argv[2]
))
parts = [
    part for layer in engine.runner.cache.layers
    for paged in (layer.keys, layer.values) for part in paged.parts
]
started = cache_bytes()
engine.add_request("0", [3] * 200, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
while engine.has_unfinished():
    engine.step()
used = cache_bytes()
parts[0].zero_()
print(json.dumps([engine.memory.kv_cache_bytes, len(parts), started, used, committed(parts[0])]))
"""


@pytest.mark.sweep(1)
@pytest.mark.skipif(sys.platform != "linux", reason="pages are committed at first use on Linux")
@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_a_start_and_a_request_commit_a_sliver_of_the_kv_cache(dtype: str) -> None:
    command = [sys.executable, "-c", STARTED, str(MODELS / "stories3M"), dtype]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    cache, num_tensors, started, used, written = json.loads(finished.stdout)
    assert cache > 2000 * MIB
    # A null block and the blocks of one request; with huge pages at most three of 2 MiB for each tensor.
    most = num_tensors * 6 * MIB
    assert started <= used <= most < cache / 10
    assert used > 0 and written > most / num_tensors, "pages that are written are counted"

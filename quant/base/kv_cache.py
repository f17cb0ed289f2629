"""The dtypes of a KV cache that a checkpoint is made for, without torch."""

from __future__ import annotations

from typing import Literal

# The largest magnitude of each KV-cache dtype whose scales servers read from a checkpoint. vLLM refuses a
# stored int8 scheme (`validate_kv_cache_scheme`) and measures its int8 scales itself, per token and head.
LARGEST = {"fp8": 448.0}
INT8_CACHE = "int8"
KvStrategy = Literal["tensor", "attn_head"]  # as compressed-tensors calls them

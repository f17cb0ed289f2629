"""Names that options take, checked without torch: devices, KV-cache dtypes; the offer of a near one."""

from __future__ import annotations

import re
from collections.abc import Collection
from difflib import get_close_matches
from typing import Literal

from .errors import BadInput

KINDS = ("cpu", "cuda")
# The largest magnitude of each KV-cache dtype whose scales servers read from a checkpoint. vLLM refuses a
# stored int8 scheme (`validate_kv_cache_scheme`) and measures its int8 scales itself, per token and head.
LARGEST = {"fp8": 448.0}
INT8_CACHE = "int8"
KvStrategy = Literal["tensor", "attn_head"]  # as compressed-tensors calls them


def offer(name: str, known: Collection[str]) -> str:
    """The second half of a refusal: the known names most like `name`, if any is, and all of them."""
    near = get_close_matches(name, known, n=2, cutoff=0.6)
    start = f"the nearest is {' or '.join(near)}; " if near else ""
    return f"{start}choose one of {', '.join(known)}"


def device_names(asked: str) -> tuple[str, ...]:
    """The names in `--device`, which has commas between them.

    Raises:
        BadInput: one of them is the name of no device.
    """
    names = tuple(name.strip() for name in asked.split(","))
    for name in names:
        if not re.fullmatch(rf"({'|'.join(KINDS)})(:(0|[1-9][0-9]?))?", name):
            raise BadInput(f"--device {name}: choose cpu, cuda or cuda:N")
    return names

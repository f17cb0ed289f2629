"""Raw reader of EXL3: packed trellises and the scales around them."""

from __future__ import annotations

from typing import Any

import numpy as np

from .container import Array, Entries, Raw, read_array

_BLOCK = 128
_MULTIPLIERS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}


def read_exl3(entries: Entries, module: str, config: dict[str, Any]) -> Raw:
    """exllamav3's layout: int16 `[in / 16, out / 16, 16 * bits]` between float16 scales of both sides."""
    trellis = read_array(entries[f"{module}.trellis"], "I16")
    scales = [read_array(entries[f"{module}.{name}"], "F16") for name in ("suh", "svh")]
    sides = tuple(16 * tiles for tiles in trellis.shape[:2])
    if trellis.ndim != 3 or trellis.shape[2] not in range(16, 129, 16):
        raise ValueError(f"a trellis of {trellis.shape}")
    if any(scale.shape != (side,) for scale, side in zip(scales, sides, strict=True)):
        raise ValueError(f"scales of {scales[0].shape} and {scales[1].shape} do not fit {sides}")
    problems = [f"has {side} channels, no whole blocks of 128" for side in sides if side % _BLOCK]
    for name, multiplier in _MULTIPLIERS.items():
        mark = entries.get(f"{module}.{name}")
        if mark is not None and int(read_array(mark, "I32").reshape(())) != multiplier:
            problems.append(f"has another multiplier than {name}'s {multiplier:#x}")
    stored = (config.get("tensor_storage") or {}).get(module) or {}
    said = stored.get("bits_per_weight", trellis.shape[2] // 16)
    if said != trellis.shape[2] // 16:
        problems.append(f"has {trellis.shape[2] // 16} bits a weight, and {said} in the config")
    parts: dict[str, Array] = {"trellis": trellis, "suh": scales[0], "svh": scales[1]}
    numbers = {name: parts[name].astype(np.float32) for name in ("suh", "svh")}
    return Raw(parts, numbers, (sides[1], sides[0]), tuple(problems))

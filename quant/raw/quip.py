"""Raw reader of QuIP-for-all's layout: E8P codes, signs with scales, and the odd factors of transforms."""

from __future__ import annotations

from typing import Any

import numpy as np

from .container import Array, Entries, Floats, Raw, read_array, read_numbers

_BYTES = {"E8P12": 2, "E8P12RVQ3B": 3, "E8P12RVQ4B": 4}


def read_quip(entries: Entries, module: str, config: dict[str, Any]) -> Raw:
    """`Qidxs` of 2, 3 or 4 bytes for 8 weights: a residual before the code, little-endian."""
    codebook = config.get("codebook")
    if codebook not in _BYTES:
        raise ValueError(f"a codebook {codebook!r}")
    length = _BYTES[codebook]
    words = read_array(entries[f"{module}.Qidxs"], "I16" if length == 2 else "I32")
    stored = {name: read_array(entries[f"{module}.{name}"], "F16") for name in ("SU", "SV")}
    outputs, inputs = len(stored["SV"]), len(stored["SU"])
    if words.shape[0] != outputs or words.nbytes * 8 != outputs * inputs * length:
        raise ValueError(f"Qidxs of {words.shape} do not fit {outputs} × {inputs} weights")
    octets = np.frombuffer(words.tobytes(), dtype=np.uint8).reshape(outputs, inputs // 8, length)
    codes, residual = octets[..., length - 2 :], octets[..., : length - 2]
    parts: dict[str, Array] = {"codes": np.ascontiguousarray(codes).view("<i2")[..., 0]}
    if length > 2:
        residual = np.ascontiguousarray(residual)
        parts["residual"] = (residual.view("<i2") if length == 4 else residual)[..., 0]
    numbers: dict[str, Floats] = {}
    for name, part in (("SU", "su"), ("SV", "sv")):
        parts[part], numbers[part] = stored[name], stored[name].astype(np.float32)
    _, scale = read_numbers(entries[f"{module}.Wscale"])
    parts["scale"] = numbers["scale"] = scale
    problems = []
    for name, width in (("left", inputs), ("right", outputs)):
        odd = width // (width & -width)
        if odd > 1:
            _, factor = read_numbers(entries[f"{module}.had_{name}"])
            parts[name] = numbers[name] = factor
            if factor.shape != (odd, odd):
                problems.append(f"has a {name} factor of {factor.shape}, not of order {odd}")
            elif np.abs(factor @ factor.T - np.eye(odd)).max() > 0.01:
                problems.append(f"has a {name} factor that is not orthogonal")
    return Raw(parts, numbers, (outputs, inputs), tuple(problems))

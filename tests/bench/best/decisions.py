"""Decisions of `llmopt best` by their schema, for tests of the page: two lanes, a front of each, six finalists."""

from __future__ import annotations

import math
from typing import Any

ROLES = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
LANES = {
    "compressed-tensors int": (
        "compressed-tensors",
        ["int3 g128", "int4 g64", "int4 g128", "int8"],
    ),
    "compressed-tensors fp": ("compressed-tensors", ["nvfp4", "fp8"]),
}
WEIGHTS = 134_000_000


def layers_of(kinds: list[str], bits: float, num_layers: int) -> dict[str, str]:
    """A kind for each linear: the higher the bits, the more of the first and last layers get more."""
    low, high = kinds[min(int(bits - 3), len(kinds) - 2)], kinds[-1]
    found = {}
    for layer in range(num_layers):
        for place, role in enumerate(ROLES):
            distance = min(layer, num_layers - 1 - layer) + place / 2
            found[f"model.layers.{layer}.{role}"] = high if distance < bits - 3 else low
    return found | {"lm_head": kinds[-1]}


def a_point(lane: str, bits: float, num_layers: int) -> dict[str, Any]:
    """A point of a front as the planner and the solver expect it."""
    kl = 1.6 * math.exp(-1.35 * bits) * (1.15 if lane.endswith("fp") else 1.0)
    tpot = 4.1 * bits + (3.0 if lane.endswith("int") else 0.5)
    breaks = [f"tpot {tpot:.1f} ms > 20 ms"] if tpot > 20 else []
    if kl > 0.02:
        breaks.append(f"kl {kl:.4f} > 0.02")
    return {
        "id": f"{'int' if lane.endswith('int') else 'fp'}-{bits:.2f}",
        "lane": lane,
        "label": f"{7 * num_layers - 4} {LANES[lane][1][-2]}, 5 {LANES[lane][1][-1]}",
        "bytes": int(WEIGHTS * bits / 8),
        "bits_per_weight": bits,
        "expected_kl": kl,
        "kl_band": [kl * 0.8, kl * 1.3],
        "speed": {
            "tpot_ms": tpot,
            "ttft_ms": 310.0 + tpot,
            "tokens_per_s": 32_000 / tpot,
            "band": [tpot * 0.87, tpot * 1.13],
            "source": "planned",
        },
        "keeps": not breaks,
        "breaks": breaks,
        "layers": layers_of(LANES[lane][1], bits, num_layers),
        "finalist": False,
    }


def interval(value: float, share: float = 0.12) -> dict[str, float]:
    return {"value": value, "low": value * (1 - share), "high": value * (1 + share)}


def a_finalist(point: dict[str, Any], place: int) -> dict[str, Any]:
    """The point as measured, near what was expected."""
    point["finalist"] = True
    kl = point["expected_kl"] * (0.92, 1.1, 1.02, 0.97)[place % 4]
    text = (
        "llmopt quantize meta-llama/Llama-3.1-8B-Instruct --method auto --format compressed-tensors"
    )
    text += f" --target-size {point['bytes']} --stats out/stats --output out/{point['id']}"
    domains = {
        "prose": 0.8,
        "code": 0.7,
        "mathematics": 0.9,
        "chat": 1.2,
        "German": 1.5,
        "Chinese": 1.9,
    }
    return {
        "id": point["id"],
        "folder": f"out/{point['id']}",
        "rebuild": text,
        "serve": f"vllm serve out/{point['id']} --max-model-len 32768 --max-num-seqs 32",
        "kl": interval(kl),
        "top1": interval(1 - 2.5 * kl, 0.006),
        "flips": interval(1.1 * kl, 0.4),
        "kl_by_domain": {name: interval(kl * factor) for name, factor in domains.items()},
        "bytes": point["bytes"],
        "speed": point["speed"],
        "keeps": point["keeps"],
        "breaks": point["breaks"],
    }


def a_decision(num_layers: int = 16, **changed: Any) -> dict[str, Any]:
    """A decision that found a checkpoint; `changed` replaces keys of its top."""
    steps = [3.0 + 0.25 * step for step in range(9)]
    front = [a_point(lane, bits, num_layers) for lane in LANES for bits in steps]
    by_id = {point["id"]: point for point in front}
    chosen = ("int-3.25", "int-3.50", "int-3.75", "int-4.00", "fp-4.00", "fp-4.75")
    finalists = [a_finalist(by_id[name], place) for place, name in enumerate(chosen)]
    usual = a_point("compressed-tensors int", 4.25, num_layers) | {"id": "awq-int4", "lane": "awq"}
    usual |= {"label": "awq int4"}
    finalists.append(a_finalist(usual, len(finalists)))
    front.append(usual | {"expected_kl": None, "kl_band": None})
    recommended = by_id["int-3.75"]
    decision = {
        "llmopt": "2.0.0",
        "schema": "llmopt-decision-1",
        "asked": {
            "model": "meta-llama/Llama-3.1-8B-Instruct",
            "hardware": {"name": "h100", "kind": "gpu", "count": 1},
            "context": 32768,
            "concurrency": 32,
            "request_rate": None,
            "slo": {"tpot": 20.0, "ttft": 1000.0},
            "size_bytes": None,
            "loads_in": "vllm",
            "promises": [{"metric": "kl", "op": "<=", "limit": 0.02, "relative": False}],
        },
        "lanes": [
            {"name": name, "format": form, "kinds": kinds, "kv_dtype": "auto", "refused": None}
            for name, (form, kinds) in LANES.items()
        ]
        + [
            {
                "name": "gguf",
                "format": "gguf",
                "kinds": ["Q4_K", "Q6_K"],
                "kv_dtype": "auto",
                "refused": "vLLM reads GGUF files of one type alone",
            }
        ],
        "front": front,
        "finalists": finalists,
        "usual": [
            {
                "name": "awq int4",
                "id": "awq-int4",
                "breaks": usual["breaks"],
                "why": "; ".join(usual["breaks"]),
            },
            {
                "name": "fp8",
                "id": None,
                "breaks": ["tpot 33.3 ms > 20 ms"],
                "why": "It decodes too slowly.",
            },
        ],
        "by_load": [
            {"clients": "1", "id": "int-3.75", "tokens_per_s": 120.0},
            {"clients": "full", "id": "fp8", "tokens_per_s": 9000.0},
        ],
        "recommended": recommended["id"],
        "next_smaller": "int-3.50",
        "next_better": "int-4.00",
        "closest": None,
        "saving": 0.0125,
        "stopped": None,
        "so_far": None,
        "exit_code": 0,
        "sentence": "int-3.75 keeps KL <= 0.02 (0.0098 to 0.0124) and decodes in 18.4 ms of 20.",
    }
    return decision | changed

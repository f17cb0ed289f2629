"""Comparability of two runs: which facts must be equal, which may differ, and bytes of weights as served."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

IDENTITY_KEYS = {
    "workload_sha256": "the workloads differ",
    "load": "the load settings differ",
    "target": "the targets differ",
    "engine": "the engine options differ",
    "device": "the devices differ",
    "machine": "the machines differ",
}
SERIES_KEYS = (*IDENTITY_KEYS, "quantization", "dtype")
# Facts of the hardware (`machine.hardware`), compared one by one: a fact that one side lacks is unknown, not
# another. Results from before they were recorded have none.
HARDWARE = "hardware"
CLOCK_TOLERANCE = 0.05


def incomparable(base: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Why these two runs did not do the same work under the same conditions; empty if they did."""
    identities = base["llmopt"]["identity"], new["llmopt"]["identity"]
    reasons = []
    for key, words in IDENTITY_KEYS.items():
        before, after = (identity[key] for identity in identities)
        if before == after:
            continue
        if isinstance(before, Mapping):
            names = [name for name in before if before.get(name) != after.get(name)]
            detail = ", ".join(f"{n}: {before.get(n)} and {after.get(n)}" for n in names)
        else:
            detail = f"{str(before)[:40]} and {str(after)[:40]}"
        reasons.append(f"{words} ({detail})")
    before, after = (identity.get(HARDWARE) or {} for identity in identities)
    differing = [
        f"{fact_words(name)}: {before[name]} and {after[name]}"
        for name in before
        if None not in (before[name], after.get(name)) and before[name] != after[name]
    ]
    if differing:
        reasons.append(f"the hardware or its settings differ ({', '.join(differing)})")
    return reasons


def unknown_facts(base: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, ...]:
    """Clauses on what of the hardware could not be compared; empty where all of it was."""
    if base["llmopt"]["run_id"] == new["llmopt"]["run_id"]:
        return ()
    identities = base["llmopt"]["identity"], new["llmopt"]["identity"]
    before, after = (identity.get(HARDWARE) for identity in identities)
    if before is None and after is None:
        return ("the hardware is unknown: neither result says what it ran on",)
    if before is None or after is None:
        side = "base" if before is None else "new"
        return (f"the hardware of the {side} run is unknown: its result does not say",)
    where = "server" if identities[1]["target"] == "http" else "machine"
    clauses = []
    for name in dict.fromkeys([*before, *after]):
        sides = [s for s, known in (("base", before), ("new", after)) if known.get(name) is None]
        if sides:
            runs = "both runs" if len(sides) == 2 else f"the {sides[0]} run"
            clauses.append(f"the {where}'s {fact_words(name)} is unknown in {runs}")
    return tuple(clauses)


def clock_change(base: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """The GPU's clocks right after the runs, where they differ by more than 5 %: heat, or another setting."""
    clocks = []
    for result in (base, new):
        state = (result["llmopt"].get("environment") or {}).get("after") or {}
        clocks.append((state.get("gpu") or {}).get("sm_mhz"))
    if not all(clocks) or abs(clocks[1] / clocks[0] - 1) <= CLOCK_TOLERANCE:
        return None
    return f"the GPU's SM clock was {clocks[0]} MHz after the base run and {clocks[1]} after the new one"


def fact_words(name: str) -> str:
    """`gpu_power_limit_watts` as `GPU power limit watts`."""
    return name.replace("_", " ").replace("gpu", "GPU").replace("cpu", "CPU")


def server_changes(base: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Differences in what the servers say of themselves: an upgrade may be the very thing to compare."""
    before, after = (result["llmopt"]["identity"].get("server") or {} for result in (base, new))
    return [
        f"server {name}: {before.get(name) or 'unknown'} against {after.get(name) or 'unknown'}"
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    ]


def series_identity(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an identity that the runs of a history's series share: model, workload, load, machine.

    The hash of the weights and a server's version are not in it: their changes are what a series shows. A
    model given as a path is known by its last part, so that another checkout's folder is the same model.
    """
    model = str(identity["model"])
    name = PurePath(model).name if model.startswith(("/", ".", "~")) else model
    hardware = identity.get(HARDWARE) or {}
    known = {key: value for key, value in hardware.items() if value is not None}
    return {"model": name, **{key: identity[key] for key in SERIES_KEYS}, HARDWARE: known}


def served_weight_bytes(result: Mapping[str, Any]) -> int | None:
    """Bytes of the weights; those of a model that is not quantized are at most its file's.

    A machine that needs float32 holds them in twice as many, which is no reason to quantize.
    """
    record = result["llmopt"]
    held, stored = record["memory"]["weight_bytes"], record["memory"].get("checkpoint_bytes")
    if held is None or stored is None or record["identity"].get("quantization"):
        return held
    return min(held, stored)


def weight_share(base: Mapping[str, Any], new: Mapping[str, Any]) -> float | None:
    """Bytes of new's weights over those of base's, both as served."""
    sizes = served_weight_bytes(base), served_weight_bytes(new)
    return sizes[1] / sizes[0] if sizes[0] and sizes[1] else None


def widened_words(name: str, result: Mapping[str, Any]) -> str:
    """A sentence where a model's weights were held in a wider dtype than its file's; else empty."""
    record = result["llmopt"]
    stored = record["memory"].get("checkpoint_dtype")
    if record["identity"]["quantization"] or record["identity"]["dtype"] != "float32":
        return ""
    if stored not in ("bfloat16", "float16"):
        return ""
    return (
        f"This machine ran {name} in float32, its file is in {stored}: bytes are against the file, "
        "speed against float32."
    )


def widened_notes(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """`widened_words` of each of several runs by name; none where no other is quantized."""
    if not any(result["llmopt"]["identity"]["quantization"] for result in results.values()):
        return []
    notes = (widened_words(name, result) for name, result in results.items())
    return [note for note in notes if note]

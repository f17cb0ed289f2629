"""Comparability of two runs: the conditions that must be equal, what the user varies, and bytes of weights as
served.

A field of `llmopt.identity` is on one of two lists, which docs/measuring.md shows. A field on neither is
taken for a condition, so that nothing unknown passes silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

PROMPTS = "prompts and their lengths"
ARRIVAL = "arrival or concurrency"
SAMPLING = "sampling and seeds"
MACHINE = "machine and its limits"
TOOL = "measuring tool and its formulas"
DISTURBANCE = "disturbance"
FAILURE = "a failed or truncated run"
# {condition: its fields}; `x.*` are all fields of x that no list names. Those of the last two are not of the
# identity: `gate.compare.unusable` reads them.
CONDITIONS: Mapping[str, tuple[str, ...]] = {
    PROMPTS: ("workload_sha256", "engine.backend", "shape.*"),
    ARRIVAL: ("load.*", "engine.lora_assignment", "engine.batch_size", "engine.client_workers"),
    SAMPLING: ("load.ignore_eos", "load.temperature", "load.seed", "engine.extra_body"),
    MACHINE: ("machine", "device", "hardware.*", "engine.num_threads"),
    TOOL: ("tool",),
    DISTURBANCE: ("runs.disturbed", "client.certified"),
    FAILURE: ("interrupted", "failed", "completed"),
}
VARIED: Mapping[str, tuple[str, ...]] = {
    "model file": ("model",),
    "weights": ("model_hash", "dtype", "engine.lora"),
    "format": ("quantization",),
    "kernels": ("engine.enforce_eager", "engine.overlapped_loop"),
    "activation bits": ("engine.cpu_activations",),
    "KV dtype": ("engine.kv_cache_dtype",),
    "engine and its version": ("target", "server.*", "libraries.*"),
    "engine options": ("engine.*",),
}
UNKNOWN = "fields that no list knows"
# The name of what the hash of the prompts compares.
IGNORED = ("workload",)
_PLACE = {
    **{field: (False, name) for name, fields in VARIED.items() for field in fields},
    **{field: (True, name) for name, fields in CONDITIONS.items() for field in fields},
}
WORDS = {
    "workload_sha256": "workload",
    "model_hash": "weights",
    "engine.num_threads": "threads",
    "engine.cpu_activations": "activation bits",
    "engine.kv_cache_dtype": "KV dtype",
}
SERIES_KEYS = ("workload_sha256", "load", "target", "engine", "device", "machine")
SERIES_KEYS += ("quantization", "dtype")
# Facts of the hardware, compared one by one. Results from before they were recorded have none.
HARDWARE = "hardware"
# Facts that not every target and machine has: one that a side lacks is unknown, not another.
_MAY_BE_UNKNOWN = (
    f"{HARDWARE}.",
    "libraries.",
    "shape.",
    "engine.backend",
    "engine.client_workers",
)
CLIENT = "client: "
CLOCK_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class Difference:
    """A condition that two runs do not share, and a clause on how they differ."""

    condition: str
    said: str

    def __str__(self) -> str:
        return self.said


def incomparable(base: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """The conditions in which these two runs differ, in the order of the list; empty if they did the same
    work on the same machine."""
    clauses: dict[str, list[str]] = {}
    for field, (before, after) in _differing(base, new).items():
        is_condition, name = place_of(field)
        if is_condition:
            clause = f"{field_words(field)}: {_shown(before)} and {_shown(after)}"
            clauses.setdefault(name, []).append(clause)
    return [
        Difference(name, f"not the same {name} ({', '.join(clauses[name])})")
        for name in (*CONDITIONS, UNKNOWN)
        if name in clauses
    ]


def differs_by(base: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, ...]:
    """Clauses on what was varied, which no verdict minds: `quantization: none against awq`."""
    differing = _differing(base, new)
    if "model" in differing:
        differing.pop("model_hash", None)  # another model has other weights
    clauses = []
    for field, pair in differing.items():
        if not place_of(field)[0]:
            absent = "unknown" if field.startswith("server.") else "none"
            before, after = (_shown(value, absent) for value in pair)
            clauses.append(f"{field_words(field)}: {before} against {after}")
    return tuple(clauses)


def place_of(field: str) -> tuple[bool, str]:
    """(whether a field of the identity is a condition, the name of its entry in the list)."""
    entry = _PLACE.get(field) or _PLACE.get(f"{field.partition('.')[0]}.*")
    return entry or (True, UNKNOWN)


def _differing(base: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    before, after = _fields(base), _fields(new)
    if {before.get("target"), after.get("target")} == {"in-process", "http"}:
        # Facts that an in-process run knows, and a client does not of a server's machine, are unknown.
        machines = sorted(
            (side["machine"].removeprefix(CLIENT) for side in (before, after)), key=len
        )
        if machines[1].startswith(machines[0]):  # the other one names a GPU too
            before["machine"] = after["machine"] = machines[0]
        own, served = (before, after) if after["target"] == "http" else (after, before)
        if not served.get(f"{HARDWARE}.gpu") or own["device"] != "cpu":
            own["device"] = served["device"]
    names = dict.fromkeys([*before, *after])
    pairs = {field: (before.get(field), after.get(field)) for field in names}
    return {
        field: pair
        for field, pair in pairs.items()
        if pair[0] != pair[1] and not (None in pair and field.startswith(_MAY_BE_UNKNOWN))
    }


def _fields(result: Mapping[str, Any]) -> dict[str, Any]:
    """The identity with a dotted name for each inner field, and the versions of the libraries."""
    record = result["llmopt"]
    libraries = (record.get("environment") or {}).get("libraries") or {}
    fields: dict[str, Any] = {}
    for key, value in {**record["identity"], "libraries": libraries}.items():
        if f"{key}.*" in _PLACE:
            fields |= {f"{key}.{name}": inner for name, inner in (value or {}).items()}
        elif key not in IGNORED:
            fields[key] = value
    return fields


def _shown(value: Any, absent: str = "none") -> str:
    """The value as text of at most 40 characters; a hash by its first 19."""
    text = absent if value is None else without_folders(str(value))
    return text[:19] if text.startswith("sha256") else text[:40]


def without_folders(text: str) -> str:
    return PurePath(text).name if text.startswith(("/", ".", "~")) else text


def field_words(field: str) -> str:
    """The field for readers: `threads`, `GPU driver`, `server version`, `max_num_seqs`."""
    group, _, name = field.partition(".")
    if field in WORDS or not name:
        return WORDS.get(field, field)
    if group == HARDWARE:
        return fact_words(name)
    return f"server {name}" if group == "server" else name


def unknown_facts(base: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, ...]:
    """Clauses on what of the hardware could not be compared; empty where all of it was."""
    if base["llmopt"]["run_id"] == new["llmopt"]["run_id"]:
        return ()
    imported = [run["llmopt"]["imported"] for run in (base, new) if "imported" in run["llmopt"]]
    if names := dict.fromkeys(name for run in imported for name in run["unknown"]):
        tools = " and ".join(dict.fromkeys(run["tool"] for run in imported))
        return (f"unknown, as {tools} does not say: {', '.join(names)}",)
    identities = base["llmopt"]["identity"], new["llmopt"]["identity"]
    before, after = (identity.get(HARDWARE) for identity in identities)
    if before is None or after is None:
        if before is after:
            return ("the hardware is unknown: neither result says what it ran on",)
        side = "base" if before is None else "new"
        return (f"the hardware of the {side} run is unknown: its result does not say",)
    where = "server" if identities[1]["target"] == "http" else "machine"
    unknown: dict[str, list[str]] = {}
    for name in dict.fromkeys([*before, *after]):
        sides = [s for s, known in (("base", before), ("new", after)) if known.get(name) is None]
        if sides:
            runs = "both runs" if len(sides) == 2 else f"the {sides[0]} run"
            unknown.setdefault(runs, []).append(fact_words(name))
    return tuple(
        f"the {where}'s {', '.join(names)} {'is' if len(names) == 1 else 'are'} unknown in {runs}"
        for runs, names in unknown.items()
    )


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
    return name.replace("_", " ").replace("gpu", "GPU").replace("cpu", "CPU")


def series_identity(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an identity that the runs of a series share: model, workload, load, machine. The hash of
    the weights and a server's version are not in it, because a series shows their changes. A model given as a
    path is known by its last part, so that another checkout's folder is the same model."""
    name = without_folders(str(identity["model"]))
    hardware = identity.get(HARDWARE) or {}
    known = {key: value for key, value in hardware.items() if value is not None}
    # Of a result of another tool; one of ours has neither.
    others = {key: identity[key] for key in ("tool", "shape") if key in identity}
    return {"model": name, **{key: identity[key] for key in SERIES_KEYS}, HARDWARE: known, **others}


def served_weight_bytes(result: Mapping[str, Any]) -> int | None:
    """Bytes of the weights; for a model that is not quantized at most its file's. A machine that needs
    float32 holds them in twice as many, which is no reason to quantize."""
    record = result["llmopt"]
    loaded, stored = record["memory"]["weight_bytes"], record["memory"].get("checkpoint_bytes")
    if loaded is None or stored is None or record["identity"].get("quantization"):
        return loaded
    return min(loaded, stored)


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

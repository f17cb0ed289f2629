"""Smoothing maps of a checkpoint, discovered once for a config and kept in the user's cache."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...base.atomic_io import write_atomically
from ...base.errors import BadInput
from ..families.layer_map import Fold, LayerMap
from ..families.registry import type_of
from ..model.architecture import Architecture
from ..model.checkpoint import Checkpoint
from .patterns import Shapes, family_of_pattern, starred
from .small_model import small_config, text_layers

FORMAT = 3
"""Raised whenever discovery says something else: kept answers of another format are not read."""
_SMALL_ENOUGH = 5_000_000  # parameters of a model that can be taken as it is
_FEWEST_LAYERS = 4
_NO_STRUCTURE = frozenset({"_name_or_path", "transformers_version", "architectures"})

Kind = frozenset[str]


KindMap = tuple[Kind, LayerMap]
"""The pattern of a layer of the small model; kind: names of its weights, `*` for an expert's number."""


def with_smoothing(checkpoint: Checkpoint, architecture: Architecture) -> Architecture:
    """The layers of a checkpoint with their foldable pairs; BadInput where no small model of it runs."""
    shapes = _shapes(checkpoint, architecture)
    kinds = [frozenset(map(starred, names)) for names in shapes]
    patterns = by_layer(_discovered_once(checkpoint, kinds), kinds)
    layers = tuple(
        family_of_pattern(pattern, base, weights) if pattern else base
        for pattern, base, weights in zip(patterns, architecture.layers, shapes, strict=True)
    )
    notes = architecture.notes
    if not any(family.folds for family in layers):
        notes += ("note: no layer has a pair that scales can be folded through",)
    return replace(architecture, layers=layers, notes=notes)


def attempts_and_maps(
    checkpoint: Checkpoint, architecture: Architecture
) -> tuple[list[dict[str, Any]], list[KindMap]]:
    """Configs of small models like a checkpoint's, smallest first, and the maps of one of them."""
    kinds = [frozenset(map(starred, names)) for names in _shapes(checkpoint, architecture)]
    return _attempts(checkpoint, kinds), _discovered_once(checkpoint, kinds)


def _shapes(checkpoint: Checkpoint, architecture: Architecture) -> list[Shapes]:
    """Shapes of the weights of each layer, by the relative name of their module."""
    starts = [f"{architecture.layer_prefix(index)}." for index in range(len(architecture.layers))]
    return [
        {
            name.removeprefix(start).removesuffix(".weight"): tuple(checkpoint.shape(name))
            for name in checkpoint.names
            if name.startswith(start) and name.endswith(".weight")
        }
        for start in starts
    ]


def by_layer(maps: Sequence[KindMap], kinds: Sequence[Kind]) -> list[LayerMap | None]:
    """The pattern of each layer of these kinds: by its number, or by its kind where layers were cut."""
    if len(maps) == len(kinds):
        return [pattern for _, pattern in maps]
    known = dict(reversed(maps))
    return [known.get(kind) for kind in kinds]


def _discovered_once(checkpoint: Checkpoint, kinds: Sequence[Kind]) -> list[KindMap]:
    """The maps of the first small model that runs and has all kinds, kept by config."""
    # A map depends on the config, and on how the layers lie on disk.
    structure = {k: value for k, value in checkpoint.config.items() if k not in _NO_STRUCTURE}
    layers = sorted({tuple(sorted(kind)) for kind in kinds})
    text = json.dumps([FORMAT, structure, layers], sort_keys=True, default=str)
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    path = cache_folder() / f"{key}-{version('transformers')}.json"
    if (answer := _read(path)) is not None:
        return answer
    reason: BadInput | None = None
    for raw in _attempts(checkpoint, kinds):
        try:
            maps = discovered_maps(raw)
        except BadInput as error:
            reason = error
            continue
        if len(maps) == len(kinds) or set(kinds) <= dict(maps).keys():
            _keep(path, maps)
            return maps
    raise BadInput(
        f"{checkpoint.path}: no foldable pairs can be discovered for model type "
        f"{type_of(checkpoint.config)!r}, which awq and smoothquant need"
        f"{f' ({reason})' if reason else ''}: use rtn or gptq"
    ) from reason


def _attempts(checkpoint: Checkpoint, kinds: Sequence[Kind]) -> list[dict[str, Any]]:
    """Raw configs to try: small ones with few layers and with all, then as it is if that is small."""
    from ..model.auto import read_config

    first = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
    few = max(_FEWEST_LAYERS, max(first.values()) + 1)
    raw = json.loads(read_config(checkpoint.config).to_json_string(use_diff=False))
    attempts = [small_config(raw, few)] if few < text_layers(raw) else []
    attempts.append(small_config(raw, None))
    size = sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names)
    return [*attempts, checkpoint.config] if size <= _SMALL_ENOUGH else attempts


def discovered_maps(raw: Mapping[str, Any]) -> list[KindMap]:
    """The map of each layer of the random model of a raw config; BadInput where it cannot be built or run."""
    from ..model.auto import read_config
    from .discover import discover
    from .small_model import random_model

    model = random_model(read_config(raw))
    return [
        (frozenset(map(starred, names.values())), pattern)
        for names, pattern in zip(model.names, discover(model), strict=True)
    ]


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "llmopt" / "smoothing"


def _read(path: Path) -> list[KindMap] | None:
    """A kept answer; None if there is none, or it is damaged."""
    try:
        layers = json.loads(path.read_text(encoding="utf-8"))
        return [(frozenset(entry["kind"]), _pattern(entry)) for entry in layers]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _pattern(entry: Mapping[str, Any]) -> LayerMap:
    """A kept pattern, in which JSON made lists of tuples."""
    folds = []
    for fold in entry["folds"]:
        rows = None if fold["rows"] is None else tuple(fold["rows"])
        folds.append(Fold(**{**fold, "targets": tuple(fold["targets"]), "rows": rows}))
    groups = tuple(tuple(group) for group in entry["shared_inputs"])
    return LayerMap(groups, tuple(folds), frozenset(entry["unclipped"]))


def _keep(path: Path, answer: Sequence[KindMap]) -> None:
    """Write an answer; a folder that cannot be written costs the next call its time, not this one."""
    value = [
        asdict(pattern) | {"kind": sorted(kind), "unclipped": sorted(pattern.unclipped)}
        for kind, pattern in answer
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(value).encode())
    except (OSError, BadInput):
        return

"""Rotating a checkpoint where that leaves its logits as they are, which a small random model proves."""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from ..base.errors import BadInput, first_line
from ..families.registry import type_of
from ..model.architecture import architecture_of
from ..model.auto import auto_class, read_config
from ..model.checkpoint import SINGLE_NAME, Checkpoint
from ..smoothing.random_model import no_progress_bar, randomize, sample_token_ids
from ..smoothing.smoothing_map import attempts_for, with_smoothing
from .rotated_checkpoint import RotatedCheckpoint
from .rotation_map import R1, R2, rotation_map_of, value_candidates

ROTATIONS = (R1, R2)
_SAME_LOGITS = 1e-5  # of float64 weights, relative; transformers' norms compute in float32
_SEED = 11
_FEATURES = re.compile(r"get_(image|img|video|audio|speech)_features")


def rotated(checkpoint: Checkpoint, rotations: tuple[str, ...], seed: int) -> Checkpoint:
    """The checkpoint seen through the rotations.

    Raises:
        BadInput: an unknown rotation, or a model whose logits would change, also behind images.
    """
    unknown = [name for name in rotations if name not in ROTATIONS]
    if unknown:
        raise BadInput(f"--rotate {unknown[0]}: choose of {', '.join(ROTATIONS)}, with commas")
    plain = architecture_of(checkpoint)
    if R1 in rotations and (reader := _reader_of_media(plain.meta_model.model)):
        raise BadInput(
            f"--rotate R1: {reader} writes features of images or sounds into the residual stream, which are "
            "not turned along: leave it out (R2 turns only the values of heads)"
        )
    values = _proven_once(attempts_for(checkpoint, plain), rotations)
    architecture = with_smoothing(checkpoint, plain)
    targets = rotation_map_of(checkpoint, architecture, residual=R1 in rotations, values=values)
    if not targets.hidden and not targets.values:
        kind = type_of(checkpoint.config)
        raise BadInput(
            f"--rotate R2: model type {kind!r} has no values in whole heads: leave it out"
        )
    return RotatedCheckpoint(checkpoint, targets, seed)


def _reader_of_media(model: nn.Module) -> str | None:
    """Class of a model that puts features of images or sounds in place of embeddings; None: of text."""
    reads = any(
        _FEATURES.fullmatch(name) for module in model.modules() for name in dir(type(module))
    )
    return type(model).__name__ if reads else None


_known: dict[str, frozenset[str]] = {}


def _proven_once(raws: Sequence[Mapping[str, Any]], rotations: tuple[str, ...]) -> frozenset[str]:
    """See `_proven`; the proof of a config is kept as long as the process lives."""
    key = json.dumps([raws, rotations], default=str, sort_keys=True)
    if key not in _known:
        _known[key] = _proven(raws, rotations)
    return _known[key]


def _proven(raws: Sequence[Mapping[str, Any]], rotations: tuple[str, ...]) -> frozenset[str]:
    """The value projections that R2 may turn.

    Raises:
        BadInput: a rotation that is asked for changes the logits of the small model.
    """
    for last, raw in zip([*[False] * (len(raws) - 1), True], raws, strict=True):
        try:
            with tempfile.TemporaryDirectory() as folder:
                return _proven_on(Path(folder), raw, rotations)
        except BadInput:
            if last:
                raise
    raise AssertionError("there is always an attempt")


def _proven_on(folder: Path, raw: Mapping[str, Any], rotations: tuple[str, ...]) -> frozenset[str]:
    """See `_proven`, on the small model of one config."""
    before, token_ids = _saved(folder / "plain", raw)
    checkpoint = Checkpoint(folder / "plain")
    architecture = with_smoothing(checkpoint, architecture_of(checkpoint))

    def change(residual: bool, values: frozenset[str]) -> float:
        targets = rotation_map_of(checkpoint, architecture, residual=residual, values=values)
        if not residual and not targets.values:
            return math.inf  # heads do not divide them here: nothing is proven
        seen = RotatedCheckpoint(checkpoint, targets, _SEED)
        after = _logits(write_plain(seen, folder / "rotated"), token_ids)
        return float((after - before).abs().max() / before.abs().max())

    kind = type_of(raw)
    if R1 in rotations and not (difference := change(True, frozenset())) <= _SAME_LOGITS:
        raise BadInput(
            f"--rotate R1: model type {kind!r} cannot be rotated, its logits would change by "
            f"{difference:.1e} (norms that subtract the mean or follow a sublayer, or other readers of the "
            "residual stream): leave it out"
        )
    if R2 not in rotations:
        return frozenset()
    exact = frozenset(
        name
        for name in value_candidates(architecture)
        if change(False, frozenset({name})) <= _SAME_LOGITS
    )
    if not exact:
        raise BadInput(
            f"--rotate R2: model type {kind!r} has no values that only an output projection reads, head "
            "by head: leave it out"
        )
    return exact


def _saved(folder: Path, raw: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Save the random model of a config in float64; its logits, and the tokens.

    Raises:
        BadInput: the model cannot be built, or does not run.
    """
    config: Any = read_config(raw)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            model: Any = auto_class(config).from_config(config, dtype=torch.float64)
            randomize(model)
        with no_progress_bar():
            model.save_pretrained(folder)
        token_ids = sample_token_ids(config)
        return _logits(folder, token_ids), token_ids
    except Exception as error:  # a module may raise anything about its config, or where it runs
        raise BadInput(
            f"--rotate: no random model of type {type_of(config)!r} can be run: {first_line(error)}"
        ) from error


@torch.no_grad()
def _logits(folder: Path, token_ids: torch.Tensor) -> torch.Tensor:
    config: Any = read_config(json.loads((folder / "config.json").read_text()))
    with no_progress_bar():
        model: Any = auto_class(config).from_pretrained(folder, dtype=torch.float64)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped GEMMs take no float64
    return model.eval()(input_ids=token_ids, use_cache=False).logits.to(torch.float64)


def write_plain(checkpoint: Checkpoint, folder: Path) -> Path:
    """Write a checkpoint that fits in memory as plain files."""
    folder.mkdir(exist_ok=True)
    save_file(
        {name: tensor.clone() for name, tensor in checkpoint.tensors()},
        folder / SINGLE_NAME,
        metadata={"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(checkpoint.config))
    return folder

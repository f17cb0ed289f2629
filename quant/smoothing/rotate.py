"""Rotation of heads' values where that leaves the logits as they are, which a small random model proves.

Tensors are turned as they are read, by a random Hadamard matrix: of order `m * 2**k`, Sylvester's and one by
Paley's first construction (1933); orders without one get a random orthogonal matrix.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...base.errors import BadInput
from ..families.layer_map import LayerMap
from ..families.registry import type_of
from ..model.architecture import Architecture, architecture_of
from ..model.auto import read_config
from ..model.checkpoint import Checkpoint
from ..model.experts import with_experts_apart
from .patterns import starred
from .smoothing_map import KindMap, attempts_and_maps, by_layer, with_smoothing

R2 = "R2"
_SAME_LOGITS = 1e-5  # of float64 weights, relative; transformers' norms compute in float32
_LAYERS = 2**16  # more than any model has: seeds of layers do not meet


def random_rotation(order: int, seed: int) -> torch.Tensor:
    """An orthogonal matrix `[order, order]`, float64: `H D / sqrt(order)`, with random signs `D`."""
    generator = torch.Generator().manual_seed(seed)
    matrix = hadamard(order)
    if matrix is None:
        noise = torch.randn(order, order, generator=generator, dtype=torch.float64)
        return torch.linalg.qr(noise).Q
    signs = torch.randint(0, 2, (order,), generator=generator).mul_(2).sub_(1)
    return matrix * signs / order**0.5


def hadamard(order: int) -> torch.Tensor | None:
    """A Hadamard matrix of ones and minus ones, float64; None where no construction here has the order."""
    base, doublings = order, 0
    while (factor := _base(base)) is None and base % 2 == 0:
        base, doublings = base // 2, doublings + 1
    if factor is None:
        return None
    for _ in range(doublings):
        factor = torch.cat([torch.cat([factor, factor], 1), torch.cat([factor, -factor], 1)])
    return factor


def _base(order: int) -> torch.Tensor | None:
    """A matrix of order 1, or of a prime of the form 4n + 3 and one, by Paley's first construction."""
    prime = order - 1
    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    if order % 4 or not all(prime % factor for factor in range(2, int(prime**0.5) + 1)):
        return None
    residues = torch.full((prime,), -1.0, dtype=torch.float64)
    residues[[number * number % prime for number in range(1, prime)]] = 1.0
    residues[0] = 0.0
    matrix = torch.eye(order, dtype=torch.float64)
    matrix[1:, 1:] += residues[(torch.arange(prime)[:, None] - torch.arange(prime)) % prime]
    matrix[0, 1:], matrix[1:, 0] = 1.0, -1.0
    return matrix


@dataclass(frozen=True, slots=True)
class Head:
    """Rows `[start, stop)` of a value projection, or columns of an output projection: heads of `width`."""

    layer: int
    start: int
    stop: int
    width: int
    is_output: bool = False

    def rotation(self, seed: int) -> torch.Tensor:
        return random_rotation(self.width, 2 * seed * _LAYERS + 2 * self.layer + 1)

    def turned(self, tensor: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """The weight or the bias with its heads rotated, in its dtype; the bias of an output stays."""
        if self.is_output and tensor.dim() == 1:
            return tensor
        result = tensor.to(torch.float64 if tensor.dtype == torch.float64 else torch.float32)
        rotation = rotation.to(result.dtype)
        if self.is_output:
            result = (result.unflatten(1, (-1, self.width)) @ rotation).flatten(1)
        else:
            rows = result[self.start : self.stop].unflatten(0, (-1, self.width))
            rows = torch.einsum("hd...,de->he...", rows, rotation).flatten(0, 1)
            result = torch.cat([result[: self.start], rows, result[self.stop :]])
        return result.to(tensor.dtype).contiguous()


def _heads(
    layer: int,
    family: LayerMap,
    shape: Callable[[str], Sequence[int]],
    text_config: Mapping[str, Any],
    values: frozenset[str],
) -> dict[str, Head]:
    """Linears of a layer that R2 turns; `values`: sources of the pairs, with `*` for an expert's number."""
    count = int(text_config.get("num_attention_heads") or 1)
    usual = int(text_config.get("head_dim") or int(text_config.get("hidden_size") or 0) // count)
    heads: dict[str, Head] = {}
    for fold in family.folds:
        if starred(fold.source) not in values:
            continue
        first, last = fold.rows or (0, shape(f"{fold.source}.weight")[0])
        width = (last - first) // fold.groups if fold.groups > 1 else usual
        columns = shape(f"{fold.targets[0]}.weight")[1]
        if width and (last - first) % width == 0 and columns % width == 0:
            heads[fold.source] = Head(layer, first, last, width)
            heads[fold.targets[0]] = Head(layer, 0, columns, width, is_output=True)
    return heads


class RotatedCheckpoint(Checkpoint):
    """A checkpoint with the heads of some linears, by full name, rotated, in the dtypes of the original."""

    def __init__(self, plain: Checkpoint, heads: Mapping[str, Head], seed: int):
        self._plain = plain
        self.folder, self.path = plain.folder, plain.path
        self.trust_remote_code = plain.trust_remote_code
        self.config, self.shard_of = plain.config, plain.shard_of
        self.source_type, self.source_tokenizer = plain.source_type, plain.source_tokenizer
        self.notes = plain.notes
        self.shape, self.dtype_name = plain.shape, plain.dtype_name
        self.companions, self.release = plain.companions, plain.release
        self.generation_config = plain.generation_config
        self._heads, self._seed = heads, seed
        self._rotations: dict[tuple[int, int], torch.Tensor] = {}

    @property
    def weight_bytes(self) -> int:
        return self._plain.weight_bytes

    def tensor(self, name: str) -> torch.Tensor:
        stored, head = self._plain.tensor(name), self._heads.get(name.rpartition(".")[0])
        if head is None:
            return stored
        key = head.layer, head.width
        if key not in self._rotations:  # only the last one is kept
            self._rotations = {key: head.rotation(self._seed)}
        return head.turned(stored, self._rotations[key])


def rotated(checkpoint: Checkpoint, rotations: tuple[str, ...], seed: int) -> Checkpoint:
    """The checkpoint seen through rotations. BadInput: an unknown one, or logits would change."""
    unknown = [name for name in rotations if name != R2]
    if unknown:
        raise BadInput(f"--rotate {unknown[0]}: choose {R2}, or none")
    plain = architecture_of(checkpoint)
    values = _exact_values(checkpoint, plain)
    heads: dict[str, Head] = {}
    for index, family in enumerate(with_smoothing(checkpoint, plain).layers):
        start = f"{plain.layer_prefix(index)}."
        of_layer = _heads(
            index,
            family,
            lambda name, start=start: checkpoint.shape(start + name),
            checkpoint.text_config,
            values,
        )
        heads |= {start + name: head for name, head in of_layer.items()}
    if not heads:
        kind = type_of(checkpoint.config)
        raise BadInput(
            f"--rotate R2: model type {kind!r} has no values in whole heads: leave it out"
        )
    return RotatedCheckpoint(checkpoint, heads, seed)


def seen_rotated(
    checkpoint: Checkpoint, rotations: tuple[str, ...] | None, seed: int
) -> tuple[Checkpoint, tuple[str, ...]]:
    """The checkpoint seen through rotations, and these; None: R2, where it is exact and possible."""
    if rotations is not None:
        return (rotated(checkpoint, rotations, seed) if rotations else checkpoint), rotations
    try:
        if with_experts_apart(checkpoint) is checkpoint:
            return rotated(checkpoint, (R2,), seed), (R2,)
    except BadInput:  # what is wrong with the model itself is said later
        pass
    return checkpoint, ()


_known: dict[str, frozenset[str]] = {}


def _exact_values(checkpoint: Checkpoint, architecture: Architecture) -> frozenset[str]:
    """Value projections that may be turned, proven once a process. BadInput: no proof, or no small model."""
    attempts, maps = attempts_and_maps(checkpoint, architecture)
    key = json.dumps(attempts, default=str, sort_keys=True)
    reason = None
    for raw in () if key in _known else attempts:
        try:
            exact = _proven(raw, maps)
        except Exception as error:  # a module may raise anything about its config, or where it runs
            reason = error
            continue
        if exact:
            _known[key] = exact
            break
    if key not in _known:
        raise BadInput(
            f"--rotate R2: model type {type_of(checkpoint.config)!r} has no values that only an output "
            "projection reads, head by head: leave it out"
        ) from reason
    return _known[key]


def _proven(raw: Mapping[str, Any], maps: Sequence[KindMap]) -> frozenset[str]:
    """The value projections of a config's random model whose rotation leaves its logits as they are."""
    from .discover import logits_change, random_layers
    from .small_model import random_model

    model = random_model(read_config(raw))
    model.model.double()
    if hasattr(model.model, "set_experts_implementation"):
        model.model.set_experts_implementation("eager")  # grouped GEMMs take no float64
    config = model.model.config.to_dict()
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    kinds = [frozenset(map(starred, names.values())) for names in model.names]
    layers = random_layers(model, by_layer(maps, kinds))

    def is_exact(value: str) -> bool:
        turned = []
        for index, (family, tensors) in enumerate(layers):
            heads = _heads(index, family, lambda n, t=tensors: t[n].shape, text, frozenset({value}))
            turned.append(
                {
                    name: head.turned(tensor, head.rotation(0))
                    for name, tensor in tensors.items()
                    if (head := heads.get(name.rpartition(".")[0])) is not None
                }
            )
        # Where heads do not divide them here, nothing is proven.
        return any(turned) and logits_change(model, turned) <= _SAME_LOGITS

    # R2 may be exact between two linears.
    candidates = {
        starred(fold.source): None
        for family, _ in layers
        for fold in family.folds
        if fold.source in family.linears and len(fold.targets) == 1
    }
    return frozenset(filter(is_exact, candidates))

"""Rotation of heads' values where that leaves the logits as they are, which a small random model proves.

The checkpoint is seen through the rotations: its tensors are turned as they are read. A rotation is a random
Hadamard matrix: signs that are random, entries that are all equally large. One of order `m * 2**k` is the
Kronecker product of Sylvester's of order `2**k` and one of order `m` by Paley's first construction (R. E. A.
C. Paley, "On Orthogonal Matrices", 1933). Orders without one get a random orthogonal matrix.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ...base.errors import BadInput, first_line
from ..families.registry import type_of
from ..model.architecture import architecture_of
from ..model.auto import auto_class, read_config
from ..model.checkpoint import SINGLE_NAME, Checkpoint
from ..model.experts import with_experts_apart
from .patterns import Head, rotated_heads, value_candidates
from .small_model import no_progress_bar, randomize, sample_token_ids
from .smoothing_map import attempts_for, with_smoothing


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
    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    prime = order - 1
    if order % 4 or not _is_prime(prime):
        return None
    squares = {number * number % prime for number in range(1, prime)}
    residues = [0.0] + [1.0 if number in squares else -1.0 for number in range(1, prime)]
    rows = [[residues[(row - column) % prime] for column in range(prime)] for row in range(prime)]
    matrix = torch.eye(order, dtype=torch.float64)
    matrix[1:, 1:] += torch.tensor(rows, dtype=torch.float64)
    matrix[0, 1:] = 1.0
    matrix[1:, 0] = -1.0
    return matrix


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % factor for factor in range(2, int(number**0.5) + 1))


class RotatedCheckpoint(Checkpoint):
    """The rotated tensors in the dtypes of the original.

    Args:
        seed: seed of the rotations.
    """

    def __init__(self, plain: Checkpoint, heads: Mapping[str, Head], seed: int):
        self._plain = plain
        self.folder, self.path = plain.folder, plain.path
        self.trust_remote_code = plain.trust_remote_code
        self.config, self.shard_of = plain.config, plain.shard_of
        self.source_type, self.source_tokenizer = plain.source_type, plain.source_tokenizer
        self.notes = plain.notes
        self._heads, self._seed = heads, seed
        self._turns: dict[tuple[int, int], torch.Tensor] = {}

    def shape(self, name: str) -> tuple[int, ...]:
        return self._plain.shape(name)

    def dtype_name(self, name: str) -> str:
        return self._plain.dtype_name(name)

    def companions(self) -> dict[str, bytes]:
        return self._plain.companions()

    def release(self) -> None:
        self._plain.release()

    @property
    def weight_bytes(self) -> int:
        return self._plain.weight_bytes

    def tensor(self, name: str) -> torch.Tensor:
        stored, head = self._plain.tensor(name), self._heads.get(_weight_of(name))
        if head is None or (head.is_output and name.endswith(".bias")):
            return stored
        result = stored.to(torch.float64 if stored.dtype == torch.float64 else torch.float32)
        turn = self._turn(head).to(result.dtype)
        if head.is_output:
            result = (result.unflatten(1, (-1, head.width)) @ turn).flatten(1)
        else:
            rows = result[head.start : head.stop].unflatten(0, (-1, head.width))
            turned = torch.einsum("hd...,de->he...", rows, turn).flatten(0, 1)
            result = torch.cat([result[: head.start], turned, result[head.stop :]])
        return result.to(stored.dtype).contiguous()

    def _turn(self, head: Head) -> torch.Tensor:
        """The rotation of a layer's heads, float64; the last one is kept."""
        key = head.layer, head.width
        if key not in self._turns:
            seed = 2 * self._seed * _LAYERS + 2 * head.layer + 1
            self._turns = {key: random_rotation(head.width, seed)}
        return self._turns[key]


_LAYERS = 2**16  # more than any model has: seeds of layers do not meet


def _weight_of(name: str) -> str:
    """The weight that a bias belongs to; a weight's own name."""
    return name.removesuffix("bias") + "weight" if name.endswith(".bias") else name


R2 = "R2"
_SAME_LOGITS = 1e-5  # of float64 weights, relative; transformers' norms compute in float32
_SEED = 11


def rotated(checkpoint: Checkpoint, rotations: tuple[str, ...], seed: int) -> Checkpoint:
    """The checkpoint seen through the rotations.

    Raises:
        BadInput: an unknown rotation, or a model whose logits would change.
    """
    unknown = [name for name in rotations if name != R2]
    if unknown:
        raise BadInput(f"--rotate {unknown[0]}: choose {R2}, or none")
    plain = architecture_of(checkpoint)
    values = _proven_once(attempts_for(checkpoint, plain))
    heads = rotated_heads(checkpoint, with_smoothing(checkpoint, plain), values)
    if not heads:
        kind = type_of(checkpoint.config)
        raise BadInput(
            f"--rotate R2: model type {kind!r} has no values in whole heads: leave it out"
        )
    return RotatedCheckpoint(checkpoint, heads, seed)


def seen_rotated(
    checkpoint: Checkpoint, rotations: tuple[str, ...] | None, seed: int
) -> tuple[Checkpoint, tuple[str, ...]]:
    """The checkpoint seen through the rotations, and these.

    Where they are open (None), R2 if it keeps the model's logits, and nothing else takes its tensors apart.
    """
    if rotations is not None:
        return (rotated(checkpoint, rotations, seed) if rotations else checkpoint), rotations
    try:
        if with_experts_apart(checkpoint) is checkpoint:
            return rotated(checkpoint, (R2,), seed), (R2,)
    except BadInput:  # what is wrong with the model itself is said later
        pass
    return checkpoint, ()


_known: dict[str, frozenset[str]] = {}


def _proven_once(raws: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Prove as `_proven` does; the proof of a config is kept as long as the process lives."""
    key = json.dumps(raws, default=str, sort_keys=True)
    if key not in _known:
        _known[key] = _proven(raws)
    return _known[key]


def _proven(raws: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """The value projections that may be turned.

    Raises:
        BadInput: each rotation changes the logits of the small model.
    """
    for last, raw in zip([*[False] * (len(raws) - 1), True], raws, strict=True):
        try:
            with tempfile.TemporaryDirectory() as folder:
                return _proven_on(Path(folder), raw)
        except BadInput:
            if last:
                raise
    raise AssertionError("there is always an attempt")


def _proven_on(folder: Path, raw: Mapping[str, Any]) -> frozenset[str]:
    """Prove, as `_proven` does, on the small model of one config."""
    before, token_ids = _saved(folder / "plain", raw)
    checkpoint = Checkpoint(folder / "plain")
    architecture = with_smoothing(checkpoint, architecture_of(checkpoint))

    def change(name: str) -> float:
        heads = rotated_heads(checkpoint, architecture, frozenset({name}))
        if not heads:
            return math.inf  # heads do not divide them here: nothing is proven
        seen = RotatedCheckpoint(checkpoint, heads, _SEED)
        after = _logits(write_plain(seen, folder / "rotated"), token_ids)
        return float((after - before).abs().max() / before.abs().max())

    candidates = value_candidates(architecture)
    exact = frozenset(name for name in candidates if change(name) <= _SAME_LOGITS)
    if not exact:
        raise BadInput(
            f"--rotate R2: model type {type_of(raw)!r} has no values that only an output projection reads, "
            "head by head: leave it out"
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

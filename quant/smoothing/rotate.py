"""Rotation of a checkpoint where that leaves its logits as they are, which a small random model proves.

The checkpoint is seen through the rotations: its tensors are turned as they are read. A rotation is a random
Hadamard matrix: signs that are random, entries that are all equally large. One of order `m * 2**k` is the
Kronecker product of Sylvester's of order `2**k` and one of order `m` by Paley's constructions (R. E. A. C.
Paley, "On Orthogonal Matrices", 1933). Orders without one get a random orthogonal matrix.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn

from ..base.errors import BadInput, first_line
from ..families.registry import type_of
from ..model.architecture import architecture_of
from ..model.auto import auto_class, read_config
from ..model.checkpoint import SINGLE_NAME, Checkpoint
from ..model.experts import with_experts_apart
from .patterns import R1, R2, Head, RotationMap, rotation_map_of, value_candidates
from .small_model import no_progress_bar, randomize, sample_token_ids
from .smoothing_map import attempts_for, with_smoothing

_BLOCK, _LEAST_BLOCK = 64, 16


def random_rotation(order: int, seed: int) -> torch.Tensor:
    """An orthogonal matrix `[order, order]`, float64: `H D / sqrt(order)`, with random signs `D`."""
    generator = torch.Generator().manual_seed(seed)
    matrix = hadamard(order)
    if matrix is None:
        noise = torch.randn(order, order, generator=generator, dtype=torch.float64)
        return torch.linalg.qr(noise).Q
    signs = torch.randint(0, 2, (order,), generator=generator).mul_(2).sub_(1)
    return matrix * signs / order**0.5


class BlockRotation(NamedTuple):
    """An orthogonal matrix that turns blocks of channels, each by itself.

    Attributes:
        channels: int64 `[order]`; block `k` takes `size` of them, from `k * size` on, to the same columns.
        blocks: float64 `[order / size, size, size]`.
    """

    channels: torch.Tensor
    blocks: torch.Tensor

    def columns(self, matrix: torch.Tensor) -> torch.Tensor:
        """`matrix @ R` for `matrix` `[rows, order]`."""
        parts = matrix.index_select(1, self.channels).unflatten(1, self.blocks.shape[:2])
        return torch.einsum("rki,kij->rkj", parts, self.blocks.to(matrix.dtype)).flatten(1)

    def rows(self, matrix: torch.Tensor) -> torch.Tensor:
        """`R.T @ matrix` for `matrix` `[order, ...]`."""
        parts = matrix.index_select(0, self.channels).unflatten(0, self.blocks.shape[:2])
        turned = torch.einsum("ki...,kij->kj...", parts, self.blocks.to(matrix.dtype))
        return turned.flatten(0, 1)


def block_rotation(loudness: torch.Tensor, seed: int) -> BlockRotation:
    """Random rotations of blocks of 64 channels of like `loudness` `[order]`.

    An order that 64 does not divide has blocks of the largest power of two that divides it, of 16 at least;
    any other is one block.
    """
    order = len(loudness)
    size = math.gcd(order, _BLOCK)
    size = size if size >= _LEAST_BLOCK else order
    blocks = [random_rotation(size, seed + 2 * number) for number in range(order // size)]
    return BlockRotation(loudness.sort(stable=True).indices, torch.stack(blocks))


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
    """A matrix of order 1, or by Paley's first or second construction."""
    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    if order % 4 == 0 and _is_prime(order - 1) and (order - 1) % 4 == 3:
        return _bordered(order - 1, -1.0) + torch.eye(order, dtype=torch.float64)
    half = order // 2
    if order % 4 == 0 and _is_prime(half - 1) and (half - 1) % 4 == 1:
        symmetric = _bordered(half - 1, 1.0)
        on = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        off = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        return torch.kron(symmetric, on) + torch.kron(torch.eye(half, dtype=torch.float64), off)
    return None


def _bordered(prime: int, sign: float) -> torch.Tensor:
    """The Jacobsthal matrix of quadratic residues, with a border of ones; `sign` of the left one."""
    squares = {number * number % prime for number in range(1, prime)}
    residues = [0.0] + [1.0 if number in squares else -1.0 for number in range(1, prime)]
    rows = [[residues[(row - column) % prime] for column in range(prime)] for row in range(prime)]
    matrix = torch.zeros(prime + 1, prime + 1, dtype=torch.float64)
    matrix[1:, 1:] = torch.tensor(rows, dtype=torch.float64)
    matrix[0, 1:] = 1.0
    matrix[1:, 0] = sign
    return matrix


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % factor for factor in range(2, int(number**0.5) + 1))


class RotatedCheckpoint(Checkpoint):
    """The rotated tensors in the dtypes of the original.

    Args:
        seed: of the rotations.
    """

    def __init__(self, plain: Checkpoint, targets: RotationMap, seed: int):
        self._plain = plain
        self.folder, self.path = plain.folder, plain.path
        self.trust_remote_code = plain.trust_remote_code
        self.config, self.shard_of = plain.config, plain.shard_of
        self.source_type, self.source_tokenizer = plain.source_type, plain.source_tokenizer
        self.notes = plain.notes
        self._targets, self._seed = targets, seed
        self._embedding: torch.Tensor | None = None
        self._head_turns: dict[tuple[int, int], torch.Tensor] = {}
        self._untied = bool(targets.hidden) and targets.tied
        if self._untied:
            self.shard_of = {**self.shard_of, targets.head: self.shard_of[targets.embedding]}
            size = self._embedding_bytes / 2**20
            self.notes += (
                f"note: R1 parts the output projection from the embedding: {size:.0f} MiB more",
            )
        if targets.hidden:
            self.config = {**self.config, "tie_word_embeddings": False}

    def shape(self, name: str) -> tuple[int, ...]:
        return self._plain.shape(self._origin(name))

    def dtype_name(self, name: str) -> str:
        return self._plain.dtype_name(self._origin(name))

    def companions(self) -> dict[str, bytes]:
        return self._plain.companions()

    def release(self) -> None:
        self._plain.release()
        self._embedding = None

    @property
    def weight_bytes(self) -> int:
        return self._plain.weight_bytes + self._untied * self._embedding_bytes

    def tensor(self, name: str) -> torch.Tensor:
        targets = self._targets
        if name == targets.embedding and targets.hidden:  # looked up in many times
            if self._embedding is None:
                self._embedding = self._turned(name)
            return self._embedding
        return self._turned(name)

    @property
    def resident_bytes(self) -> int:
        """The turned embedding, which is in memory and not mapped."""
        return self._embedding_bytes if self._targets.hidden else 0

    @property
    def _embedding_bytes(self) -> int:
        return self._plain.tensor(self._targets.embedding).nbytes

    def _origin(self, name: str) -> str:
        return self._targets.embedding if self._untied and name == self._targets.head else name

    def _turned(self, name: str) -> torch.Tensor:
        targets, stored = self._targets, self._plain.tensor(self._origin(name))
        if name in targets.norms:
            return torch.full_like(stored, 1 - targets.norms[name])
        if targets.hidden and name in (
            targets.embedding,
            targets.head,
        ):  # float copies of few rows at a time
            result = torch.empty_like(stored)
            for into, part in zip(result.split(_ROWS), stored.split(_ROWS), strict=True):
                into.copy_(self._turned_matrix(name, part))
            return result
        return self._turned_matrix(name, stored)

    def _turned_matrix(self, name: str, stored: torch.Tensor) -> torch.Tensor:
        """A tensor that is no norm on the stream, or rows of one that only reads it."""
        targets = self._targets
        written = name in targets.writers or _weight_of(name) in targets.writers
        heads = targets.values.get(_weight_of(name)), targets.outputs.get(name)
        reads = name in targets.readers or (name == targets.embedding and targets.hidden > 0)
        if not (written or reads or any(heads)):
            return stored
        result = stored.to(torch.float64 if stored.dtype == torch.float64 else torch.float32)
        if name in targets.readers:
            norm = targets.readers[name]
            result = result * (self._plain.tensor(norm).to(result.dtype) + targets.norms[norm])
        if reads:
            result = self._stream_turn.columns(result)
        if written:
            result = self._stream_turn.rows(result)
        value, output = heads
        if value is not None:
            rows = result[value.start : value.stop].unflatten(0, (-1, value.width))
            turn = self._head_turn(value).to(result.dtype)
            turned = torch.einsum("hd...,de->he...", rows, turn).flatten(0, 1)
            result = torch.cat([result[: value.start], turned, result[value.stop :]])
        if output is not None:
            turn = self._head_turn(output).to(result.dtype)
            result = (result.unflatten(1, (-1, output.width)) @ turn).flatten(1)
        return result.to(stored.dtype).contiguous()

    @cached_property
    def _stream_turn(self) -> BlockRotation:
        """The rotation of the stream."""
        loudness = torch.zeros(self._targets.hidden, dtype=torch.float64)
        for norm, offset in self._targets.norms.items():
            scales = (self._plain.tensor(norm).to(torch.float64) + offset).abs()
            loudness += (scales + _LEAST_SCALE * scales.mean()).log()
        return block_rotation(loudness, 2 * self._seed * _LAYERS)

    def _head_turn(self, head: Head) -> torch.Tensor:
        """The rotation of a layer's heads, float64; the last one is kept."""
        key = head.layer, head.width
        if key not in self._head_turns:
            seed = 2 * self._seed * _LAYERS + 2 * head.layer + 1
            self._head_turns = {key: random_rotation(head.width, seed)}
        return self._head_turns[key]


_LAYERS = 2**16  # more than any model has: seeds of layers do not meet
_ROWS = 4096  # of the vocabulary at a time
_LEAST_SCALE = 1e-2  # of a norm's mean: channels that it scales by less are alike


def _weight_of(name: str) -> str:
    """The weight that a bias belongs to; a weight's own name."""
    return name.removesuffix("bias") + "weight" if name.endswith(".bias") else name


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


def _reader_of_media(model: nn.Module) -> str | None:
    """Class of a model that puts features of images or sounds in place of embeddings; None: of text."""
    reads = any(
        _FEATURES.fullmatch(name) for module in model.modules() for name in dir(type(module))
    )
    return type(model).__name__ if reads else None


_known: dict[str, frozenset[str]] = {}


def _proven_once(raws: Sequence[Mapping[str, Any]], rotations: tuple[str, ...]) -> frozenset[str]:
    """Prove as `_proven` does; the proof of a config is kept as long as the process lives."""
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
    """Prove, as `_proven` does, on the small model of one config."""
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

"""Trellis codes: computed codebooks, the layout of tiles, and the search for the nearest cyclic path.

Tseng et al., "QTIP: Quantization with Trellises and Incoherence Processing", NeurIPS 2024 (arXiv:2406.11235)
compute values from states in place of storing them. Constants and order of operations are those of exllamav3
(`exllamav3_ext/quant/codebook.cuh`), by whose names they go:

    3inst   x = 89226354 s + 64248484; the halves of (x & 0x8fff8fff) ^ 0x3b603b60, as float16, added
    mcg     x = 0xCBAC1FED s; the same
    mul1    x = 0x83DCD12D s; the sum of its four bytes, times 0x1eee, plus 0xc931 (bits of float16)

A tile of 16 × 16 weights is one cyclic sequence of 256 states of 16 bits, of which a successor shares all but
`bits`; `docs/formats.md` has its order (exllamav3, `exllamav3_ext/quant/pack.cu`). The first state of a
cyclic path follows its last one: a first search over the neighbourhood of the seam says which node the path
passes there, and a second one is held to it (QTIP, section 3.3).

Up to 4 bits, where errors are large beside the steps of a 16-bit integer, values, targets, squares and costs
are such integers; beyond, they are float32 whose operations are rounded one by one. C, torch and, on a GPU,
Triton find the same path to the bit.
"""

from __future__ import annotations

import ctypes
import logging
import os
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from ....base.build import beside, fields
from ....base.errors import first_line
from ...base.device import HOST

_log = logging.getLogger(__name__)

STATE_BITS = 16
MULTIPLIERS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
"""Multipliers of the codebooks that a file marks by a tensor of their name; `3inst` has no mark."""
_MASK, _EXPONENTS = 0x8FFF8FFF, 0x3B603B60
_SUM_BASE = 0x6400  # float16 1024, whose next 1023 bit patterns are the next integers


@lru_cache
def codebook(name: str) -> np.ndarray:
    """The value of every state, float16 `[65536]`; not to be written to."""
    states = np.arange(1 << STATE_BITS, dtype=np.uint32)
    with np.errstate(over="ignore"):
        if name == "3inst":
            words = states * np.uint32(89226354) + np.uint32(64248484)
        else:
            words = states * np.uint32(MULTIPLIERS[name])
    if name == "mul1":
        sums = words.view(np.uint8).reshape(-1, 4).sum(axis=1, dtype=np.uint16) + _SUM_BASE
        factor, offset = np.array([0x1EEE, 0xC931], dtype=np.uint16).view(np.float16)
        # One rounding, as of a fused multiply-add: a double holds the product exactly.
        exact = sums.astype(np.uint16).view(np.float16).astype(np.float64) * np.float64(factor)
        values = (exact + np.float64(offset)).astype(np.float16)
    else:
        halves = ((words & np.uint32(_MASK)) ^ np.uint32(_EXPONENTS)).view(np.float16)
        values = halves[0::2] + halves[1::2]
    values.setflags(write=False)
    return values


TILE = 16
LENGTH = TILE * TILE

_LANE = torch.arange(32)[:, None]
_ROWS = (_LANE % 4) * 2 + torch.tensor([0, 1, 8, 9, 0, 1, 8, 9])
_COLUMNS = _LANE // 4 + torch.tensor([0, 0, 0, 0, 8, 8, 8, 8])
ORDER = (_ROWS * TILE + _COLUMNS).flatten()
"""The place `row * 16 + column` (input, output channel) of each weight of a sequence."""
_PLACES = ORDER.argsort()


def to_sequences(values: torch.Tensor) -> torch.Tensor:
    tiles = values.unflatten(1, (-1, TILE)).unflatten(0, (-1, TILE)).transpose(1, 2)
    return tiles.flatten(2)[..., ORDER.to(values.device)]


def from_sequences(sequences: torch.Tensor) -> torch.Tensor:
    tiles = sequences[..., _PLACES.to(sequences.device)].unflatten(2, (TILE, TILE))
    return tiles.transpose(1, 2).flatten(2).flatten(0, 1)


def pack_states(states: torch.Tensor, bits: int) -> torch.Tensor:
    """States int32 `[..., 256]` of cyclic sequences as int16 `[..., 16 * bits]`."""
    shifts = torch.arange(bits - 1, -1, -1, dtype=torch.int32, device=states.device)
    stream = (states[..., None] >> shifts & 1).flatten(-2).unflatten(-1, (-1, 16))
    places = torch.arange(15, -1, -1, dtype=torch.int32, device=states.device)
    words = (stream << places).sum(-1, dtype=torch.int32)
    return words.unflatten(-1, (-1, 2)).flip(-1).flatten(-2).to(torch.int16)


def unpack_states(packed: torch.Tensor, bits: int) -> torch.Tensor:
    words = (packed.to(torch.int32) & 0xFFFF).unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    # The 16 bits that end with a weight's own lie in two neighbouring words, around the end of the tile.
    ends = torch.arange(1, LENGTH + 1, device=packed.device) * bits
    word, used = (ends - 1) // 16, (ends - 1) % 16 + 1
    pairs = words.roll(1, -1) << 16 | words
    return pairs[..., word] >> (16 - used).to(torch.int32) & ((1 << STATE_BITS) - 1)


STATES = 1 << STATE_BITS
_SEAM = 128  # bits on each side of the seam that the first search sees; more have up to 0.8 % less error
_NARROW = 4  # bits up to which costs are 16-bit integers
_MOST, _BLOCKED = (1 << 15) - 1, 1e30  # the highest of these; a float's where no path has arrived
# Of the largest value: what targets are clipped to, and what differences reach as 16-bit integers. Larger
# ones, up to 2.25, wrap around to no less than 1.25, far from all that a path would take.
_CLIPPED, _REACH = 1.25, 1.75
# Operations of a GEMM in the time of a transition in C: 1.4 to 3.1, measured on Zen 5.
_TRANSITION = 2.5
_LANES = 32  # of viterbi.c: 16-bit values that lie together
_TILES = 64  # sequences at a time in torch: 16 MB for every array over the transitions
_TRIED = 3, 40  # sequences and targets that Triton's search is held against torch's with


def nearest_states(targets: torch.Tensor, bits: int, name: str) -> torch.Tensor:
    """States int32 `[sequences, length]` nearest to `targets`, with values of codebook `name`. Each shares
    its upper `16 - bits` bits with the one before, the first with the last."""
    if _triton_serves(targets.device, bits, name):
        return _triton_states(targets, bits, name)
    return _composed_states(targets, bits, name)


def _composed_states(targets: torch.Tensor, bits: int, name: str) -> torch.Tensor:
    """`nearest_states` by two calls of a search."""
    side = _side(targets.shape[1], bits)
    seam = torch.cat([targets[:, -side:], targets[:, :side]], dim=1)
    anywhere = torch.full((len(targets),), -1, dtype=torch.int32, device=targets.device)
    first = _search(seam, anywhere, bits, name)[:, side] >> bits
    return _search(targets, first, bits, name)


def _search(targets: torch.Tensor, first: torch.Tensor, bits: int, name: str) -> torch.Tensor:
    native = targets.device.type == "cpu" and native_viterbi().library is not None
    return (_native_search if native else torch_search)(targets, first, bits, name)


def _side(length: int, bits: int) -> int:
    return min(_SEAM // bits, length // 2)


@cache
def _triton_serves(device: torch.device, bits: int, name: str) -> bool:
    """True if Triton's search runs on a device, and has found the paths of torch's there."""
    is_off = device.type != "cuda" or os.environ.get("LLMOPT_TRITON") == "off"
    if is_off or find_spec("triton") is None:
        return False
    generator = torch.Generator().manual_seed(0)
    targets = torch.randn(_TRIED, generator=generator, device="cpu").to(device)
    try:
        states = _triton_states(targets, bits, name)
        if torch.equal(states, _composed_states(targets, bits, name)):
            return True
        problem = "it finds other paths than torch's"
    except Exception as error:  # of the compiler, the driver or the launch
        problem = f"{type(error).__name__}: {first_line(error)}"
    _log.warning(
        "trellis codes are searched for in torch, Triton's search is left out: %s", problem
    )
    return False


def _triton_states(targets: torch.Tensor, bits: int, name: str) -> torch.Tensor:
    """`nearest_states` in one launch."""
    from .triton_viterbi import search_in_triton

    device, narrow = targets.device, bits <= _NARROW
    programs = 1
    if device.type == "cuda":
        programs = torch.cuda.get_device_properties(device).multi_processor_count
    clipped, factor = _scaling(name)
    most = _MOST if narrow else _BLOCKED
    rounding = clipped, factor, most, _stretch(bits) if narrow else 1
    values, side = _table(bits, name, device), _side(targets.shape[1], bits)
    return search_in_triton(targets, values, side, bits, rounding, programs)


def search_operations(bits: int) -> float:
    """The cost of the searches for one weight of a tile, in multiplications and additions of a large GEMM."""
    steps = LENGTH + 2 * _side(LENGTH, bits)
    return _TRANSITION * STATES * steps / LENGTH


def values_of(states: torch.Tensor, name: str) -> torch.Tensor:
    table = torch.from_numpy(codebook(name).astype("float32")).to(states.device)
    return table[states.long()]


def torch_search(targets: torch.Tensor, first: torch.Tensor, bits: int, name: str) -> torch.Tensor:
    """The reference: states of the cheapest path from node `first` back to it; -1: between any two."""
    values = _table(bits, name).to(targets.device)
    parts = zip(_rounded(targets, bits, name).split(_TILES), first.split(_TILES), strict=True)
    return torch.cat([_torch_search(part, nodes, bits, values) for part, nodes in parts])


def _torch_search(
    targets: torch.Tensor, first: torch.Tensor, bits: int, values: torch.Tensor
) -> torch.Tensor:
    count, length = targets.shape
    choices, device = 1 << bits, targets.device
    nodes = STATES >> bits
    number = torch.arange(nodes, device=device)
    most = _MOST if bits <= _NARROW else _BLOCKED
    costs = torch.where(_reached(number, first, 0), 0, most)
    costs = costs.to(torch.int32 if bits <= _NARROW else torch.float32)
    taken = torch.empty(length, count, nodes, dtype=torch.uint8, device=device)
    for index in range(length):
        spent = _squared(values - targets[:, index, None])
        # A state is its node before and the new bits: [count, k, node behind it].
        spent = (spent.view(count, nodes, choices) + costs[:, :, None]).view(count, choices, nodes)
        costs = spent.amin(dim=1).clamp_(max=most)
        if bits <= _NARROW and (index + 1) % _stretch(bits) == 0:
            costs -= costs.amin(dim=1, keepdim=True)
        away = ~_reached(number, first, index * bits)[:, :, None]
        spent.view(count, nodes, choices).masked_fill_(away, 2**30)
        taken[index] = spent.min(dim=1).indices
    node = torch.where(first < 0, costs.min(dim=1).indices, first.long())
    states = torch.empty(count, length, dtype=torch.int32, device=device)
    for index in range(length - 1, -1, -1):
        choice = taken[index].gather(1, node[:, None])[:, 0].long()
        state = choice << (STATE_BITS - bits) | node
        states[:, index] = state
        node = state >> bits
    return states


def _reached(nodes: torch.Tensor, first: torch.Tensor, shifted: int) -> torch.Tensor:
    """Bool `[len(first), len(nodes)]`: whether a path from a first node passes one after so many bits."""
    shift = min(shifted, STATE_BITS)
    begun = (first[:, None] & (len(nodes) - 1)) & (len(nodes) - 1 >> shift)
    return (first[:, None] < 0) | (nodes >> shift == begun)


def _squared(differences: torch.Tensor) -> torch.Tensor:
    """Squares of float32; of int16, which have wrapped around, the upper 16 of their 31 bits, rounded."""
    if differences.is_floating_point():
        return differences.square_()
    return (differences.int().square_() + (1 << 14)) >> 15


def _stretch(bits: int) -> int:
    return 1 if bits > 3 else 6 // bits


def _rounded(values: torch.Tensor, bits: int, name: str) -> torch.Tensor:
    """Values as the search takes them: int16, or float32 beyond 4 bits."""
    if bits > _NARROW:
        return values.to(torch.float32)
    clipped, factor = _scaling(name)
    return values.to(torch.float32).clamp(-clipped, clipped).mul_(factor).round_().to(torch.int16)


@lru_cache
def _scaling(name: str) -> tuple[float, float]:
    """Return the bound of targets, and the factor that makes them 16-bit integers."""
    largest = float(abs(codebook(name)).max())
    return _CLIPPED * largest, (1 << 15) / (_REACH * largest)


@lru_cache
def _table(bits: int, name: str, device: torch.device = HOST) -> torch.Tensor:
    return _rounded(torch.from_numpy(codebook(name).astype("float32")), bits, name).to(device)


class _ViterbiCall(ctypes.Structure):
    """`ViterbiCall` of `viterbi.c`."""

    _fields_ = fields("targets values first states", "sequences length bits threads")


native_viterbi = beside(__file__, "viterbi.c")
"""The compiled search, or the reason why there is none."""


@lru_cache
def _laid_out(bits: int, name: str) -> torch.Tensor:
    # The codebook in the order in which the kernel reads it.
    values = _table(bits, name)
    if bits > _NARROW:
        return values
    blocks = values.view(1 << bits, -1, _LANES, 1 << bits).permute(1, 3, 0, 2)
    return blocks.contiguous().flatten()


def _native_search(
    targets: torch.Tensor, first: torch.Tensor, bits: int, name: str
) -> torch.Tensor:
    library: Any = native_viterbi().library
    targets = _rounded(targets, bits, name).contiguous()
    first = first.to(torch.int32).contiguous()
    states = torch.empty(targets.shape, dtype=torch.uint16)
    values = _laid_out(bits, name)
    pointers = (part.data_ptr() for part in (targets, values, first, states))
    call = _ViterbiCall(*pointers, *targets.shape, bits, torch.get_num_threads())
    if library.llmopt_viterbi(ctypes.byref(call)):
        raise MemoryError("no memory for the search of a trellis")
    return states.to(torch.int32)

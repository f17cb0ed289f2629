"""Tail-biting Viterbi search: the cyclic path of states nearest to a sequence, on a CPU in C, else in torch.

The first state of a cyclic path follows its last one. As in QTIP (arXiv:2406.11235, section 3.3) a first
search over the neighbourhood of the seam says which node the path passes there, and a second one is held to
it.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

import torch

from ..native.build import Native, native
from .codebook import STATE_BITS, codebook
from .tiles import LENGTH

STATES = 1 << STATE_BITS
_SEAM = 128  # bits on each side of the seam that the first search sees; more gain nothing
_BLOCKED = -1e30
_TRANSITION = 6.5  # operations of a GEMM in the time of a transition in C: 6.1 to 8.3, measured
_TILES = 64  # sequences at a time in torch: 16 MB for every array over the transitions


def nearest_states(targets: torch.Tensor, bits: int, name: str) -> torch.Tensor:
    """States int32 `[sequences, length]` whose values are nearest to `targets`, of the same shape.

    Each state shares its upper `16 - bits` bits with the lower ones of the state before, the first with the
    last. Both searches are exact for the node that the seam is given.

    Args:
        targets: float32, on any device.
        bits: 1 to 8.
        name: of the codebook.
    """
    side = min(_SEAM // bits, targets.shape[1] // 2)
    seam = torch.cat([targets[:, -side:], targets[:, :side]], dim=1)
    anywhere = torch.full((len(targets),), -1, dtype=torch.int32, device=targets.device)
    first = _search(seam, anywhere, bits, name)[:, side] >> bits
    return _search(targets, first, bits, name)


def search_operations(bits: int) -> float:
    """What the searches for one weight of a tile take, in multiplications and additions of a large GEMM."""
    steps = LENGTH + 2 * min(_SEAM // bits, LENGTH // 2)
    return _TRANSITION * STATES * steps / LENGTH


def values_of(states: torch.Tensor, name: str) -> torch.Tensor:
    """The values float32 of states."""
    table = torch.from_numpy(codebook(name).astype("float32")).to(states.device)
    return table[states.long()]


def _search(targets: torch.Tensor, first: torch.Tensor, bits: int, name: str) -> torch.Tensor:
    if targets.device.type == "cpu" and (library := native_viterbi().library) is not None:
        return _native_search(library, targets, first, bits, name)
    return torch_search(targets, first, bits, name)


def torch_search(targets: torch.Tensor, first: torch.Tensor, bits: int, name: str) -> torch.Tensor:
    """The reference: states of the cheapest path from node `first` back to it; -1: between any two."""
    parts = zip(targets.split(_TILES), first.split(_TILES), strict=True)
    return torch.cat([_torch_search(part, nodes, bits, name) for part, nodes in parts])


def _torch_search(targets: torch.Tensor, first: torch.Tensor, bits: int, name: str) -> torch.Tensor:
    count, length = targets.shape
    choices, device = 1 << bits, targets.device
    nodes = STATES >> bits
    values = values_of(torch.arange(STATES, device=device), name)
    number = torch.arange(nodes, device=device)
    reached = (first[:, None] < 0) | (first[:, None] == number)
    costs = torch.where(reached, 0.0, -_BLOCKED)
    taken = torch.empty(length, count, nodes, dtype=torch.uint8, device=device)
    for index in range(length):
        spent = (values - targets[:, index, None]).square_()
        # A state is its node before and the new bits: [count, k, node behind it].
        spent = (spent.view(count, nodes, choices) + costs[:, :, None]).view(count, choices, nodes)
        costs, chosen = spent.min(dim=1)
        taken[index] = chosen
    node = torch.where(first < 0, costs.argmin(dim=1), first.long())
    states = torch.empty(count, length, dtype=torch.int32, device=device)
    for index in range(length - 1, -1, -1):
        choice = taken[index].gather(1, node[:, None])[:, 0].long()
        state = choice << (STATE_BITS - bits) | node
        states[:, index] = state
        node = state >> bits
    return states


class _ViterbiCall(ctypes.Structure):
    """`ViterbiCall` of `viterbi.c`."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("targets", "values", "first", "states")],
        *[(name, ctypes.c_int64) for name in ("sequences", "length", "bits", "threads")],
    ]


def native_viterbi() -> Native:
    """The compiled search, or the reason why there is none."""
    return native(Path(__file__).with_name("viterbi.c"))


@lru_cache
def _laid_out(bits: int, name: str) -> torch.Tensor:
    """The codebook, float32 `[65536]`, in the order in which the kernel reads it."""
    values = torch.from_numpy(codebook(name).astype("float32"))
    if bits > 3:
        return values
    return values.view(1 << bits, -1, 1 << bits).permute(2, 0, 1).contiguous().flatten()


def _native_search(
    library: ctypes.CDLL, targets: torch.Tensor, first: torch.Tensor, bits: int, name: str
) -> torch.Tensor:
    targets = targets.to(torch.float32).contiguous()
    first = first.to(torch.int32).contiguous()
    states = torch.empty(targets.shape, dtype=torch.uint16)
    values = _laid_out(bits, name)
    call = _ViterbiCall(
        targets.data_ptr(),
        values.data_ptr(),
        first.data_ptr(),
        states.data_ptr(),
        *targets.shape,
        bits,
        torch.get_num_threads(),
    )
    if library.llmopt_viterbi(ctypes.byref(call)):
        raise MemoryError("no memory for the search of a trellis")
    return states.to(torch.int32)

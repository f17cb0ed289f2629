# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false
"""The Viterbi search of a trellis in Triton: a program has one sequence at a time, and all its nodes' costs.

A step's costs, 64 KiB at most, and the codebook stay in the multiprocessor's first cache; which transition
won goes to a program's part of a workspace, for the way back.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _squared(values, target, NARROW: tl.constexpr):
    """Squares of differences: of int16, which wrap around, the upper 16 of their 31 bits, rounded."""
    differences = values - target
    if NARROW:
        differences = differences.to(tl.int32)
        return (differences * differences + 16384) >> 15
    return differences * differences


@triton.jit
def _rounded(target, largest, factor, NARROW: tl.constexpr):
    """A target as the search takes it: int16 up to 4 bits, beyond them float32."""
    if NARROW:
        target = tl.minimum(tl.maximum(target, -largest), largest) * factor
        # Adding 1.5 * 2**23 leaves a float32 no fraction bits: rounds half to even, as torch does.
        target = ((target + 12582912.0) - 12582912.0).to(tl.int16)
    return target


@triton.jit(do_not_specialize=["num_sequences", "length", "side"])
def _nearest_states(
    target_ptr,
    value_ptr,
    state_ptr,
    cost_ptr,
    taken_ptr,
    num_sequences,
    length,
    side,
    largest,
    factor,
    BITS: tl.constexpr,
    NARROW: tl.constexpr,
    MOST: tl.constexpr,
    STRETCH: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Grid: programs, each with costs [2, nodes] and choices uint8 [length, nodes] (`taken_ptr`) of its own.

    The first search is of `2 * side` targets around the seam, between any two nodes; the second one of all,
    from the node that the first passes at the seam back to it. A step goes over `WIDTH` nodes at a time: a
    state is the choice `k` of what lay before, above the node that it leads to.
    """
    CHOICES: tl.constexpr = 1 << BITS
    NODES: tl.constexpr = 65536 >> BITS
    choice = tl.arange(0, CHOICES)[:, None]
    lanes = tl.arange(0, WIDTH)
    costs = cost_ptr + tl.program_id(0).to(tl.int64) * 2 * NODES
    taken = taken_ptr + tl.program_id(0).to(tl.int64) * length * NODES
    for sequence in range(tl.program_id(0), num_sequences, tl.num_programs(0)):
        first = -1
        for search in range(2):
            steps = tl.where(search == 0, 2 * side, length)
            offset = tl.where(search == 0, length - side, 0)
            for begin in range(0, NODES, WIDTH):
                node_id = begin + lanes
                is_open = (first < 0) | (node_id == first)
                cost = tl.where(is_open, 0, MOST).to(cost_ptr.dtype.element_ty)
                tl.store(costs + node_id, cost)
            # What every thread has stored is read by all.
            tl.debug_barrier()
            spare = 0
            if not NARROW:
                spare = 0.0
            for step in range(steps):
                target = tl.load(target_ptr + sequence * length + (step + offset) % length)
                target = _rounded(target, largest, factor, NARROW)
                before, behind = costs + step % 2 * NODES, costs + (step + 1) % 2 * NODES
                shift = step * BITS
                begun = first & (NODES - 1) & ((NODES - 1) >> shift)
                lowest = MOST
                for begin in range(0, NODES, WIDTH):
                    node_id = begin + lanes
                    state = choice * NODES + node_id[None, :]
                    spent = _squared(tl.load(value_ptr + state), target, NARROW)
                    spent += tl.load(before + (state >> BITS)) - spare
                    # Only in the first steps are there nodes that no path from the first one reaches.
                    is_away = (first >= 0) & ((state >> (BITS + shift)) != begun)
                    if NARROW:
                        # A cost and its choice are one number: the least is the first of the cheapest.
                        both = (spent << BITS) | choice
                        least = tl.min(both, 0)
                        chosen = least & (CHOICES - 1)
                        least = least >> BITS
                        if shift < 16 - BITS:
                            chosen = tl.min(tl.where(is_away, 1 << 30, both), 0) & (CHOICES - 1)
                    else:
                        least, chosen = tl.min(spent, 0, return_indices=True)
                        if shift < 16 - BITS:
                            chosen = tl.argmin(tl.where(is_away, float("inf"), spent), 0)
                    least = tl.minimum(least, MOST)
                    tl.store(behind + node_id, least.to(cost_ptr.dtype.element_ty))
                    tl.store(taken + step * NODES + node_id, chosen.to(tl.uint8))
                    if NARROW:
                        lowest = tl.minimum(lowest, tl.min(least, 0))
                if NARROW:
                    spare = tl.where((step + 1) % STRETCH == 0, lowest, 0)
                tl.debug_barrier()
            whole = tl.load(costs + steps % 2 * NODES + tl.arange(0, NODES))
            node = tl.where(first < 0, tl.argmin(whole, 0), first)
            for back in range(steps):
                step = steps - 1 - back
                state = tl.load(taken + step * NODES + node).to(tl.int32) * NODES + node
                node = state >> BITS
                if search == 0:
                    first = tl.where(step == side, node, first)
                else:
                    tl.store(state_ptr + sequence * length + step, state)
            tl.debug_barrier()


WORKSPACE = 1 << 30
"""Most bytes of the choices, which limit the programs where one's are many: 8 MiB at one bit."""
TRANSITION_BYTES, WARPS = 16384, 16
"""Costs of the transitions that a program weighs at once, and its warps; more spill from registers."""


def search_in_triton(
    targets: torch.Tensor,
    values: torch.Tensor,
    side: int,
    bits: int,
    rounding: tuple[float, float, float, int],
    programs: int,
) -> torch.Tensor:
    """Both searches of `nearest_states` in one launch, `side` targets each side of the seam for the first.
    `values`: codebook `[65536]`; `rounding`: bound and factor of targets, if integers, highest cost, and
    steps after which the least cost is 0 again."""
    count, length = targets.shape
    largest, factor, most, stretch = rounding
    nodes, device = len(values) >> bits, targets.device
    states = torch.empty(count, length, dtype=torch.int32, device=device)
    programs = max(1, min(count, programs, WORKSPACE // (length * nodes)))
    costs = torch.empty(programs, 2, nodes, dtype=values.dtype, device=device)
    taken = torch.empty(programs, length, nodes, dtype=torch.uint8, device=device)
    kernel: Any = _nearest_states
    buffers = targets.to(torch.float32).contiguous(), values, states, costs, taken
    kernel[(programs,)](
        *(*buffers, count, length, side, largest, factor),
        BITS=bits,
        NARROW=not values.is_floating_point(),
        MOST=most,
        STRETCH=stretch,
        WIDTH=(TRANSITION_BYTES // values.element_size()) >> bits,
        num_warps=WARPS,
        num_stages=1,
        enable_fp_fusion=False,
    )
    return states

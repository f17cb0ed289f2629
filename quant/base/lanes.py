"""Sums over samples that are the same for any number of workers.

Samples are cut into at most `LANES` lanes, whole ones for a worker. Sums go in order within a lane, and over
lanes in a fixed tree of pairs. A process that is alone sums everything in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import distributed as dist

from . import workers

LANES = 16
"""More keep more workers busy, and take more memory for sums of lanes: of n lanes a worker holds log2(n)."""
Part = torch.Tensor | None


class LaneSums:
    """Sums over lanes, in a fixed tree of pairs (0 and 1, 2 and 3, then both), a sum for whole branches."""

    def __init__(self) -> None:
        self.branches: list[tuple[int, int, list[Part]]] = []

    def add(self, slot: int, parts: Sequence[Part], level: int = 0) -> None:
        """Add the sums of a lane, or of the branch at a place of a level; they are changed in place."""
        parts = list(parts)
        while slot % 2 and self.branches and self.branches[-1][:2] == (level, slot - 1):
            parts = [_sum(*pair) for pair in zip(self.branches.pop()[2], parts, strict=True)]
            level, slot = level + 1, slot // 2
        self.branches.append((level, slot, parts))

    def total(self) -> list[Part]:
        """The sum of all branches, the last two first."""
        if not self.branches:
            return []
        *others, last = [parts for _, _, parts in self.branches]
        for parts in reversed(others):
            last = [_sum(*pair) for pair in zip(parts, last, strict=True)]
        return last


def _sum(left: Part, right: Part) -> Part:
    """The sum in the memory of one of them; nothing counts as zeros, which turn -0 into 0."""
    if left is None or right is None:
        present = right if left is None else left
        return None if present is None else present.add_(0.0)
    return left.add_(right)


def totals(sums: Sequence[LaneSums], like: Sequence[Sequence[torch.Tensor]]) -> list[list[Part]]:
    """Sums over all workers' lanes, which meet; None: of no lane. `sums` are emptied, shaped as `like`."""
    shapes = workers.gathered(
        [
            [(level, slot, [part is not None for part in parts]) for level, slot, parts in branches]
            for branches in (item.branches for item in sums)
        ]
    )
    answers: list[list[Part]] = []
    for number, (lane_sums, template) in enumerate(zip(sums, like, strict=True)):
        home = number % workers.count()
        whole = LaneSums()
        for sender, branches in enumerate(shapes):
            own = iter(lane_sums.branches)
            for level, slot, present in branches[number]:
                parts = next(own)[2] if sender == workers.rank() else [None] * len(present)
                if sender != home:
                    parts = [
                        _moved(part, tensor, sender, home) if there else None
                        for part, tensor, there in zip(parts, template, present, strict=True)
                    ]
                whole.add(slot, parts, level)
        lane_sums.branches = []
        total = (whole.total() if workers.rank() == home else []) or [None] * len(template)
        for index, tensor in enumerate(template):
            if any(present[index] for of_rank in shapes for _, _, present in of_rank[number]):
                part = total[index]
                part = torch.empty_like(tensor) if part is None else part.contiguous()
                if workers.count() > 1:
                    dist.broadcast(_raw(part), home)
                total[index] = part
        answers.append(total)
    return answers


def _moved(part: Part, like: torch.Tensor, sender: int, home: int) -> Part:
    """A tensor at its home, which comes from another worker."""
    if workers.rank() == sender and part is not None:
        dist.send(_raw(part), home)
    elif workers.rank() == home:
        received = torch.empty_like(like)
        dist.recv(_raw(received), sender)
        return received
    return None


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def largest(tensors: Sequence[torch.Tensor]) -> None:
    """Replace the values of tensors by the largest of all workers, which meet."""
    for tensor in tensors:
        if workers.count() > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)


@dataclass(frozen=True, slots=True)
class Share:
    """Samples of one worker, whole `lanes` of `size`, of `samples` in all; the last lane may be shorter."""

    samples: int
    size: int
    lanes: range

    @property
    def count(self) -> int:
        return max(1, -(-self.samples // self.size))

    @property
    def own(self) -> slice:
        return slice(self.lanes.start * self.size, min(self.samples, self.lanes.stop * self.size))

    def rows(self, lane: int) -> slice:
        start = (lane - self.lanes.start) * self.size
        return slice(start, min(start + self.size, self.own.stop - self.own.start))

    def ended(self, stop: int) -> int | None:
        lane, rest = divmod(min(stop, self.own.stop - self.own.start) - 1, self.size)
        at_end = rest == self.size - 1 or stop >= self.own.stop - self.own.start
        return self.lanes.start + lane if at_end else None


def shares_of(samples: int, rows: int, number: int) -> list[Share]:
    """The shares of so many workers of samples that are run so many at a time."""
    batches = -(-samples // rows)
    whole = Share(samples, max(1, -(-batches // LANES)) * rows, range(0))
    ends = [whole.count * worker // number for worker in range(number + 1)]
    return [replace(whole, lanes=range(*pair)) for pair in pairwise(ends)]


def share_of(samples: int, rows: int) -> Share | None:
    return shares_of(samples, rows, workers.count())[workers.rank()] if workers.together() else None

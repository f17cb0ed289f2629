"""Layers loaded by several threads: one reads and packs its weights beside the others.

What a layer takes is partly Python and the file's pages, during which the threads of a single tensor's
operations are idle.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")

MOST_LOADERS = 8
"""Layers in hand at once: each holds its unpacked codes until they are packed."""


def load_layers(load: Callable[[int], T], count: int, device: torch.device) -> list[T]:
    """`load` of every index below `count`, in order; on a CPU by as many threads as torch has.

    Raises:
        The first exception, in the order of the layers; layers that were not begun are not loaded.
    """
    threads = torch.get_num_threads()
    loaders = min(threads, MOST_LOADERS, count)
    if device.type != "cpu" or loaders < 2:
        return [load(index) for index in range(count)]
    pool = ThreadPoolExecutor(
        loaders, initializer=torch.set_num_threads, initargs=(threads // loaders,)
    )
    try:
        return list(pool.map(load, range(count)))
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)

"""Tensor-parallel worker process: holds one shard of the model and executes the calls that rank 0 broadcasts.

`main` takes its end of a pipe (a file descriptor) and its device from the command line. It ends when the
other end of the pipe is closed.
"""

from __future__ import annotations

import atexit
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from ...quant.base.errors import BadInput
from ...quant.open import open_checkpoint
from ..base.topology import Topology
from ..cache.kv_cache import KvCache
from ..model.open import CheckedShard, open_model
from ..model.parallel.group import Group, PeerLost
from ..model.parallel.shard import Shard
from ..scheduling.window import Window
from .channel import Channel
from .placement import bind_shard, share_of


@dataclass(frozen=True, slots=True)
class Setup:
    """Parameters with which a worker loads its shard."""

    rank: int
    size: int
    folder: Path
    device: torch.device
    dtype: torch.dtype
    max_model_len: int | None
    input_bits: int
    loras: Mapping[str, Path]
    stream: Window | None
    topology: Topology
    num_threads: int | None
    max_loras: int | None = None
    cache_dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """A worker's reply after loading: the bytes of its shard, or the error message of its refusal."""

    bytes_held: int = 0
    bytes_per_step: int = 0
    refusal: str | None = None


def work(channel: Channel) -> None:
    """Load the shard of the `Setup` message, then execute broadcast calls until the channel is closed."""
    setup: Setup = channel.receive()
    choose = bind_shard if setup.device.type == "cpu" else share_of
    torch.set_num_threads(choose(setup.topology, setup.rank, setup.size, setup.num_threads))
    group = Group(setup.rank, setup.size, setup.device)
    try:
        model, _ = open_model(
            open_checkpoint(setup.folder),
            setup.max_model_len,
            setup.device,
            setup.dtype,
            setup.input_bits,
            setup.loras,
            Shard(setup.rank, setup.size, group),
            setup.stream,
            setup.max_loras,
            setup.cache_dtype,
        )
    except BadInput as error:
        channel.send(Loaded(refusal=str(error)))
        return
    channel.send(Loaded(model.bytes_held, model.bytes_per_step))
    rendezvous: Path = channel.receive()
    # The engine process that made the folder may be killed before it removes it.
    atexit.register(shutil.rmtree, rendezvous.parent, ignore_errors=True)
    group.connect(rendezvous)
    if isinstance(model, CheckedShard):
        try:
            model.check_shards()
        except BadInput:  # which rank 0 finds too, and reports
            return
    cache = KvCache(model.kv_layouts, 0, 1, setup.device, setup.dtype)
    while True:
        call, argument = channel.receive()
        if call == "cache":
            num_blocks, block_size, dtype, on_host = argument
            cache = KvCache(model.kv_layouts, num_blocks, block_size, setup.device, dtype, on_host)
        elif call == "forward":
            model.forward(argument, cache.layers)
        elif call == "logits":
            model.logits(argument)
        elif call == "load_lora" and model.lora_bank is not None:
            key, folder = argument
            model.lora_bank.attach(key, model.lora_bank.read(folder))
        elif call == "unload_lora" and model.lora_bank is not None:
            model.lora_bank.detach(argument)
        elif call == "copy":
            cache.copy(argument)
        else:
            cache.copy_slots(argument)


def main() -> None:
    """Entry point: `work` on the pipe and device of the command line."""
    device = torch.device(sys.argv[2])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        work(Channel(Connection(int(sys.argv[1])), device))
    except (EOFError, ConnectionError):  # the engine process closed the pipe, or ended
        sys.exit(0)
    except PeerLost:  # rank 0 reports which
        sys.exit(1)

"""Tensor-parallel worker process: holds one shard of the model and executes the calls that rank 0 broadcasts.

`main` takes its end of a pipe (a file descriptor) and its device from the command line. It ends when the
other end of the pipe is closed.
"""

from __future__ import annotations

import atexit
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from ...quant.base.errors import BadInput
from ...quant.open import open_checkpoint
from ..base.topology import Topology
from ..cache.kv_cache import KvCache
from ..execution.graph_setting import GraphName, GraphSetting, Replay, capture_on
from ..model.layers.attention import StepInputs
from ..model.open import CausalModel, CheckedShard, open_model
from ..model.parallel.group import Group, PeerLost
from ..model.parallel.shard import Shard
from ..scheduling.step_plan import BlockCopies
from ..scheduling.window import Window
from .channel import Channel
from .followed_graphs import FollowedGraphs, GraphSizes, warm_up
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
    channel.broadcast = group.broadcast
    calls = _Calls(model, setup, group, channel)
    while True:
        call, argument = channel.receive()
        getattr(calls, call)(argument)


class _Calls:
    """The calls that rank 0 broadcasts, by name, on this rank's shard; `cache` is the first."""

    _cache: KvCache

    def __init__(self, model: CausalModel, setup: Setup, group: Group, channel: Channel) -> None:
        self._model, self._setup, self._group, self._channel = model, setup, group, channel
        self._graphs: FollowedGraphs | None = None

    def cache(self, sizes: tuple[int, int, torch.dtype, int]) -> None:
        num_blocks, block_size, dtype, on_host = sizes
        given = block_size, self._setup.device, dtype, on_host
        self._graphs = None
        self._cache = KvCache(self._model.kv_layouts, num_blocks, *given)

    def forward(self, inputs: StepInputs) -> None:
        self._model.forward(inputs, self._cache.layers)

    def logits(self, hidden: torch.Tensor) -> None:
        self._model.logits(hidden)

    def graphs(self, sizes: GraphSizes) -> None:
        device, dtype = self._setup.device, self._setup.dtype
        cached = self._model, self._cache.layers, self._cache.block_size, sizes.max_blocks
        capture = capture_on(device, self._group.silent)
        setting = GraphSetting(*cached, device, dtype, capture, follows=True)
        self._graphs = FollowedGraphs(setting, sizes, self._group)
        warm_up(self._group, sizes, self._model.hidden_size, dtype)

    def capture(self, name: GraphName) -> None:
        assert self._graphs is not None
        self._channel.send(self._graphs.capture(name))

    def replay(self, step: Replay) -> None:
        assert self._graphs is not None
        self._graphs.replay(step)

    def give_up(self, kind: str) -> None:
        assert self._graphs is not None
        self._graphs.give_up(kind)

    def load_lora(self, adapter: tuple[str, Path]) -> None:
        key, folder = adapter
        assert self._model.lora_bank is not None
        self._model.lora_bank.attach(key, self._model.lora_bank.read(folder))

    def unload_lora(self, key: str) -> None:
        assert self._model.lora_bank is not None
        self._model.lora_bank.detach(key)

    def copy(self, copies: BlockCopies) -> None:
        self._cache.copy(copies)

    def copy_slots(self, copies: Sequence[tuple[int, int]]) -> None:
        self._cache.copy_slots(copies)


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

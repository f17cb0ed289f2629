"""Tensor-parallel worker process: holds one shard of the model and executes the calls that rank 0 broadcasts.

Messages go by pipe as pickle; tensors of a GPU follow by NCCL. `main` takes its end of the pipe and its
device from the command line; the process ends when the other end is closed.
"""

from __future__ import annotations

import atexit
import io
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...base.errors import BadInput, first_line
from ...quant.source.models import open_checkpoint
from ..base.host import Topology, place, read_topology, thread_limit
from ..cache.kv_cache import KvCache
from ..kernels.common.cpu_measurements import choose_threads
from ..model.adapter.open import CausalModel, open_model
from ..model.decoder.decoder import Decoder
from ..model.layers.attention import StepInputs
from ..model.layers.parallel import Group, PeerLost, Shard
from ..model.layers.spec import LoadingOptions
from ..scheduling.step_plan import BlockCopies
from .decode_graphs import StepGraphs
from .graph_setting import GraphName, GraphReplay, GraphSetting, capture_on
from .token_graphs import TokenGraphs


class PackedMessage(NamedTuple):
    """Serialized value; its contiguous tensors of a GPU, `on_device`, follow by broadcasts."""

    content: bytes
    on_device: list[torch.Tensor]


class Channel:
    """One end of a pipe for values; tensors go to `device`, `broadcast` by rank 0, in place."""

    def __init__(
        self,
        connection: Connection,
        device: torch.device,
        broadcast: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self._connection = connection
        self._device = device
        self.broadcast = broadcast

    def send(self, message: PackedMessage) -> None:
        self._connection.send_bytes(message.content)

    def receive(self) -> Any:
        """Wait for a value; raise `EOFError` or `OSError` where the other end is closed."""
        unpickler = _Unpickler(io.BytesIO(self._connection.recv_bytes()), self._device)
        value = unpickler.load()
        for tensor in unpickler.on_device:
            assert self.broadcast is not None, "tensors on a GPU before the group is connected"
            self.broadcast(tensor)
        return value

    def close(self) -> None:
        self._connection.close()


def pack(value: object) -> PackedMessage:
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, pickle.HIGHEST_PROTOCOL)
    pickler.dump(value)
    return PackedMessage(buffer.getvalue(), pickler.on_device)


class _Pickler(pickle.Pickler):
    """Pickles tensors as raw bytes: torch's own reduction writes a zip archive for each."""

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.on_device: list[torch.Tensor] = []

    def persistent_id(self, obj: object) -> tuple[str, tuple[int, ...], bytes | None] | None:
        if not isinstance(obj, torch.Tensor):
            return None
        name, shape = str(obj.dtype).removeprefix("torch."), tuple(obj.shape)
        if obj.device.type == "cuda":
            if not obj.numel():
                return name, shape, b""
            self.on_device.append(obj.detach().contiguous())
            return name, shape, None
        data = obj.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return name, shape, data.numpy().tobytes()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file)
        self._device = device
        self.on_device: list[torch.Tensor] = []

    def persistent_load(self, pid: Any) -> torch.Tensor:
        name, shape, data = pid
        dtype = getattr(torch, name)
        if not data:
            empty = torch.empty(shape, dtype=dtype, device=self._device)
            if data is None:
                self.on_device.append(empty)
            return empty
        return torch.frombuffer(bytearray(data), dtype=dtype).view(shape).to(self._device)


@cache
def machine() -> Topology:
    """The CPUs that this process was started on: read once, before it binds itself to some of them."""
    return read_topology()


def bind_shard(topology: Topology, rank: int, size: int, num_threads: int | None) -> int:
    """Bind this thread to its shard's NUMA node; returns `num_threads`, or those of its cores."""
    placement = place(topology, rank, size)
    if placement.cpus and (num_threads or 1) <= len(placement.cpus):
        os.sched_setaffinity(0, placement.cpus)
    most = share_of(topology, rank, size, num_threads)
    if num_threads is not None or thread_limit() is not None or size > 1:
        return most
    return choose_threads(most).num_threads


def share_of(topology: Topology, rank: int, size: int, num_threads: int | None) -> int:
    """Threads of a shard without a measurement and without binding, as for a GPU."""
    if num_threads is not None:
        return num_threads
    most = place(topology, rank, size).num_threads
    return min(most, thread_limit() or most)


class GraphSizes(NamedTuple):
    """Sizes of a model's graphs, as `StepGraphs` and `TokenGraphs` take them; the same on every rank."""

    sizes: tuple[int, ...]
    token_sizes: tuple[int, ...]
    max_blocks: int


def warm_up(group: Group, sizes: GraphSizes, width: int | None, dtype: torch.dtype) -> None:
    """All-reduce as many numbers as captures will, on all ranks: NCCL connects at first use."""
    rows = sorted({*sizes.sizes, *sizes.token_sizes})
    for count in rows:  # the sums of squares of a `ShardedNorm`
        group.all_reduce(torch.zeros(count, 1, dtype=torch.float32, device=group.device))
    for count in sorted({1, *(size * (width or 1) for size in rows)}):
        group.all_reduce(torch.zeros(count, dtype=dtype, device=group.device))


@dataclass(frozen=True, slots=True)
class ShardSetup:
    rank: int
    size: int
    folder: Path
    options: LoadingOptions
    topology: Topology
    num_threads: int | None


@dataclass(frozen=True, slots=True)
class LoadedShard:
    """Reply of a worker after loading: bytes of its shard, or the message of its refusal."""

    bytes_held: int = 0
    bytes_per_step: int = 0
    refusal: str | None = None


def work(channel: Channel) -> None:
    """Load the shard of a `ShardSetup`, then execute broadcast calls until the channel is closed."""
    setup: ShardSetup = channel.receive()
    device = setup.options.device
    choose = bind_shard if device.type == "cpu" else share_of
    torch.set_num_threads(choose(setup.topology, setup.rank, setup.size, setup.num_threads))
    group = Group(setup.rank, setup.size, device)
    try:
        shard = Shard(setup.rank, setup.size, group)
        model, _ = open_model(open_checkpoint(setup.folder), setup.options, shard)
    except BadInput as error:
        channel.send(pack(LoadedShard(refusal=str(error))))
        return
    channel.send(pack(LoadedShard(model.bytes_held, model.bytes_per_step)))
    rendezvous: Path = channel.receive()
    # The engine process that made the folder may be killed before it removes it.
    atexit.register(shutil.rmtree, rendezvous.parent, ignore_errors=True)
    group.connect(rendezvous)
    if not isinstance(model, Decoder):
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
    _graphs: dict[str, StepGraphs | TokenGraphs]

    def __init__(
        self, model: CausalModel, setup: ShardSetup, group: Group, channel: Channel
    ) -> None:
        self._model, self._setup, self._group, self._channel = model, setup, group, channel

    def cache(self, sizes: tuple[int, int, torch.dtype, int]) -> None:
        num_blocks, block_size, dtype, on_host = sizes
        self._graphs, device = {}, self._setup.options.device
        layouts = self._model.kv_layouts
        self._cache = KvCache(layouts, num_blocks, block_size, device, dtype, on_host)

    def forward(self, inputs: StepInputs) -> None:
        self._model.forward(inputs, self._cache.layers)

    def logits(self, hidden: torch.Tensor) -> None:
        self._model.logits(hidden)

    def graphs(self, sizes: GraphSizes) -> None:
        device, dtype = self._setup.options.device, self._setup.options.dtype
        cached = self._model, self._cache.layers, self._cache.block_size, sizes.max_blocks
        capture = capture_on(device, self._group.silent)
        setting = GraphSetting(*cached, device, dtype, capture, follows=True)
        decode, tokens = StepGraphs(setting, sizes.sizes), TokenGraphs(setting, sizes.token_sizes)
        self._graphs = {"decode": decode, "tokens": tokens}
        warm_up(self._group, sizes, self._model.hidden_size, dtype)

    @torch.inference_mode()
    def capture(self, name: GraphName) -> None:
        refusal = None
        try:
            self._graphs[name.kind].capture_padding(name.key)
        except PeerLost:
            raise
        except Exception as error:  # rank 0 tells of it, and all ranks go on without the graph
            refusal = f"{type(error).__name__}: {first_line(error)}"
        self._channel.send(pack(refusal))

    @torch.inference_mode()
    def replay(self, step: GraphReplay) -> None:
        graphs, key = self._graphs[step.name.kind], step.name.key
        graphs.static(key).share(step.unshared, self._group.broadcast)
        graph = graphs.captured(key)
        assert graph is not None, "rank 0 replays what every rank has captured"
        hidden = graph.replay()
        if step.num_logits:
            self._model.logits(hidden[: step.num_logits])

    def give_up(self, kind: str) -> None:
        self._graphs[kind].give_up()

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
    device = torch.device(sys.argv[2])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        work(Channel(Connection(int(sys.argv[1])), device))
    except (EOFError, ConnectionError):  # the engine process closed the pipe, or ended
        sys.exit(0)
    except PeerLost:  # rank 0 reports which
        sys.exit(1)

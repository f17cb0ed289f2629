"""Tensor-parallel workers, seen from rank 0: spawning, loading, broadcasting calls, shutting down."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import torch

from ...base.errors import BadInput
from ...quant.model.checkpoint import Checkpoint
from ..cache.kv_cache import KvCache, check_stored_dtype, stored_dtype
from ..config.config import EngineConfig
from ..model.adapter.open import CausalModel, open_model
from ..model.decoder.decoder import Decoder
from ..model.layers.parallel import Group, PeerLost, Shard
from ..model.layers.spec import LoadingOptions
from .worker import Channel, GraphSizes, LoadedShard, ShardSetup, machine, pack, warm_up

GRACE_SECONDS = 5.0
"""Seconds for a process to exit before it is killed, or to be detected as ended."""


class Workers:
    """Workers of ranks 1, 2, …; this process is rank 0. Each ends when its pipe is closed."""

    def __init__(self, setup: ShardSetup) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="llmopt-", ignore_cleanup_errors=True)
        self._rendezvous_file = Path(self._home.name) / "meeting-point"
        device = setup.options.device
        self.group = Group(0, setup.size, device)
        self.group.explain = self._explanation
        self.processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []
        self.loaded: list[LoadedShard] = []
        """Each worker's reply after loading."""
        self._model: CausalModel | None = None
        self.close = weakref.finalize(self, _end, self.processes, self._channels, self._home)
        for rank in range(1, setup.size):
            device = torch.device("cuda", rank) if device.type == "cuda" else device
            options = replace(setup.options, device=device)
            engine_end, worker_end = Pipe()
            call = f"from {__package__}.worker import main; main()"
            # In a new session, so that Ctrl-C reaches this process only, which then closes the pipe.
            process = subprocess.Popen(
                [sys.executable, "-c", call, str(worker_end.fileno()), str(device)],
                pass_fds=[worker_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            worker_end.close()
            self.processes.append(process)
            self._channels.append(Channel(engine_end, torch.device("cpu")))
            self._send(self._channels[-1:], replace(setup, rank=rank, options=options))

    def wait_until_loaded(self) -> None:
        """Wait for all shards, then join the group. BadInput: one cannot load; PeerLost: one ended."""
        for channel in self._channels:
            loaded: LoadedShard = self._receive(channel)
            if loaded.refusal is not None:
                raise BadInput(loaded.refusal)
            self.loaded.append(loaded)
        self._send(self._channels, self._rendezvous_file)
        self.group.connect(self._rendezvous_file)

    def attach(self, model: CausalModel, cache: KvCache, num_blocks: int) -> None:
        """Broadcast every call of `model` and every copy in `cache` to the workers from now on."""
        self.broadcast("cache", (num_blocks, cache.block_size, cache.dtype, cache.num_host_blocks))
        self._model = model
        model.broadcast = cache.broadcast = self.broadcast

    def open_graphs(self, sizes: GraphSizes, dtype: torch.dtype) -> None:
        """Let the workers make `SharedGraph`s with this rank, on the attached cache."""
        assert self._model is not None
        self.broadcast("graphs", sizes)
        warm_up(self.group, sizes, self._model.hidden_size, dtype)

    def replies(self) -> list[str | None]:
        return [self._receive(channel) for channel in self._channels]

    @contextmanager
    def alone(self) -> Iterator[None]:
        assert self._model is not None
        before, self._model.broadcast = self._model.broadcast, None
        try:
            yield
        finally:
            self._model.broadcast = before

    def broadcast(self, call: str, argument: Any) -> None:
        self._send(self._channels, (call, argument))

    def _send(self, channels: Sequence[Channel], value: object) -> None:
        message = pack(value)
        for channel in channels:
            try:
                channel.send(message)
            except OSError as error:
                raise PeerLost(self._lost()) from error
        for tensor in message.on_device:
            self.group.broadcast(tensor)

    def _receive(self, channel: Channel) -> Any:
        try:
            return channel.receive()
        except (EOFError, OSError) as error:
            raise PeerLost(self._lost()) from error

    def _lost(self) -> str:
        return f"tensor parallel: {self._explanation() or 'a worker has closed its pipe'}"

    def _explanation(self) -> str | None:
        """Worker that ended and how, if one ends within `GRACE_SECONDS`."""
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            for rank, process in enumerate(self.processes, start=1):
                if (code := process.poll()) is not None:
                    how = f"signal {-code}" if code < 0 else f"exit code {code}"
                    return f"worker {rank} (process {process.pid}) ended with {how}; start again"
            time.sleep(0.02)
        return None


def open_shards(
    config: EngineConfig, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype
) -> tuple[CausalModel, int, Workers | None]:
    """Rank 0's model (shard), its `max_model_len`, and the workers, None for one rank. BadInput: as
    `open_model`, or not divisible by `tensor_parallel_size`; PeerLost: a worker ended."""
    size, folder = config.tensor_parallel_size, checkpoint.path
    stored = stored_dtype(config, device, dtype)
    check_stored_dtype(stored, device)  # before kernels are tried with it
    bits = config.activation_bits((checkpoint.quantization_config or {}).get("quant_method"))

    loading = config.loras, config.max_loras, config.stream, stored
    options = LoadingOptions(device, dtype, config.max_model_len, bits, *loading)
    if size == 1:
        return *open_model(checkpoint, options), None
    if device.type == "cuda" and torch.cuda.device_count() < size:
        raise BadInput(
            f"tensor_parallel_size = {size}: this machine has {torch.cuda.device_count()} CUDA devices"
        )
    workers = Workers(ShardSetup(0, size, folder, options, machine(), config.num_threads))
    try:
        model, longest = open_model(checkpoint, options, Shard(0, size, workers.group))
        workers.wait_until_loaded()
        if not isinstance(model, Decoder):
            model.check_shards()
    except BaseException:
        for process in workers.processes:  # still busy with loading
            process.kill()
        workers.close()
        raise
    return model, longest, workers


def _end(
    processes: list[subprocess.Popen[bytes]],
    channels: list[Channel],
    home: tempfile.TemporaryDirectory[str],
) -> None:
    for channel in channels:
        channel.close()
    for process in processes:
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    home.cleanup()

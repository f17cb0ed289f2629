"""Tensor parallelism of a model (Megatron-LM): process group, a rank's part, slices of weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from ....base.errors import BadInput, Failure
from ....quant.families.shapes import Latent, ModelShape
from ....quant.kinds.base.incoherence import BLOCK as TRANSFORMED
from ....quant.kinds.base.tensor import QuantizedTensor
from ....quant.kinds.codebook.kind import CodebookTensor
from ....quant.kinds.e8p.kind import E8pTensor
from ....quant.kinds.fp4.kind import Fp4Tensor
from ....quant.kinds.fp8.kind import BLOCK, Fp8Tensor
from ....quant.kinds.ggml.tensor import GgufTensor
from ....quant.kinds.integer.kind import IntTensor
from ....quant.kinds.lookup.kind import LookupTensor
from ....quant.kinds.trellis.kind import TrellisTensor
from ....quant.kinds.trellis.viterbi import TILE
from ....quant.kinds.vectorwise.kind import VectorwiseTensor
from ...config.compatibility import refuse
from ...kernels.common.graphs import call_or_capture
from .spec import ModelSpec

TIMEOUT = timedelta(minutes=5)
"""Timeout of rendezvous and collectives, after which a peer counts as dead."""


class PeerLost(Failure):
    """A process of the group ended or does not respond; the message names it."""


class Group:
    """Collectives over the tensor-parallel ranks, after all have called `connect`. gloo on CPUs, NCCL on
    GPUs, on the current stream: graphs capture them. BadInput: this torch lacks the backend; PeerLost, by
    every operation: another process has ended."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        is_available = distributed.is_available() and (
            distributed.is_nccl_available() if cuda else distributed.is_gloo_available()
        )
        if not is_available:
            backend = "NCCL" if cuda else "gloo"
            raise BadInput(f"tensor_parallel_size = {size}: this torch has no {backend}")
        self.rank, self.size, self.device = rank, size, device
        self._cuda, self._silent = cuda, False
        self._processes: Any = None
        self.explain: Callable[[], str | None] = lambda: None
        """Called for the reason when an operation fails."""

    def connect(self, rendezvous: Path) -> None:
        """Rendezvous through a file store; all ranks name the same `rendezvous` file."""
        file_store: Any = distributed.FileStore  # pyright: ignore[reportPrivateImportUsage]
        store = file_store(str(rendezvous), self.size)
        self._run(lambda: self._rendezvous(store))

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        part, options = part.contiguous(), distributed.AllreduceOptions()
        options.asyncOp = False
        self._collect(lambda: self._processes.allreduce([part], options))
        return part

    def broadcast(self, tensor: torch.Tensor) -> None:
        options = distributed.BroadcastOptions()
        options.rootRank, options.asyncOp = 0, False
        self._collect(lambda: self._processes.broadcast([tensor], options))

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Leave collectives out within the block: a warm-up must not wait for a rank on which it fails."""
        before, self._silent = self._silent, True
        try:
            yield
        finally:
            self._silent = before

    def all_gather_columns(self, part: torch.Tensor, width: int) -> torch.Tensor:
        """`[rows, width]` from all ranks' columns, split as by `Shard.vocabulary`; sent padded."""
        ends = [width * (rank + 1) // self.size for rank in range(self.size)]
        counts = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
        widest = max(counts)
        padded = part.new_zeros(part.shape[0], widest)
        padded[:, : part.shape[1]] = part
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        self._collect(lambda: self._processes.allgather([parts], [padded]))
        return torch.cat([p[:, :count] for p, count in zip(parts, counts, strict=True)], dim=1)

    def _rendezvous(self, store: Any) -> None:
        if self._cuda:
            # NCCL would register the buffers of a captured collective, for which (with NVLS) ranks exchange
            # messages on the host: a capture would wait for a rank on which it failed.
            os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
            options: Any = distributed.ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            kind: Any = distributed.ProcessGroupNCCL
        else:
            kind = distributed.ProcessGroupGloo
            options = kind._Options()
            options._devices = [kind.create_device(hostname="127.0.0.1")]
            options._timeout = TIMEOUT
        self._processes = kind(store, self.rank, self.size, options)

    def _collect(self, collective: Callable[[], Any]) -> None:
        """Run a collective; a capture records it instead."""

        def wait() -> None:  # the host with gloo, the current stream with NCCL
            if (work := collective()) is not None:
                work.wait()

        if not self._silent:
            call_or_capture(lambda: self._run(wait))

    def _run(self, operation: Callable[[], object]) -> None:
        try:
            operation()
        except RuntimeError as error:
            if self._cuda and torch.cuda.is_current_stream_capturing():
                raise  # of this device, such as out of memory: a capture waits for no peer
            reason = self.explain() or (str(error).splitlines() or ["no answer"])[0]
            raise PeerLost(f"tensor parallel: {reason}") from error


Weight = torch.Tensor | QuantizedTensor


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """Row ranges of stacked linears, or a column range of one, whose outputs need an all-reduce."""

    rows: tuple[tuple[slice, ...], ...] = ()
    columns: slice | None = None


def take(module: str, weight: Weight, rows: Sequence[slice], columns: slice | None) -> Weight:
    """A copy of some outputs (none given: all) and inputs of a weight. BadInput: it cannot be split there."""
    if rows:
        weight = _take_rows(module, weight, rows)
    if columns is not None:
        weight = _take_columns(module, weight, columns)
    return weight


def take_rows(tensor: torch.Tensor, rows: Sequence[slice]) -> torch.Tensor:
    return torch.cat([tensor[run] for run in rows])


def _take_rows(module: str, weight: Weight, rows: Sequence[slice]) -> Weight:
    if isinstance(weight, torch.Tensor):
        return take_rows(weight, rows)
    if isinstance(weight, E8pTensor):
        raise _refusal(module, weight, "along its outputs")
    blocks = isinstance(weight, Fp8Tensor) and weight.scheme.granularity == "block"
    if blocks or isinstance(weight, CodebookTensor | TrellisTensor):
        for run in rows:
            if run.start % BLOCK or (run.stop % BLOCK and run.stop != weight.out_features):
                raise _refusal(module, weight, f"between outputs {run.start} and {run.stop}", BLOCK)
    slices = [weight.rows(run) for run in rows]
    first, whole = slices[0], weight.parts()
    parts = {}
    for name, part in first.parts().items():
        # Parts without an output dimension, such as a permutation of the inputs, are the same in all slices.
        shared = name in whole and whole[name].shape == part.shape
        along = 1 if name == "trellis" else 0
        pieces = (piece.parts()[name] for piece in slices)
        parts[name] = part if shared else torch.cat([*pieces], dim=along)
    return _changed(first, parts)


def _take_columns(module: str, weight: Weight, columns: slice) -> Weight:
    if isinstance(weight, torch.Tensor):
        return weight[:, columns].clone()
    cut = _columns(weight, columns)
    if cut is None:
        raise _refusal(module, weight, "along its inputs")
    step, parts = cut
    if columns.start % step or columns.stop % step:
        where = f"between inputs {columns.start} and {columns.stop}"
        raise _refusal(module, weight, where, step)
    return _changed(weight, {name: part.clone() for name, part in parts.items()})


def _columns(weight: QuantizedTensor, columns: slice) -> tuple[int, dict[str, torch.Tensor]] | None:
    """How many inputs share a scale or a block, and the parts of whole groups of them, `columns`, as views;
    None: no split is possible."""

    def groups(size: int) -> slice:
        return slice(columns.start // size, columns.stop // size)

    if isinstance(weight, IntTensor) and weight.group_index is None:
        is_whole = weight.num_groups == 1
        step = 1 if is_whole else weight.in_features // weight.num_groups
        run = slice(None) if is_whole else groups(step)
        scales = {"scales": weight.scales[:, run], "zeros": weight.zeros[:, run]}
        return step, {"codes": weight.codes[:, columns], **scales}
    if isinstance(weight, Fp8Tensor):
        is_whole = weight.scheme.granularity != "block"
        run = slice(None) if is_whole else groups(BLOCK)
        parts = {"values": weight.values[:, columns], "scales": weight.scales[:, run]}
        return 1 if is_whole else BLOCK, parts
    if isinstance(weight, CodebookTensor) and not weight.scheme.double_quant:
        size = weight.scheme.block_size
        if weight.in_features % size:
            return None
        magnitudes = weight.absmax.view(weight.out_features, -1)[:, groups(size)]
        return size, {"codes": weight.codes[:, columns], "absmax": magnitudes.flatten()}
    if isinstance(weight, Fp4Tensor):
        size = weight.scheme.block_size
        return size, {"codes": weight.codes[:, columns], "scales": weight.scales[:, groups(size)]}
    if isinstance(weight, GgufTensor):
        size, num_bytes = weight.scheme.block
        run = groups(size)
        return size, {"data": weight.data[:, run.start * num_bytes : run.stop * num_bytes]}
    if isinstance(weight, TrellisTensor):
        parts = {"trellis": weight.trellis[groups(TILE)], "suh": weight.suh[columns]}
        return TRANSFORMED, parts
    if isinstance(weight, LookupTensor) and weight.sparse_rows is not None:
        return None
    if isinstance(weight, LookupTensor | VectorwiseTensor):
        return 1, {"codes": weight.codes[:, columns]}
    return None


def _changed(weight: Any, parts: Mapping[str, torch.Tensor]) -> QuantizedTensor:
    return replace(weight, **parts)


def _refusal(module: str, weight: QuantizedTensor, where: str, step: int | None = None) -> BadInput:
    multiple = "" if step is None else f": only at multiples of {step}"
    return BadInput(
        f"{module}: {weight.scheme.label} cannot be divided {where}{multiple}; choose another "
        "tensor_parallel_size"
    )


@dataclass(frozen=True, slots=True)
class Shard:
    """The shard of one of `size` tensor-parallel ranks, and their process group (Megatron-LM,
    arXiv:1909.08053).

    QKV and gate/up are column-parallel, output and down projections row-parallel with an all-reduce. With
    fewer KV heads than ranks, they are replicated, as is MLA's latent. Experts are assigned whole (expert
    parallelism), so that packed weights need no repacking.
    """

    rank: int
    size: int
    group: Group

    def check(self, spec: ModelSpec) -> None:
        """Raise `BadInput` where the model cannot be split into `size` shards."""
        shape, what = spec.shape, f"tensor_parallel_size = {self.size}"
        if spec.num_states:
            refuse({"tensor-parallel", "states"}, what)
        one_for_several = self.size % shape.num_kv_heads == 0 or shape.latent is not None
        if shape.num_kv_heads % self.size and not one_for_several:
            raise BadInput(f"{what}: {shape.num_kv_heads} KV heads do not divide into that many")
        if spec.layers:
            raise BadInput(f"{what}: layers of different sizes ({shape.family}) are not split")
        counts = {"num_heads": shape.num_heads}
        experts = shape.experts
        if experts is None or experts.dense_layers:
            counts["intermediate_size"] = shape.intermediate_size
        if experts is not None:
            counts["the shared expert's width"] = experts.shared_width
            if experts.count < self.size:
                raise BadInput(f"{what}: {experts.count} experts are too few for that many")
        for name, count in counts.items():
            if count % self.size:
                raise BadInput(f"{what}: {name} = {count} does not divide into that many")

    def spec(self, spec: ModelSpec) -> ModelSpec:
        runs = self.heads(spec.shape), self.kv_heads(spec.shape)
        heads, kv_heads = (run.stop - run.start for run in runs)
        return replace(spec, shape=replace(spec.shape, num_heads=heads, num_kv_heads=kv_heads))

    def qkv(self, spec: ModelSpec) -> WeightSlice:
        """This rank's rows of the QKV weights, in the family's stacking order."""
        shape, dim = spec.shape, spec.shape.head_dim
        heads, kv_heads = self.heads(shape), self.kv_heads(shape)
        if spec.grouped_qkv:
            group = shape.num_heads // shape.num_kv_heads
            stride = (group + 2) * dim
            start = kv_heads.start * stride
            if self.size <= shape.num_kv_heads:
                return WeightSlice(rows=((slice(start, kv_heads.stop * stride),),))
            first = (heads.start - kv_heads.start * group) * dim
            queries = slice(start + first, start + first + (heads.stop - heads.start) * dim)
            return WeightSlice(rows=((queries, slice(start + group * dim, start + stride)),))
        queries, keys = _times(heads, dim), _times(kv_heads, dim)
        if len(spec.names.qkv) > 1:
            return WeightSlice(rows=((queries,), (keys,), (keys,)))
        key_start = shape.num_heads * dim
        value_start = key_start + shape.num_kv_heads * dim
        return WeightSlice(rows=((queries, _after(keys, key_start), _after(keys, value_start)),))

    def output(self, shape: ModelShape) -> WeightSlice:
        return WeightSlice(columns=_times(self.heads(shape), shape.head_dim))

    def latent(self, shape: ModelShape, latent: Latent) -> tuple[WeightSlice, WeightSlice]:
        """MLA: this rank's rows of the query projection, and columns of the output projection."""
        heads = self.heads(shape)
        queries = _times(heads, latent.query_dim)
        return WeightSlice(rows=((queries,),)), WeightSlice(columns=_times(heads, latent.value_dim))

    def heads(self, shape: ModelShape) -> slice:
        return self._run(shape.num_heads)

    def experts(self, count: int) -> range:
        run = self._run(count)
        return range(run.start, run.stop)

    def gate_up(self, inner: int, num_modules: int, num_stacked: int) -> WeightSlice:
        """This rank's rows of an MLP's linears into width `inner`: `num_stacked` in `num_modules` modules."""
        run = self._run(inner)
        if num_modules == num_stacked:
            return WeightSlice(rows=((run,),) * num_modules)
        return WeightSlice(rows=(tuple(_after(run, i * inner) for i in range(num_stacked)),))

    def down(self, inner: int) -> WeightSlice:
        return WeightSlice(columns=self._run(inner))

    def vocabulary(self, vocab_size: int) -> slice:
        return self._run(vocab_size)

    def _run(self, count: int) -> slice:
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def kv_heads(self, shape: ModelShape) -> slice:
        """KV heads of this rank; with fewer than ranks, one that others hold as well."""
        if self.size <= shape.num_kv_heads:
            return self._run(shape.num_kv_heads)
        kv_head = self.rank * shape.num_kv_heads // self.size
        return slice(kv_head, kv_head + 1)


def _times(run: slice, factor: int) -> slice:
    return slice(run.start * factor, run.stop * factor)


def _after(run: slice, offset: int) -> slice:
    return slice(run.start + offset, run.stop + offset)

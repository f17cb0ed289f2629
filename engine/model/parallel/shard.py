"""Tensor-parallel sharding (Megatron-LM): which heads, experts, MLP columns and vocabulary a rank holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ....quant.base.errors import BadInput
from ...config.compatibility import refuse
from ...planner.model.shapes import Latent, ModelShape
from ..spec.spec import ModelSpec
from .group import Group
from .weight_slice import WeightSlice


@dataclass(frozen=True, slots=True)
class Shard:
    """The shard of one of `size` tensor-parallel ranks, and their process group.

    QKV and gate/up are column-parallel (split by outputs), the output and down projections row-parallel
    (split by inputs) with an all-reduce. With fewer KV heads than ranks, KV heads are replicated. MLA's
    latent is replicated, its heads are split. Experts are assigned whole (expert parallelism), so that packed
    weights need no repacking; each rank sums its experts' outputs before the all-reduce.

    Source: Shoeybi et al., "Megatron-LM" (arXiv:1909.08053), section 3.
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
            raise BadInput(f"{what}: layers of different sizes ({shape.model_type}) are not split")
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
        """The spec of this rank: its numbers of heads and KV heads."""
        heads, kv_heads = self.heads(spec.shape), self.kv_heads(spec.shape)
        shape = replace(
            spec.shape,
            num_heads=heads.stop - heads.start,
            num_kv_heads=kv_heads.stop - kv_heads.start,
        )
        return replace(spec, shape=shape)

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
        """This rank's columns of the output projection (row-parallel)."""
        return WeightSlice(columns=_times(self.heads(shape), shape.head_dim))

    def latent(self, shape: ModelShape, latent: Latent) -> tuple[WeightSlice, WeightSlice]:
        """MLA: this rank's rows of the query projection, and columns of the output projection."""
        heads = self.heads(shape)
        queries = _times(heads, latent.query_dim)
        return WeightSlice(rows=((queries,),)), WeightSlice(columns=_times(heads, latent.value_dim))

    def heads(self, shape: ModelShape) -> slice:
        """Query heads of this rank."""
        return self._run(shape.num_heads)

    def experts(self, count: int) -> range:
        """Expert ids of this rank, of `count` experts; ranks differ by one at most."""
        run = self._run(count)
        return range(run.start, run.stop)

    def gate_up(self, inner: int, num_modules: int, num_stacked: int) -> WeightSlice:
        """This rank's rows of an MLP's linears into width `inner`: `num_stacked` in `num_modules` modules."""
        run = self._run(inner)
        if num_modules == num_stacked:
            return WeightSlice(rows=((run,),) * num_modules)
        return WeightSlice(
            rows=(tuple(_after(run, index * inner) for index in range(num_stacked)),)
        )

    def down(self, inner: int) -> WeightSlice:
        """This rank's columns of an MLP's down projection."""
        return WeightSlice(columns=self._run(inner))

    def vocabulary(self, vocab_size: int) -> slice:
        """Vocabulary range of this rank's LM head; ranks differ by one token at most."""
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

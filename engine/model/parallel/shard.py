"""What one of several processes holds of a model: some heads, experts, vocabulary, and some of each MLP."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ....quant.base.errors import BadInput
from ...planner.model.shapes import Latent, ModelShape
from ..spec.spec import ModelSpec
from .group import Group
from .weight_slice import WeightSlice


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `size` equal parts of a model, and the group of processes that hold them.

    Queries, keys, values, gate and up are divided by their outputs, the projections behind them by their
    inputs, and their results are summed; of fewer KV heads than parts, several parts hold the same one. A
    latent lies in each part, and is read by its heads. Experts are dealt out whole, so that packed ones stay
    as they are; each part adds up what its own say.

    Source: Shoeybi et al., "Megatron-LM" (arXiv:1909.08053), section 3.
    """

    rank: int
    size: int
    group: Group

    def check(self, spec: ModelSpec) -> None:
        """Raise `BadInput` where a model cannot be divided into so many parts."""
        shape, what = spec.shape, f"tensor_parallel_size = {self.size}"
        one_for_several = self.size % shape.num_kv_heads == 0 or shape.latent is not None
        if shape.num_kv_heads % self.size and not one_for_several:
            raise BadInput(f"{what}: {shape.num_kv_heads} KV heads do not divide into that many")
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
        """The spec of this part: its heads."""
        heads, kv_heads = self.heads(spec.shape), self._kv_heads(spec.shape)
        own = replace(
            spec.shape,
            num_heads=heads.stop - heads.start,
            num_kv_heads=kv_heads.stop - kv_heads.start,
        )
        return replace(spec, shape=own)

    def qkv(self, spec: ModelSpec) -> WeightSlice:
        """Rows of queries, keys and values, however the family stacks them."""
        shape, dim = spec.shape, spec.shape.head_dim
        heads, kv_heads = self.heads(shape), self._kv_heads(shape)
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
        """Columns of the projection behind the heads."""
        return WeightSlice(columns=_times(self.heads(shape), shape.head_dim))

    def latent(self, shape: ModelShape, latent: Latent) -> tuple[WeightSlice, WeightSlice]:
        """Rows of the linear into latent attention's queries, and columns of the one behind its heads."""
        heads = self.heads(shape)
        queries = _times(heads, latent.query_dim)
        return WeightSlice(rows=((queries,),)), WeightSlice(columns=_times(heads, latent.value_dim))

    def heads(self, shape: ModelShape) -> slice:
        """The query heads of this part."""
        return self._run(shape.num_heads)

    def experts(self, count: int) -> range:
        """The numbers of this part's experts, of `count`; parts differ by one at most."""
        run = self._run(count)
        return range(run.start, run.stop)

    def gate_up(self, inner: int, num_modules: int, num_stacked: int) -> WeightSlice:
        """Rows of the linears into an MLP of width `inner`: `num_stacked` in `num_modules` modules."""
        run = self._run(inner)
        if num_modules == num_stacked:
            return WeightSlice(rows=((run,),) * num_modules)
        return WeightSlice(
            rows=(tuple(_after(run, index * inner) for index in range(num_stacked)),)
        )

    def down(self, inner: int) -> WeightSlice:
        """Columns of the linear out of an MLP."""
        return WeightSlice(columns=self._run(inner))

    def vocabulary(self, vocab_size: int) -> slice:
        """Tokens that this part scores; parts differ by one token at most."""
        return self._run(vocab_size)

    def _run(self, count: int) -> slice:
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def _kv_heads(self, shape: ModelShape) -> slice:
        if self.size <= shape.num_kv_heads:
            return self._run(shape.num_kv_heads)
        own = self.rank * shape.num_kv_heads // self.size
        return slice(own, own + 1)


def _times(run: slice, factor: int) -> slice:
    return slice(run.start * factor, run.stop * factor)


def _after(run: slice, offset: int) -> slice:
    return slice(run.start + offset, run.stop + offset)

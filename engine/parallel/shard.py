"""What one of several processes holds of a model: some heads, some of each MLP, some of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...quant.errors import BadInput
from ..model.spec import ModelSpec
from ..planner.shapes import ModelShape
from .cut import Cut
from .group import Group


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `size` equal parts of a model, and the group of processes that hold them.

    Queries, keys, values, gate and up are divided by their outputs, the projections behind them by their
    inputs, and their results are summed; of fewer KV heads than parts, several parts hold the same one.

    Source: Shoeybi et al., "Megatron-LM" (arXiv:1909.08053), section 3.
    """

    rank: int
    size: int
    group: Group

    def check(self, spec: ModelSpec) -> None:
        """Raise `BadInput` where a model cannot be divided into so many parts."""
        shape, what = spec.shape, f"tensor_parallel_size = {self.size}"
        if shape.experts is not None or shape.latent is not None:
            part = "a mixture of experts" if shape.latent is None else "latent attention"
            raise BadInput(
                f"{what}: {shape.model_type} has {part}, which is not divided; dense models with "
                "attention heads are"
            )
        if self.size > 1 and shape.num_kv_heads % self.size and self.size % shape.num_kv_heads:
            raise BadInput(f"{what}: {shape.num_kv_heads} KV heads do not divide into that many")
        for name in ("num_heads", "intermediate_size"):
            if (count := getattr(shape, name)) % self.size:
                raise BadInput(f"{what}: {name} = {count} does not divide into that many")

    def spec(self, spec: ModelSpec) -> ModelSpec:
        """The spec of this part: its heads."""
        heads, kv_heads = self._heads(spec.shape)
        own = replace(
            spec.shape,
            num_heads=heads.stop - heads.start,
            num_kv_heads=kv_heads.stop - kv_heads.start,
        )
        return replace(spec, shape=own)

    def qkv(self, spec: ModelSpec) -> Cut:
        """Rows of queries, keys and values, however the family stacks them."""
        shape, dim = spec.shape, spec.shape.head_dim
        heads, kv_heads = self._heads(shape)
        if spec.grouped_qkv:
            group = shape.num_heads // shape.num_kv_heads
            stride = (group + 2) * dim
            start = kv_heads.start * stride
            if self.size <= shape.num_kv_heads:
                return Cut(rows=((slice(start, kv_heads.stop * stride),),))
            first = (heads.start - kv_heads.start * group) * dim
            queries = slice(start + first, start + first + (heads.stop - heads.start) * dim)
            return Cut(rows=((queries, slice(start + group * dim, start + stride)),))
        queries, keys = _times(heads, dim), _times(kv_heads, dim)
        if len(spec.names.qkv) > 1:
            return Cut(rows=((queries,), (keys,), (keys,)))
        key_start = shape.num_heads * dim
        value_start = key_start + shape.num_kv_heads * dim
        return Cut(rows=((queries, _after(keys, key_start), _after(keys, value_start)),))

    def output(self, shape: ModelShape) -> Cut:
        """Columns of the projection behind the heads."""
        return Cut(columns=_times(self._heads(shape)[0], shape.head_dim))

    def gate_up(self, inner: int, num_modules: int, num_stacked: int) -> Cut:
        """Rows of the linears into an MLP of width `inner`: `num_stacked` in `num_modules` modules."""
        run = self._run(inner)
        if num_modules == num_stacked:
            return Cut(rows=((run,),) * num_modules)
        return Cut(rows=(tuple(_after(run, index * inner) for index in range(num_stacked)),))

    def down(self, inner: int) -> Cut:
        """Columns of the linear out of an MLP."""
        return Cut(columns=self._run(inner))

    def vocabulary(self, vocab_size: int) -> slice:
        """Tokens that this part scores; parts differ by one token at most."""
        return self._run(vocab_size)

    def _run(self, count: int) -> slice:
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def _heads(self, shape: ModelShape) -> tuple[slice, slice]:
        heads = self._run(shape.num_heads)
        if self.size <= shape.num_kv_heads:
            return heads, self._run(shape.num_kv_heads)
        own = self.rank * shape.num_kv_heads // self.size
        return heads, slice(own, own + 1)


def _times(run: slice, factor: int) -> slice:
    return slice(run.start * factor, run.stop * factor)


def _after(run: slice, offset: int) -> slice:
    return slice(run.start + offset, run.stop + offset)

"""Measurements of a probe: the tensors of a model and of its cache. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, get_args

Part = Literal["text", "vision", "projector"]
PARTS: tuple[Part, ...] = get_args(Part)
Law = Literal["growing", "remainder", "constant"]


@dataclass(frozen=True, slots=True)
class CachedTensor:
    """One tensor of a layer's cache, for one sequence: entries of `heads` x `width` elements. Growing: an
    entry per `stride` tokens, at most `window`. Remainder: per token since the last full stride."""

    name: str
    layer: int
    heads: int
    width: int
    element_bytes: int
    law: Law
    window: int = 0
    stride: int = 1
    is_float: bool = True

    def entries(self, num_tokens: int) -> int:
        if self.law == "constant":
            return 1
        if self.law == "remainder":
            return num_tokens % self.stride
        entries = num_tokens // self.stride
        return min(entries, self.window) if self.window else entries

    def num_bytes(self, num_tokens: int) -> int:
        return self.entries(num_tokens) * self.heads * self.width * self.element_bytes


@dataclass(frozen=True, slots=True)
class Parameters:
    """`count` parameters of one shape, `used` per token; `layer` -1: outside of the decoder's layers."""

    part: Part
    role: str
    shard: str
    layer: int
    out_features: int
    in_features: int
    count: int
    used: int

    @property
    def num_elements(self) -> int:
        return self.out_features * self.in_features * self.count


@dataclass(frozen=True, slots=True)
class ProbedModel:
    """A model as measured: its parameters, the tensors of its cache, and the sizes that FLOP depend on.
    `num_heads` is 0 without attention; the last `num_shared_layers` layers attend over the keys of earlier
    ones; `tied` means that the output head is the embedding."""

    family: str
    transformers_version: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_context: int
    tied: bool
    num_experts: int
    experts_per_token: int
    expert_width: int
    num_shared_layers: int
    parameters: tuple[Parameters, ...]
    cache: tuple[CachedTensor, ...]

    def num_parameters(self, part: Part | None = None) -> int:
        return sum(p.num_elements for p in self.parameters if part in (None, p.part))

    def cache_bytes(self, num_tokens: int) -> int:
        return sum(tensor.num_bytes(num_tokens) for tensor in self.cache)

    def as_dict(self) -> dict[str, Any]:
        """JSON form: equal rows of several layers are one, with their layers as ranges."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for key in ("parameters", "cache"):
            layers: dict[tuple[tuple[str, Any], ...], list[int]] = {}
            for item in values[key]:
                row = {field.name: getattr(item, field.name) for field in fields(item)}
                layer = row.pop("layer")
                layers.setdefault(tuple(row.items()), []).append(layer)
            values[key] = [{**dict(row), "layers": _as_ranges(at)} for row, at in layers.items()]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read what `as_dict` wrote; KeyError, TypeError or ValueError: another version wrote it."""
        kinds = {"parameters": Parameters, "cache": CachedTensor}
        split = {key: tuple(_split(kind, values[key])) for key, kind in kinds.items()}
        return cls(**{**values, **split})


def _split(kind: type[Any], rows: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    for row in rows:
        rest = {key: value for key, value in row.items() if key != "layers"}
        for start, stop, step in row["layers"]:
            for layer in range(start, stop, step):
                yield kind(**rest, layer=layer)


def _as_ranges(layers: Sequence[int]) -> list[list[int]]:
    """Ascending indices as [start, stop, step] ranges."""
    ranges: list[list[int]] = []
    for layer in layers:
        if ranges:
            start, stop, step = ranges[-1]
            if stop - step == start and layer > start:  # of one index so far: the step is free
                ranges[-1] = [start, layer + 1, layer - start]
                continue
            if layer == stop - 1 + step:
                ranges[-1][1] = layer + 1
                continue
        ranges.append([layer, layer + 1, 1])
    return ranges

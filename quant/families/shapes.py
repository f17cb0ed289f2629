"""Shape of a decoder from its raw `config.json`: tensors, parameter counts, KV-cache bytes.

Plain Python, no torch. The parameter count is a sum over the tensors of the checkpoint, not a separate
formula, so weights, parameters and rooflines cannot disagree.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import Literal, Self

from ...base.errors import BadInput
from .shape_rules import Config, ShapeRules, has_chunks, layer_windows

Role = Literal[
    "embedding",
    "position",
    "head",
    "linear",
    "expert",
    "router",
    "norm",
    "bias",
    "expert_bias",
    "vision",
    "projector",
]
Shard = Literal["ranks", "kv_heads", "whole"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """`count` tensors of one shape, `used` per token; `shard`: over ranks, at most the KV heads, or whole."""

    role: Role
    out_features: int
    in_features: int
    count: int
    used: int
    shard: Shard = "ranks"

    @property
    def num_elements(self) -> int:
        return self.out_features * self.in_features


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts of `width`, shared ones of `shared_width` (0: none); `dense_layers` have an MLP."""

    count: int
    per_token: int
    width: int
    shared_width: int = 0
    dense_layers: tuple[int, ...] = ()

    def expected_distinct(self, tokens: int) -> float:
        """Expected distinct experts of `tokens` tokens, E·(1 - (1 - t/E)^B): an upper bound."""
        return self.count * (1 - (1 - self.per_token / self.count) ** tokens)


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek): the cache holds one latent and one RoPE key per token."""

    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_rank: int | None

    @property
    def cached_elements(self) -> int:
        return self.kv_rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Shape of a decoder-only language model, as far as memory and FLOP depend on it. `windows` are attention
    windows in tokens, None: full; `chunked`: they do not overlap."""

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied: bool
    max_context: int
    windows: tuple[int | None, ...]
    experts: Experts | None = None
    latent: Latent | None = None
    chunked: bool = False
    learned_positions: int = 0
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    expert_bias: bool = False
    norms_per_layer: int = 2
    layer_norm: bool = False
    qk_norm: bool = False
    gated_mlp: bool = True
    sinks: bool = False

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise BadInput(
                    f"the config gives {name} = {value!r}: a positive number was expected"
                )
        if self.num_heads % self.num_kv_heads:
            raise BadInput(
                f"{self.num_heads} attention heads do not divide into {self.num_kv_heads} KV heads"
            )
        if len(self.windows) != self.num_layers:
            raise BadInput(
                f"the config describes the attention of {len(self.windows)} layers, "
                f"but has {self.num_layers}"
            )

    @classmethod
    def from_completed(cls, name: str, rules: ShapeRules, config: Config) -> ModelShape:
        """Shape of a completed config, by the family's rules. BadInput: a missing or invalid field."""
        hidden = _number(config, "hidden_size", name)
        layers = _number(config, "num_hidden_layers", name)
        heads = _number(config, "num_attention_heads", name)
        if key := rules.width_key:
            inner = _number(config, key, name) if config.get(key) else 4 * hidden
        else:
            inner = _number(config, "intermediate_size", name)
        dense_inner = config.get("intermediate_size_mlp") or inner
        head_dim = config.get("head_dim") or hidden // heads
        latent = None
        if rules.has_default("kv_lora_rank"):
            dims = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"]
            latent = Latent(config["kv_lora_rank"], *dims, config.get("q_lora_rank"))
        kv_heads = rules.num_kv_heads(config) if rules.num_kv_heads else None
        if kv_heads is None:
            given = config.get("num_key_value_heads")
            kv_heads = heads if given is None else given
        norms = rules.norms_per_layer
        return cls(
            family=name,
            num_layers=layers,
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=latent.query_dim if latent else head_dim,
            intermediate_size=dense_inner,
            vocab_size=_number(config, "vocab_size", name),
            tied=bool(config.get("tie_word_embeddings", False)),
            max_context=_number(config, "max_position_embeddings", name),
            windows=layer_windows(config, rules),
            experts=_experts(config, rules, name),
            latent=latent,
            chunked=has_chunks(config),
            learned_positions=config["max_position_embeddings"] if rules.learned_positions else 0,
            qkv_bias=_flag(rules.qkv_bias, config),
            output_bias=_flag(rules.output_bias, config),
            mlp_bias=_flag(rules.mlp_bias, config),
            expert_bias=rules.expert_bias,
            norms_per_layer=norms if isinstance(norms, int) else norms(config),
            layer_norm=rules.layer_norm,
            qk_norm=rules.qk_norm,
            gated_mlp=rules.gated_mlp,
            sinks=rules.sinks,
        )

    def tensors(self, stage: range | None = None) -> Iterator[Tensor]:
        """All parameters, tied ones once, without buffers; of a pipeline `stage`, a range of layers, its own.
        The first stage has the embeddings, the last the final norm and the head, a copy of a tied
        embedding."""
        hidden = self.hidden_size
        part = range(self.num_layers) if stage is None else stage
        layers, first, last = len(part), part.start == 0, part.stop == self.num_layers
        if first:
            yield Tensor("embedding", self.vocab_size, hidden, 1, 1)
            if self.learned_positions:
                yield Tensor("position", self.learned_positions, hidden, 1, 1, "whole")
        if last and not (self.tied and first):
            yield Tensor("head", self.vocab_size, hidden, 1, 1)
        norms = (1 + self.layer_norm) * (self.norms_per_layer * layers + last)
        yield Tensor("norm", hidden, 1, norms, norms, "whole")
        yield from self._latent_attention(layers) if self.latent else self._attention(layers)
        dense = layers
        if self.experts is not None:
            dense = sum(index in part for index in self.experts.dense_layers)
        if dense:
            yield from self._mlp(self.intermediate_size, dense)
        if self.experts is not None and dense < layers:
            yield from self._mixture(self.experts, layers - dense)

    @property
    def num_parameters(self) -> int:
        return sum(t.num_elements * t.count for t in self.tensors())

    @property
    def num_active_parameters(self) -> int:
        return sum(t.num_elements * t.used for t in self.tensors())

    @property
    def cached_elements(self) -> int:
        return self.latent.cached_elements if self.latent else 2 * self.num_kv_heads * self.head_dim

    def kv_bytes_per_token(self, bytes_per_element: float | Fraction) -> int:
        return ceil(self.num_layers * self.cached_elements * bytes_per_element)

    def kv_bytes_per_extra_token(self, bytes_per_element: float | Fraction) -> int:
        full = sum(window is None for window in self.windows)
        return ceil(full * self.cached_elements * bytes_per_element)

    def kv_bytes(
        self, num_tokens: int, bytes_per_element: float | Fraction, block_size: int = 1
    ) -> int:
        """KV-cache bytes of one sequence: each layer holds min(tokens, window), in whole blocks. A constant
        state is included."""
        blocks = sum(
            ceil(min(num_tokens, num_tokens if window is None else window) / block_size)
            for window in self.windows
        )
        return ceil(blocks * block_size * self.cached_elements * bytes_per_element)

    @property
    def state_bytes(self) -> int:
        """Bytes of the constant state of one sequence (Mamba, linear attention, convolutions)."""
        return 0

    @property
    def looked_up_elements(self) -> int:
        """Elements of the tables that a token is looked up in, and of towers that a decode step skips."""
        table = 0 if self.tied else self.vocab_size * self.hidden_size
        return table + self.learned_positions * self.hidden_size

    def visible_elements(self, context: float) -> float:
        keys = sum(context if window is None else min(context, window) for window in self.windows)
        return keys * self.cached_elements

    def without_windows(self) -> Self:
        """The shape with full attention in every layer, for engines that do not free out-of-window blocks."""
        return replace(self, windows=(None,) * self.num_layers)

    def kv_heads_per_rank(self, ranks: int) -> int:
        """KV heads on each of `ranks`, replicated beyond their number. BadInput: they do not divide."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
            divide = [
                count
                for count in range(1, heads + 1)
                if not (heads % count or (kv_heads % count and count % kv_heads))
            ]
            near = sorted(sorted(divide, key=lambda count: abs(count - ranks))[:2])
            raise BadInput(
                f"{heads} attention heads and {kv_heads} KV heads do not divide over "
                f"{ranks} ranks: choose another --tp, such as {' or '.join(map(str, near))}"
            )
        return max(1, kv_heads // ranks)

    def cache_on_rank(self, ranks: int) -> Self:
        """The shape whose KV cache is that of one of `ranks` TP ranks; MLA latents are replicated."""
        kv_heads = self.kv_heads_per_rank(ranks)
        return replace(self, num_heads=self.num_heads // ranks, num_kv_heads=kv_heads)

    def stages(self, count: int) -> list[range]:
        """Layers of each of `count` pipeline stages, the first ones longer. BadInput: fewer than stages."""
        if not 1 <= count <= self.num_layers:
            raise BadInput(f"--pp {count}: the model has {self.num_layers} layers")
        per_stage, rest = divmod(self.num_layers, count)
        ends = [per_stage * i + min(i, rest) for i in range(count + 1)]
        return [range(start, stop) for start, stop in itertools.pairwise(ends)]

    def cache_of_stage(self, stage: range) -> Self:
        """The shape whose KV cache is that of one pipeline stage. Only valid for KV-cache sizes."""
        windows = self.windows[stage.start : stage.stop]
        return replace(self, num_layers=len(stage), windows=windows)

    def _attention(self, layers: int) -> Iterator[Tensor]:
        hidden = self.hidden_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        yield Tensor("linear", queries, hidden, layers, layers)
        yield Tensor("linear", keys, hidden, 2 * layers, 2 * layers, "kv_heads")
        yield Tensor("linear", hidden, queries, layers, layers)
        if self.qkv_bias:
            yield Tensor("bias", queries + 2 * keys, 1, layers, layers, "whole")
        if self.output_bias:
            yield Tensor("bias", hidden, 1, layers, layers, "whole")
        if self.qk_norm:
            yield Tensor("norm", self.head_dim, 1, 2 * layers, 2 * layers, "whole")
        if self.sinks:
            yield Tensor("bias", self.num_heads, 1, layers, layers, "whole")

    def _latent_attention(self, layers: int) -> Iterator[Tensor]:
        assert self.latent is not None
        latent, hidden, heads = self.latent, self.hidden_size, self.num_heads
        if latent.query_rank is None:
            yield Tensor("linear", heads * latent.query_dim, hidden, layers, layers)
        else:
            yield Tensor("linear", latent.query_rank, hidden, layers, layers, "whole")
            yield Tensor("norm", latent.query_rank, 1, layers, layers, "whole")
            yield Tensor("linear", heads * latent.query_dim, latent.query_rank, layers, layers)
        yield Tensor("linear", latent.cached_elements, hidden, layers, layers, "whole")
        yield Tensor("norm", latent.kv_rank, 1, layers, layers, "whole")
        expanded = heads * (latent.nope_dim + latent.value_dim)
        yield Tensor("linear", expanded, latent.kv_rank, layers, layers)
        yield Tensor("linear", hidden, heads * latent.value_dim, layers, layers)

    def _mlp(self, width: int, count: int) -> Iterator[Tensor]:
        hidden, into = self.hidden_size, 2 if self.gated_mlp else 1
        yield Tensor("linear", width, hidden, into * count, into * count)
        yield Tensor("linear", hidden, width, count, count)
        if self.mlp_bias:
            yield Tensor("bias", into * width + hidden, 1, count, count, "whole")

    def _mixture(self, experts: Experts, layers: int) -> Iterator[Tensor]:
        hidden = self.hidden_size
        num_experts, used = experts.count * layers, experts.per_token * layers
        yield Tensor("router", experts.count, hidden, layers, layers, "whole")
        yield Tensor("expert", experts.width, hidden, 2 * num_experts, 2 * used)
        yield Tensor("expert", hidden, experts.width, num_experts, used)
        if self.expert_bias:
            yield Tensor("bias", experts.count, 1, layers, layers, "whole")
            yield Tensor("expert_bias", 2 * experts.width + hidden, 1, num_experts, used)
        if experts.shared_width:
            yield from self._mlp(experts.shared_width, layers)


def _number(config: Config, key: str, family: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        state = "is missing" if value is None else f"is {value!r}"
        raise BadInput(f"{key} {state} in the {family} config: a positive whole number is needed")
    return value


def _flag(source: str | bool, config: Config) -> bool:
    return source if isinstance(source, bool) else bool(config[source])


def _experts(config: Config, rules: ShapeRules, family: str) -> Experts | None:
    if not rules.has_default("num_experts_per_tok", "n_routed_experts"):
        return None
    count = _number(config, "num_local_experts", family)
    per_token = _number(config, "num_experts_per_tok", family)
    if per_token > count:
        raise BadInput(f"num_experts_per_tok is {per_token}, of only {count} experts")
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    shared = rules.shared_experts
    num_shared = shared if isinstance(shared, int) else config.get(shared) or 0
    return Experts(count, per_token, width, width * num_shared, tuple(rules.dense_layers(config)))

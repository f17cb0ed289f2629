"""What a decoder is made of: its shape, and the choices that a shape does not tell."""

from __future__ import annotations

from dataclasses import dataclass, field

from ....quant.base.errors import BadInput
from ...planner.model.shapes import ModelShape
from ...scheduling.window import Window
from .names import Names
from .rope import RopeSpec


class NotCovered(BadInput):
    """The config is sound, but asks for something that this decoder does not have."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """What one layer keeps of a token: `num_heads` keys of `key_dim` and values of `value_dim` elements.

    With `values_in_keys` the values are the first `value_dim` elements of the keys and take no room.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    values_in_keys: bool = False

    @property
    def num_elements(self) -> int:
        """Elements that one token takes."""
        return sum(self.vectors)

    @property
    def vectors(self) -> tuple[int, ...]:
        """Lengths of the vectors that one token leaves: the keys', then the values'."""
        dims = (self.key_dim,) if self.values_in_keys else (self.key_dim, self.value_dim)
        return tuple(dim for dim in dims for _ in range(self.num_heads))


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How a mixture of experts sends tokens to experts.

    Attributes:
        scoring: "softmax" over all experts or "sigmoid" of each.
        normalize: the weights of the chosen experts are divided by their sum.
        scale: factor on the weights after that.
        num_groups, kept_groups: only the best groups of experts are chosen from (DeepSeek); a group's
            score is the sum of its `group_top_k` best.
        correction: a learned bias decides the choice, not the weights (DeepSeek-V3).
        on_inputs: the weight multiplies what goes into the expert, not what comes out (Llama 4).
        bias: the router's linear has a bias.
    """

    scoring: str = "softmax"
    normalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    group_top_k: int = 1
    correction: bool = False
    on_inputs: bool = False
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Temperature:
    """Growth of the scores with the position, in layers without rotation (Llama 4).

    Source: Nakanishi, "Scalable-Softmax Is Superior for Attention" (arXiv:2501.19399).
    """

    floor: float
    weight: float


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer. Sizes are in elements and stand in `shape`.

    Attributes:
        ropes: each layer's rotation; None: the layer has none.
        rotary_width: elements at the front of a head that turn.
        rotary_neighbours: pairs are (2i, 2i + 1), not (i, i + width / 2).
        activation: a name of `mlp.ACTIVATIONS`.
        attention_scale: factor on the scores.
        attention_softcap, logit_softcap: `cap * tanh(x / cap)` on scores and logits.
        norm_offset: what is added to the weight of every norm; 1 in Gemma.
        embedding_scale: factor on the embeddings, rounded to the model's dtype.
        key_norm_after_rotation: queries and keys get a norm without weights after they turned (Llama 4).
        grouped_qkv: the stacked projection holds, for each KV head, its queries, its key and its value.
        parallel: attention and MLP read the same residual and are added together (Falcon).
        stream: what is kept of sequences without end, where the engine was asked for them.
    """

    shape: ModelShape
    names: Names
    dtype: str
    norm_eps: float
    ropes: tuple[RopeSpec | None, ...]
    rotary_width: int
    attention_scale: float
    activation: str = "silu"
    rotary_interleaved: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    key_norm_after_rotation: bool = False
    temperature: Temperature | None = None
    grouped_qkv: bool = False
    parallel: bool = False
    router: RouterSpec = field(default_factory=RouterSpec)
    stream: Window | None = None

    @property
    def num_sink_tokens(self) -> int:
        """Tokens at the beginning of a sequence that all of its tokens see, whatever the window."""
        return 0 if self.stream is None else self.stream.sinks

    @property
    def vocab_size(self) -> int:
        return self.shape.vocab_size

    @property
    def max_model_len(self) -> int:
        return self.shape.max_context

    @property
    def kv_layouts(self) -> tuple[KvLayout, ...]:
        """What each layer keeps of a token; latent attention keeps the latent and the rotated key."""
        if (latent := self.shape.latent) is not None:
            layout = KvLayout(1, latent.cached_elements, latent.kv_rank, values_in_keys=True)
        else:
            head_dim = self.shape.head_dim
            layout = KvLayout(self.shape.num_kv_heads, head_dim, head_dim)
        return (layout,) * self.shape.num_layers

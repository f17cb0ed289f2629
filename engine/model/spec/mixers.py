"""Specs of what mixes the tokens of a layer in place of attention, with a constant state."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """Gated short convolution of `kernel` tokens (LFM2)."""

    kernel: int
    bias: bool
    num_states: int = 1


@dataclass(frozen=True, slots=True)
class DeltaNetSpec:
    """Gated delta net (Qwen3-Next, Qwen3.5).

    Attributes:
        key_dim, value_dim: dimensions of a key head and a value head.
        kernel: tokens of the convolution.
        by_head: the projections are `in_proj_qkvz` and `in_proj_ba`, each by key head (Qwen3-Next), not
            `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a` (Qwen3.5).
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    by_head: bool
    num_states: int = 2

    @property
    def keys_width(self) -> int:
        """Elements of the keys of a token, and of its queries."""
        return self.num_key_heads * self.key_dim

    @property
    def values_width(self) -> int:
        """Elements of the values of a token, and of its gate."""
        return self.num_value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class Mamba2Spec:
    """Mamba 2 (Granite 4, Nemotron-H).

    Attributes:
        num_groups: groups of heads that share B and C.
        kernel: tokens of the convolution; `conv_bias` of it.
        bias: the projections have one.
        step_limit: least and most step length.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    kernel: int
    conv_bias: bool
    bias: bool
    step_limit: tuple[float, float]
    num_states: int = 2

    @property
    def width(self) -> int:
        """Elements of the inputs of a token, and of its gate."""
        return self.num_heads * self.head_dim

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: inputs, B and C."""
        return self.width + 2 * self.num_groups * self.state_size


StateMixer = ShortConvSpec | DeltaNetSpec | Mamba2Spec


@dataclass(frozen=True, slots=True)
class LayerParts:
    """What a layer is made of: what mixes its tokens, and a feed-forward block, or one of the two.

    Attributes:
        state: what mixes its tokens in place of attention; None: attention does.
        has_mixer, has_mlp: whether it has the one and the other; a layer with one of them is a norm and it
            (Nemotron-H).
    """

    state: StateMixer | None = None
    has_mixer: bool = True
    has_mlp: bool = True

    @property
    def has_cache(self) -> bool:
        """Whether the layer has attention, and so keys and values."""
        return self.has_mixer and self.state is None

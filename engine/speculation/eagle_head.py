"""The layer that goes on from a model's own hidden states.

Li et al., "EAGLE" (arXiv:2401.15077) and "EAGLE-3" (arXiv:2503.01840). Both go from (hidden state at t, token
t + 1) to a hidden state at t + 1. EAGLE reads and foretells what the model's vocabulary projection reads.
EAGLE-3 reads the states that enter three of the model's layers, foretells states of its own, and has a
vocabulary projection for the commonest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from ..kernels.attention.dispatch import attention_kernels
from ..model.decoder.decoder import Decoder
from ..model.layers.attention import HeadAttention, LayerCache, Step, StepInputs
from ..model.layers.mlp import Block
from ..model.layers.norm import Norm
from ..model.layers.projection import Projection
from ..model.layers.rotary_embedding import RotaryEmbedding
from ..model.spec.rope import RopeSpec
from ..model.spec.spec import KvLayout, ModelSpec


@dataclass(frozen=True, slots=True)
class FusedInput:
    """EAGLE's way in: embedding and hidden state beside each other, to one hidden state."""

    fc: Projection

    @property
    def weight_bytes(self) -> int:
        return self.fc.weight_bytes

    def __call__(
        self, tokens: torch.Tensor, before: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual, and what the attention reads."""
        hidden = self.fc(torch.cat([tokens, before], dim=-1))
        return hidden, hidden


@dataclass(frozen=True, slots=True)
class ConcatenatedInput:
    """EAGLE-3's way in: the attention reads both, normed.

    With `norms_residual` the residual is the normed hidden state.
    """

    token_norm: Norm
    hidden_norm: Norm
    norms_residual: bool

    @property
    def weight_bytes(self) -> int:
        return self.token_norm.weight_bytes + self.hidden_norm.weight_bytes

    def __call__(
        self, tokens: torch.Tensor, before: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual, and what the attention reads."""
        normed = self.hidden_norm(before)
        residual = normed if self.norms_residual else before
        return residual, torch.cat([self.token_norm(tokens), normed], dim=-1)


@dataclass(frozen=True, slots=True)
class DraftVocabularyHead:
    """EAGLE-3's way out: scores of some tokens; the others cannot come.

    Attributes:
        token_ids: int64, those tokens; None: all.
    """

    norm: Norm
    head: Projection
    token_ids: torch.Tensor | None
    vocab_size: int

    @property
    def weight_bytes(self) -> int:
        return self.norm.weight_bytes + self.head.weight_bytes

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 [rows, vocab] of hidden states [rows, hidden]."""
        found = self.head(self.norm(hidden)).float()
        if self.token_ids is None:
            return found
        scores = found.new_full((len(found), self.vocab_size), float("-inf"))
        return scores.index_copy_(1, self.token_ids, found)


@dataclass(frozen=True, slots=True)
class EagleWeights:
    """What was learnt.

    Attributes:
        embedding: of the tokens; the model's own where the heads bring none.
        taps: layers of the model whose input is read.
        blend: those states, beside each other, to one; None: the hidden states that the model's vocabulary
            projection reads are taken as they are.
        scores: None: the model's own vocabulary projection.
    """

    embedding: torch.Tensor
    aux_hidden_state_layers: tuple[int, ...]
    aux_fusion: Projection | None
    input_fusion: FusedInput | ConcatenatedInput
    attention: HeadAttention
    mlp_norm: Norm
    mlp: Block
    scores: DraftVocabularyHead | None

    @property
    def bytes_read(self) -> int:
        """Bytes that a step reads."""
        parts = (
            self.aux_fusion,
            self.input_fusion,
            self.attention,
            self.mlp_norm,
            self.mlp,
            self.scores,
        )
        return sum(part.weight_bytes for part in parts if part is not None)


class EagleHead:
    """Its keys and values of (hidden state at t, token t + 1) lie in slot t of a cache that has the model's
    blocks."""

    def __init__(
        self,
        spec: ModelSpec,
        rope: RopeSpec,
        weights: EagleWeights,
        target: Decoder,
        max_model_len: int,
        dtype: torch.dtype,
    ) -> None:
        self.kv_layouts: tuple[KvLayout, ...] = spec.kv_layouts
        self.aux_hidden_state_layers = weights.aux_hidden_state_layers
        self._weights = weights
        self._target = target
        device, layout = weights.embedding.device, spec.kv_layouts[0]
        self._rotary_embedding = RotaryEmbedding(
            [rope], spec.rotary_width, max_model_len, device, dtype, None
        )
        self._attend = attention_kernels(device, dtype, layout.key_dim, layout.value_dim)

    @property
    def bytes_held(self) -> int:
        """Bytes of weights."""
        shared = self._weights.embedding is self._target.weights.embedding
        return self._weights.bytes_read + (0 if shared else self._weights.embedding.nbytes)

    @property
    def bytes_per_position(self) -> int:
        """Bytes that the draft tokens for one place read, a vocabulary projection included."""
        own = self._weights.scores is not None
        return self._weights.bytes_read + (0 if own else self._target.weights.head.weight_bytes)

    @torch.inference_mode()
    def known(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [tokens, hidden] to go on from, of what the model gave for those tokens."""
        aux_fusion = self._weights.aux_fusion
        return (
            hidden
            if aux_fusion is None
            else aux_fusion(hidden[:, self._target.spec.shape.hidden_size :])
        )

    @torch.inference_mode()
    def forward(
        self, inputs: StepInputs, before: torch.Tensor, caches: Sequence[LayerCache]
    ) -> torch.Tensor:
        """Hidden states behind tokens, [tokens, hidden], from those `before` them; fills the cache."""
        weights, positions = self._weights, inputs.positions
        attend = self._attend[inputs.batch.has_trees]
        step = Step(inputs, positions, self._rotary_embedding.of(positions), attend)
        tokens = functional.embedding(inputs.token_ids, weights.embedding)
        hidden, read = weights.input_fusion(tokens, before)
        hidden = hidden + weights.attention(read, step, caches[0])
        return hidden + weights.mlp(weights.mlp_norm(hidden))

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores over the vocabulary, float32 [rows, vocab], of hidden states of this head."""
        scores = self._weights.scores
        return self._target.logits(hidden) if scores is None else scores(hidden)

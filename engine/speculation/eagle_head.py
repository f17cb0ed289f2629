"""EAGLE draft head: one decoder layer that predicts the target's next hidden states.

Li et al., "EAGLE" (arXiv:2401.15077) and "EAGLE-3" (arXiv:2503.01840). Both map (hidden state at t, token
t + 1) to a hidden state at t + 1. EAGLE reads and predicts the hidden states that the target's LM head reads.
EAGLE-3 reads the inputs of three target layers (auxiliary hidden states), predicts a hidden state of its own,
and has an LM head over a reduced draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..kernels.attention.dispatch import (
    attention_kernels,
    reads_in_place,
    takes_static_metadata,
)
from ..model.decoder.decoder import Decoder
from ..model.layers.attention import HeadAttention, LayerCache, Step, StepInputs
from ..model.layers.embedding import TokenEmbedding
from ..model.layers.mlp import Block
from ..model.layers.norm import Norm
from ..model.layers.projection import Projection
from ..model.layers.rotary_embedding import RotaryEmbedding
from ..model.spec.rope import RopeSpec
from ..model.spec.spec import KvLayout, ModelSpec


@dataclass(frozen=True, slots=True)
class FusedInput:
    """EAGLE's input: token embedding and hidden state, concatenated and projected to one hidden state."""

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
    """EAGLE-3's input: the attention reads token embedding and hidden state, each normed, concatenated.

    With `norms_residual` (`norm_before_residual`) the residual is the normed hidden state.
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
    """EAGLE-3's LM head over a draft vocabulary; tokens outside it get -inf.

    Attributes:
        token_ids: int64, the draft vocabulary's token ids (from `d2t`); None: the whole vocabulary.
    """

    norm: Norm
    head: Projection
    token_ids: torch.Tensor | None
    vocab_size: int

    @property
    def weight_bytes(self) -> int:
        return self.norm.weight_bytes + self.head.weight_bytes

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, float32 [rows, vocab], of hidden states [rows, hidden]."""
        draft_logits = self.head(self.norm(hidden)).float()
        if self.token_ids is None:
            return draft_logits
        logits = draft_logits.new_full((len(draft_logits), self.vocab_size), float("-inf"))
        return logits.index_copy_(1, self.token_ids, draft_logits)


@dataclass(frozen=True, slots=True)
class EagleWeights:
    """The learned parameters.

    Attributes:
        embedding: token embedding; the target's where the checkpoint has none.
        aux_hidden_state_layers: target layers whose input is read (EAGLE-3).
        aux_fusion: projects those states, concatenated, to one hidden state; None: the final hidden states,
            as the target's LM head reads them, are used (EAGLE).
        scores: the LM head; None: the target's.
    """

    embedding: TokenEmbedding
    aux_hidden_state_layers: tuple[int, ...]
    aux_fusion: Projection | None
    input_fusion: FusedInput | ConcatenatedInput
    attention: HeadAttention
    mlp_norm: Norm
    mlp: Block
    scores: DraftVocabularyHead | None

    @property
    def bytes_read(self) -> int:
        """Bytes of weights that a forward pass reads."""
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
    """The EAGLE draft head of a target.

    Keys and values of the pair (hidden state at t, token t + 1) are in slot t of the head's KV cache,
    which is addressed by the target's block ids. `cache_dtype` is that of stored keys and values; None: the
    head's.
    """

    def __init__(
        self,
        spec: ModelSpec,
        rope: RopeSpec,
        weights: EagleWeights,
        target: Decoder,
        max_model_len: int,
        dtype: torch.dtype,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        self.kv_layouts: tuple[KvLayout, ...] = spec.kv_layouts
        self.hidden_size = spec.shape.hidden_size
        self.aux_hidden_state_layers = weights.aux_hidden_state_layers
        self._weights = weights
        self._target = target
        device, layout = weights.embedding.device, spec.kv_layouts[0]
        self._rotary_embedding = RotaryEmbedding(
            [rope], spec.rotary_width, max_model_len, device, dtype, None
        )
        self._attend = attention_kernels(
            device, dtype, layout.key_dim, layout.value_dim, cache_dtype
        )

    @property
    def is_capturable(self) -> bool:
        """See `Decoder`."""
        return self._weights.mlp.is_capturable and reads_in_place(self._attend.causal)

    @property
    def captures_any_step(self) -> bool:
        """See `Decoder`."""
        return self.is_capturable and takes_static_metadata(self._attend.causal)

    @property
    def bytes_held(self) -> int:
        """Bytes of weights."""
        shared = self._weights.embedding is self._target.weights.embedding
        return self._weights.bytes_read + (0 if shared else self._weights.embedding.nbytes)

    @property
    def bytes_per_position(self) -> int:
        """Bytes of weights read per draft position, an LM head included."""
        has_head = self._weights.scores is not None
        return self._weights.bytes_read + (
            0 if has_head else self._target.weights.head.weight_bytes
        )

    @torch.inference_mode()
    def known(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [tokens, hidden] that the head starts from, of the target's output for those tokens.

        EAGLE-3 fuses the auxiliary hidden states; EAGLE takes the final ones.
        """
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
        """Hidden states at the tokens, [tokens, hidden], from those `before` them; fills the KV cache."""
        weights, positions = self._weights, inputs.positions
        attend = self._attend.of(inputs.batch)
        step = Step(inputs, positions, self._rotary_embedding.of(positions), attend)
        tokens = weights.embedding(inputs.token_ids)
        hidden, read = weights.input_fusion(tokens, before)
        hidden = hidden + weights.attention(read, step, caches[0])
        return hidden + weights.mlp(weights.mlp_norm(hidden))

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, float32 [rows, vocab], of hidden states of this head."""
        scores = self._weights.scores
        return self._target.logits(hidden) if scores is None else scores(hidden)

"""The layer that goes on from a model's own hidden states (Li et al., "EAGLE", arXiv:2401.15077)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from ...quant.errors import BadInput
from ..kernels.attention_kernels import PAGED_ATTENTION, AttentionSituation
from ..model.angles import StepAngles
from ..model.attention import HeadAttention, LayerCache, Rotation, Step, StepInputs
from ..model.decoder import Decoder
from ..model.families import model_spec
from ..model.loader import LayerLoader
from ..model.mlp import Block
from ..model.norm import Norm
from ..model.projection import Projection
from ..model.reader import CheckpointReader
from ..model.rope import RopeSpec
from ..model.spec import KvLayout, ModelSpec
from .heads_checkpoint import HeadsCheckpoint

_LAYER = "layers.0."


@dataclass(frozen=True, slots=True)
class EagleWeights:
    """What was learnt.

    Attributes:
        embedding: of the tokens; the model's own where the heads bring none.
        join: a token's embedding and the hidden state before it, beside each other, to one hidden state.
    """

    embedding: torch.Tensor
    join: Projection
    attention: HeadAttention
    mlp_norm: Norm
    mlp: Block

    @property
    def bytes_read(self) -> int:
        """Bytes that a step reads."""
        return sum(p.weight_bytes for p in (self.join, self.attention, self.mlp_norm, self.mlp))


class EagleHead:
    """From the hidden state at a position and the token behind it to the hidden state behind that.

    Its hidden states are the model's own, as the vocabulary projection reads them. Its keys and values of
    (hidden state at t, token t + 1) lie in slot t of a cache that has the model's blocks.
    """

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
        self._weights = weights
        self._target = target
        device, layout = weights.embedding.device, spec.kv_layouts[0]
        self._angles = StepAngles([rope], spec.rotary_width, max_model_len, device, dtype, None)
        sizes = layout.key_dim, layout.value_dim
        self._attend = [
            PAGED_ATTENTION.select(AttentionSituation(device.type, dtype, *sizes, trees)).run
            for trees in (False, True)
        ]

    @property
    def bytes_held(self) -> int:
        """Bytes of weights."""
        shared = self._weights.embedding is self._target.weights.embedding
        return self._weights.bytes_read + (0 if shared else self._weights.embedding.nbytes)

    @property
    def bytes_per_place(self) -> int:
        """Bytes that the guesses for one place read, the model's vocabulary projection included."""
        return self._weights.bytes_read + self._target.weights.head.weight_bytes

    @torch.inference_mode()
    def forward(
        self, inputs: StepInputs, before: torch.Tensor, caches: Sequence[LayerCache]
    ) -> torch.Tensor:
        """Hidden states behind tokens, [tokens, hidden], from those `before` them; fills the cache."""
        weights, positions = self._weights, inputs.positions
        attend = self._attend[inputs.batch.has_trees]
        step = Step(inputs, positions, self._angles.of(positions), attend)
        tokens = functional.embedding(inputs.token_ids, weights.embedding)
        hidden = weights.join(torch.cat([tokens, before], dim=-1))
        hidden = hidden + weights.attention(hidden, step, caches[0])
        return hidden + weights.mlp(weights.mlp_norm(hidden))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores over the vocabulary, float32 [rows, vocab], of hidden states of this head."""
        return self._target.logits(hidden)


def load_eagle(
    checkpoint: HeadsCheckpoint,
    target: Decoder,
    max_model_len: int,
    device: torch.device,
    dtype: torch.dtype,
) -> EagleHead:
    """The head that a folder holds, for `target`.

    Raises:
        BadInput: something is missing, of another size than the target, or of another kind.
    """
    folder, hidden = checkpoint.folder, target.spec.shape.hidden_size
    spec = model_spec(checkpoint.config)
    shape, rope = spec.shape, spec.ropes[0]
    if "fc.weight" not in checkpoint:
        raise BadInput(f"{folder}: no EAGLE head: the file has no fc.weight")
    for what, found, wanted in (
        ("a hidden size", shape.hidden_size, hidden),
        ("a vocabulary", shape.vocab_size, target.vocab_size),
    ):
        if found != wanted:
            raise BadInput(f"{folder}: a head for {what} of {found}; the model's is {wanted}")
    if shape.num_layers != 1 or shape.latent is not None or shape.experts is not None:
        raise BadInput(f"{folder}: config.json describes no EAGLE head: it is one dense layer")
    if rope is None:
        raise BadInput(f"{folder}: config.json describes no EAGLE head: it has no rotation")
    biases = {
        field: f"{_LAYER}self_attn.{linear}.bias" in checkpoint
        for field, linear in (("qkv_bias", "q_proj"), ("output_bias", "o_proj"))
    }
    spec = replace(spec, shape=replace(shape, **biases))
    reader = CheckpointReader(checkpoint, device, dtype)
    loader = LayerLoader(reader, spec, "", dtype, None)
    embedding = target.weights.embedding
    if "embed_tokens.weight" in checkpoint:
        embedding = reader.tensor("embed_tokens.weight", shape.vocab_size, hidden)
    weights = EagleWeights(
        embedding=embedding,
        join=reader.projection(["fc"], 2 * hidden, [hidden], bias="fc.bias" in checkpoint),
        attention=loader.head_attention(_LAYER, 0, Rotation(0, spec.rotary_neighbours)),
        mlp_norm=loader.norm(f"{_LAYER}post_attention_layernorm", hidden),
        mlp=loader.block(_LAYER, 0),
    )
    reader.finish(lambda name: name.endswith(spec.names.buffers))
    return EagleHead(spec, rope, weights, target, max_model_len, dtype)

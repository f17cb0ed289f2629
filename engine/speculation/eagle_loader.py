"""Reading EAGLE heads, by the names of their authors and of those who convert them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...quant.base.errors import BadInput
from ..model.decoder.decoder import Decoder
from ..model.decoder.families import model_spec
from ..model.decoder.loader import LayerLoader
from ..model.decoder.reader import CheckpointReader
from ..model.layers.attention import HeadAttention, Rotation
from ..model.layers.norm import Norm
from ..model.layers.projection import Projection
from ..model.spec.spec import ModelSpec
from .eagle_head import ConcatenatedInput, DraftVocabularyHead, EagleHead, EagleWeights, FusedInput
from .head_checkpoint import HeadsCheckpoint

_LAYERS = ("layers.0.", "midlayer.")
"""Names of the one layer: EAGLE's, EAGLE-3's."""


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
    folder, config = checkpoint.folder, checkpoint.config
    spec = model_spec(config)
    shape, rope = spec.shape, spec.ropes[0]
    if "fc.weight" not in checkpoint:
        raise BadInput(f"{folder}: no EAGLE head: the file has no fc.weight")
    if shape.num_layers != 1 or shape.latent is not None or shape.experts is not None:
        raise BadInput(f"{folder}: config.json describes no EAGLE head: it is one dense layer")
    if rope is None:
        raise BadInput(f"{folder}: config.json describes no EAGLE head: it has no rotation")
    is_third = any(f"{layer}hidden_norm.weight" in checkpoint for layer in _LAYERS)
    read = shape.hidden_size
    if is_third:
        read = config.get("target_hidden_size") or read
    _agree(folder, "hidden size", read, target.spec.shape.hidden_size)
    _agree(folder, "vocabulary", shape.vocab_size, target.vocab_size)
    layer = next((x for x in _LAYERS if f"{x}self_attn.q_proj.weight" in checkpoint), _LAYERS[0])
    biases = {
        field: f"{layer}self_attn.{linear}.bias" in checkpoint
        for field, linear in (("qkv_bias", "q_proj"), ("output_bias", "o_proj"))
    }
    spec = replace(spec, shape=replace(shape, **biases))
    reader = CheckpointReader(checkpoint, device, dtype)
    loader = LayerLoader(reader, spec, "", dtype, None)
    make = _third if is_third else _first
    weights = make(_Parts(checkpoint, reader, loader, layer, spec, target, device))
    reader.finish(lambda name: name.endswith(spec.names.buffers) or name == "t2d")
    return EagleHead(spec, rope, weights, target, max_model_len, dtype)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What the weights of a head are read from."""

    checkpoint: HeadsCheckpoint
    reader: CheckpointReader
    loader: LayerLoader
    layer: str
    spec: ModelSpec
    target: Decoder
    device: torch.device

    def embedding(self) -> torch.Tensor:
        """The head's own, or the target's, where that is as wide."""
        shape, shared = self.spec.shape, self.target.weights.embedding
        if "embed_tokens.weight" not in self.checkpoint and shared.shape[1] == shape.hidden_size:
            return shared
        return self.reader.tensor("embed_tokens.weight", shape.vocab_size, shape.hidden_size)

    def into(self, in_features: int) -> Projection:
        """The linear `fc`."""
        bias, out = "fc.bias" in self.checkpoint, self.spec.shape.hidden_size
        return self.reader.projection(["fc"], in_features, [out], bias=bias)

    def norm(self, name: str) -> Norm:
        return self.loader.norm(name, self.spec.shape.hidden_size)

    def attention(self, in_features: int) -> HeadAttention:
        rotation = Rotation(0, self.spec.rotary_interleaved)
        return self.loader.head_attention(self.layer, 0, rotation, in_features)


def _first(parts: _Parts) -> EagleWeights:
    hidden = parts.spec.shape.hidden_size
    return EagleWeights(
        embedding=parts.embedding(),
        aux_hidden_state_layers=(),
        aux_fusion=None,
        input_fusion=FusedInput(parts.into(2 * hidden)),
        attention=parts.attention(hidden),
        mlp_norm=parts.norm(f"{parts.layer}post_attention_layernorm"),
        mlp=parts.loader.block(parts.layer, 0),
        scores=None,
    )


def _third(parts: _Parts) -> EagleWeights:
    config, layer, shape = parts.checkpoint.config, parts.layer, parts.spec.shape
    hidden, read = shape.hidden_size, parts.target.spec.shape.hidden_size
    count = parts.target.spec.shape.num_layers
    aux_hidden_state_layers = config.get("eagle_aux_hidden_state_layer_ids") or (
        2,
        count // 2,
        count - 3,
    )
    if not all(
        isinstance(aux_layer, int) and 0 <= aux_layer < count
        for aux_layer in aux_hidden_state_layers
    ):
        raise BadInput(
            f"{parts.checkpoint.folder}: a head that reads what enters the layers {list(aux_hidden_state_layers)}; the model "
            f"has {count}"
        )
    scored = config.get("draft_vocab_size") or shape.vocab_size
    token_ids = None
    if "d2t" in parts.checkpoint:
        ahead = parts.reader.numbers("d2t", scored)
        token_ids = torch.arange(scored, device=parts.device) + ahead
        if not bool(((token_ids >= 0) & (token_ids < shape.vocab_size)).all()):
            raise BadInput(f"{parts.checkpoint.folder}: d2t leads out of the vocabulary")
    elif scored != shape.vocab_size:
        raise BadInput(
            f"{parts.checkpoint.folder}: {scored} tokens are scored, and no d2t says which"
        )
    return EagleWeights(
        embedding=parts.embedding(),
        aux_hidden_state_layers=tuple(aux_hidden_state_layers),
        aux_fusion=parts.into(len(aux_hidden_state_layers) * read),
        input_fusion=ConcatenatedInput(
            parts.norm(f"{layer}input_layernorm"),
            parts.norm(f"{layer}hidden_norm"),
            bool(config.get("norm_before_residual", False)),
        ),
        attention=parts.attention(2 * hidden),
        mlp_norm=parts.norm(f"{layer}post_attention_layernorm"),
        mlp=parts.loader.block(layer, 0),
        scores=DraftVocabularyHead(
            parts.norm("norm"),
            parts.reader.projection(["lm_head"], hidden, [scored], bias=False),
            token_ids,
            shape.vocab_size,
        ),
    )


def _agree(folder: Path, what: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise BadInput(f"{folder}: a head for a {what} of {found}; the model's is {wanted}")

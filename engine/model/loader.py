"""From a checkpoint to a decoder: every tensor in its place, none missing, none left over."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ...quant.checkpoint import Checkpoint
from ...quant.errors import BadInput
from ...quant.read import quantized_modules, read_quantized, tensor_names
from ...quant.tensors.base import QuantizedTensor
from .decoder import DecoderWeights, LayerWeights
from .projection import Projection
from .spec import ModelSpec

_log = logging.getLogger(__name__)

KV_CACHE_SCALES = (
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".k_proj.output_scale",
    ".v_proj.output_scale",
)
"""Endings of the scales that others use for a cache in 8 bits; the cache here keeps the model's dtype."""


class CheckpointReader:
    """Reads weights by module name, and keeps count of what has been read.

    Each tensor goes from its shard to the device in the engine's dtype; quantized ones stay codes.
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._dtype = dtype
        self._quantized = quantized_modules(checkpoint)
        self._unread = set(checkpoint.names)

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """A plain tensor, which must have `shape`."""
        tensor = self._checkpoint.tensor(name)
        if tuple(tensor.shape) != shape:
            raise BadInput(
                f"{self._checkpoint.folder}: {name} has shape {tuple(tensor.shape)}, "
                f"but config.json makes it {shape}"
            )
        if not tensor.is_floating_point():
            raise BadInput(f"{self._checkpoint.folder}: {name} holds {tensor.dtype}, not floats")
        self._unread.discard(name)
        return tensor.to(self._device, self._dtype)

    def is_quantized(self, module: str) -> bool:
        """Whether the checkpoint holds codes for the weight of a module."""
        return module in self._quantized

    def projection(
        self, modules: Sequence[str], in_features: int, out_features: Sequence[int], *, bias: bool
    ) -> Projection:
        """Linears that share their input, stacked in the order given."""
        weights = [
            self._weight(m, out, in_features) for m, out in zip(modules, out_features, strict=True)
        ]
        biases = None
        if bias:
            parts = [
                self.tensor(f"{m}.bias", out) for m, out in zip(modules, out_features, strict=True)
            ]
            biases = torch.cat(parts)
        return Projection(weights, biases, self._dtype)

    def finish(self, *, may_remain: Sequence[str] = ()) -> None:
        """Complain about tensors that nobody asked for; buffers that others save may remain."""
        endings = ("rotary_emb.inv_freq", ".g_idx", *KV_CACHE_SCALES)
        left = sorted(
            name for name in self._unread if not name.endswith(endings) and name not in may_remain
        )
        if any(name.endswith(KV_CACHE_SCALES) for name in self._unread):
            _log.warning(
                "%s has scales for a quantized KV cache; they are not used: the cache keeps the "
                "engine's dtype",
                self._checkpoint.folder,
            )
        if left:
            raise BadInput(
                f"{self._checkpoint.folder}: {len(left)} tensors have no place in the model that "
                f"config.json describes, the first is {left[0]}"
            )

    def _weight(
        self, module: str, out_features: int, in_features: int
    ) -> torch.Tensor | QuantizedTensor:
        if module not in self._quantized:
            return self.tensor(f"{module}.weight", out_features, in_features)
        weight = read_quantized(self._checkpoint, module)
        if weight.shape != (out_features, in_features):
            raise BadInput(
                f"{self._checkpoint.folder}: {module} unpacks to {weight.shape}, "
                f"but config.json makes it {(out_features, in_features)}"
            )
        self._unread -= tensor_names(self._checkpoint, module)
        return weight.to(self._device)


def load_weights(
    checkpoint: Checkpoint, spec: ModelSpec, device: torch.device, dtype: torch.dtype
) -> DecoderWeights:
    """Read the weights of a decoder that is named as transformers names the Llama family.

    Raises:
        BadInput: a tensor is missing, misshapen, or has no place in the model.
    """
    reader = CheckpointReader(checkpoint, device, dtype)
    hidden, vocab = spec.hidden_size, spec.vocab_size
    embedding = reader.tensor("model.embed_tokens.weight", vocab, hidden)
    layers = [_load_layer(reader, spec, f"model.layers.{i}") for i in range(spec.num_layers)]
    final_norm = reader.tensor("model.norm.weight", hidden)
    # A quantized head is a weight of its own, also where the config still calls it tied.
    tied = spec.tie_word_embeddings and not reader.is_quantized("lm_head")
    if tied:
        head = Projection([embedding], None, dtype)
    else:
        head = reader.projection(["lm_head"], hidden, [vocab], bias=False)
    # Some writers save the tied head a second time.
    reader.finish(may_remain=["lm_head.weight"] if tied else [])
    return DecoderWeights(embedding, layers, final_norm, head, tied)


def _load_layer(reader: CheckpointReader, spec: ModelSpec, prefix: str) -> LayerWeights:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return LayerWeights(
        input_norm=reader.tensor(f"{prefix}.input_layernorm.weight", hidden),
        qkv=reader.projection(
            [f"{attention}.{name}_proj" for name in "qkv"],
            hidden,
            [queries, keys, keys],
            bias=spec.qkv_bias,
        ),
        query_norm=reader.tensor(f"{attention}.q_norm.weight", spec.head_dim)
        if spec.qk_norm
        else None,
        key_norm=reader.tensor(f"{attention}.k_norm.weight", spec.head_dim)
        if spec.qk_norm
        else None,
        attention_output=reader.projection(
            [f"{attention}.o_proj"], queries, [hidden], bias=spec.output_bias
        ),
        mlp_norm=reader.tensor(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=reader.projection(
            [f"{mlp}.gate_proj", f"{mlp}.up_proj"], hidden, [inner, inner], bias=spec.mlp_bias
        ),
        down=reader.projection([f"{mlp}.down_proj"], inner, [hidden], bias=spec.mlp_bias),
    )

"""Variable-length batches through transformers' modules: paged attention in place of their own.

Attention and mask functions are registered with transformers. A dry run records what each layer caches, and
its mask. Of multi-head latent attention latents alone are cached: the projection to keys and values is
absorbed into queries and outputs (DeepSeek-V2, section 2.1.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import AttentionMaskInterface

from ...kernels.attention.batch import AttentionRule
from ...kernels.attention.dispatch import PAGED_ATTENTION, AttentionKernelQuery
from ...probe.measure import walk
from ..layers.attention import LayerCache, StepInputs
from ..layers.embedding import EmbeddedRows
from ..layers.spec import KvLayout
from .text_model import text_decoder, token_arguments

_MASK_ATTRIBUTE = "llmopt_mask"
MaskFunction = Callable[[Any, Any, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LayerMask:
    """Causal mask of a layer; with a sliding `window` or a `chunk`, in tokens, as in `AttentionRule`."""

    window: int | None = None
    chunk: int | None = None

    def visible(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        visible = key <= query
        if self.window is not None:
            visible = visible & (key > query - self.window)
        if self.chunk is not None:
            visible = visible & (key // self.chunk == query // self.chunk)
        return visible


def recorded_mask(
    *_: Any,
    mask_function: MaskFunction,
    device: torch.device,
    local_size: int | None = None,
    **__: Any,
) -> torch.Tensor:
    """Mask function for transformers: an empty tensor that carries the rule for `layer_mask` to read."""
    mask = torch.empty(1, 1, 1, 1, device=device)
    setattr(mask, _MASK_ATTRIBUTE, (mask_function, local_size))
    return mask


def layer_mask(mask: torch.Tensor | None, sliding_window: int | None) -> LayerMask:
    """Rule of a layer; causal without a mask. ValueError: the mask is the model's own or of another kind."""
    if mask is None:
        return LayerMask(window=sliding_window)
    function, size = getattr(mask, _MASK_ATTRIBUTE, (None, None))
    if function is None:
        raise ValueError("its attention needs a mask of its own")
    candidates = [LayerMask()]
    if size is not None:
        candidates = [LayerMask(window=size), LayerMask(chunk=size), LayerMask()]
    # At and around the first multiples of the size, where the kinds of masks differ.
    step = size or 16
    at = {step * k + d for k in range(4) for d in (-1, 0, 1, step // 2)}
    positions = torch.tensor(sorted(p for p in at if p >= 0), device=mask.device)
    query, key = positions[:, None], positions[None, :]
    allowed = function(0, 0, query, key)
    for candidate in candidates:
        if torch.equal(allowed.expand(len(positions), -1), candidate.visible(query, key)):
            return candidate
    raise ValueError("its attention has a mask other than causal, sliding-window or chunked")


PAGED = "llmopt_paged"
"""Name of the paged attention among transformers' attention and mask functions."""
_ATTRIBUTE = "llmopt_paged_attention"


class LayerCall(NamedTuple):
    """The arguments of a layer's attention, with tensors [tokens, heads, head_dim]."""

    layer: int
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    rule: AttentionRule


PagedAttention = Callable[[LayerCall], torch.Tensor]
"""Caches the keys and values of the step's tokens, and attends over what is cached."""


@dataclass(frozen=True, slots=True)
class CacheOfLayer:
    """Cache that a layer reads, and whether it fills it; False if it shares another's (Gemma 3n)."""

    index: int
    is_filled: bool


class _DryRun:
    """Records each layer's cache and the KV layouts; its attention returns zeros."""

    def __init__(self) -> None:
        self.caches: dict[int, CacheOfLayer] = {}
        self.layouts: list[KvLayout] = []
        # Held, so that no other tensor takes their place.
        self._keys: dict[object, torch.Tensor] = {}

    def __call__(self, call: LayerCall) -> torch.Tensor:
        layer, queries, keys, values, _ = call
        if layer in self.caches:
            raise ValueError("a layer attends more than once")
        identity = keys.data_ptr(), keys.shape, keys.stride()
        is_filled = identity not in self._keys
        if is_filled:
            self._keys[identity] = keys
            begins_keys = keys.data_ptr() == values.data_ptr() and keys.stride() == values.stride()
            self.layouts.append(
                KvLayout(keys.shape[1], keys.shape[2], values.shape[2], begins_keys)
            )
        self.caches[layer] = CacheOfLayer([*self._keys].index(identity), is_filled)
        return queries.new_zeros(*queries.shape[:2], values.shape[2])


class StepAttention:
    """Paged attention of a step: writes a layer's keys and values to its blocks, then attends over them."""

    def __init__(
        self, inputs: StepInputs, caches: Sequence[LayerCache], of_layers: dict[int, CacheOfLayer]
    ) -> None:
        self._inputs, self._caches, self._of_layers = inputs, caches, of_layers

    def __call__(self, call: LayerCall) -> torch.Tensor:
        layer, queries, keys, values, rule = call
        index = self._of_layers[layer]
        cache = self._caches[index.index]
        if index.is_filled:
            cache.keys.write(keys, self._inputs.slots)
            if not cache.values_in_keys:
                cache.values.write(values, self._inputs.slots)
        kernel_query = AttentionKernelQuery(
            queries.device.type,
            queries.dtype,
            cache.keys.dim,
            cache.values.dim,
            mask="tree" if self._inputs.batch.has_trees else "causal",
            stored=cache.keys.stored,
        )
        kernel = PAGED_ATTENTION.select(kernel_query).run
        return kernel(queries, cache.keys, cache.values, self._inputs.batch, rule)


class ModuleAttention:
    """The attention that runs at present, and each layer's mask; every module of a layer holds it."""

    def __init__(self, decoder: Any) -> None:
        self.run: PagedAttention | None = None
        self.masks: dict[int, LayerMask] = {}
        self._config: Any = decoder.config
        for module in decoder.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                setattr(module, _ATTRIBUTE, self)

    @contextmanager
    def running(self, run: PagedAttention) -> Iterator[None]:
        own = self._config._attn_implementation
        self.run, self._config._attn_implementation = run, PAGED
        try:
            yield
        finally:
            self.run, self._config._attn_implementation = None, own


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function: [rows, heads, tokens, head_dim] → [rows, tokens, heads, ..]; a row is a sequence.
    ValueError: the module gives a mask or a bias that paged attention does not have."""
    attention: ModuleAttention | None = getattr(module, _ATTRIBUTE, None)
    rows, tokens = query.shape[0], query.shape[2]
    if attention is None or attention.run is None or 1 not in (rows, tokens):
        raise ValueError("its attention is not that of a decoder's layer")
    if position_bias is not None:
        raise ValueError("its attention has a bias")
    layer = module.layer_idx
    if layer not in attention.masks:
        attention.masks[layer] = layer_mask(attention_mask, sliding_window)
    mask = attention.masks[layer]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rule = AttentionRule(scale, mask.window, chunk=mask.chunk, softcap=softcap, sinks=s_aux)
    queries, keys, values = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out = attention.run(LayerCall(layer, queries, keys, values, rule))
    return out.unflatten(0, (rows, tokens)), None


AttentionInterface.register(PAGED, paged_attention)
AttentionMaskInterface.register(PAGED, recorded_mask)


class PackedForward:
    """One pass over the concatenated tokens of a step; ValueError: no support of `AttentionInterface`."""

    def __init__(self, model: Any, _: str) -> None:
        decoder = text_decoder(model)
        if not (decoder._supports_attention_backend and decoder._supports_flash_attn):
            raise ValueError("its attention cannot be replaced")
        self._model = model
        self._attention = ModuleAttention(decoder)
        self._caches: dict[int, CacheOfLayer] = {}
        decoder.set_attn_implementation(PAGED)

    def layouts(self, tokens: torch.Tensor) -> tuple[tuple[KvLayout, ...], tuple[()]]:
        """KV layouts of layers with a cache, by a dry run. ValueError: a mask of another kind."""
        dry = _DryRun()
        self._run(tokens, torch.arange(len(tokens), device=tokens.device), dry)
        if not dry.caches:
            raise ValueError("its attention cannot be replaced")
        self._caches = dry.caches
        return tuple(dry.layouts), ()

    def __call__(self, inputs: StepInputs, caches: Sequence[LayerCache]) -> torch.Tensor:
        step = StepAttention(inputs, caches, self._caches)
        return self._run(inputs.token_ids, inputs.positions, step, inputs.embedded)

    def _run(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        paged: PagedAttention,
        embedded: EmbeddedRows | None = None,
    ) -> torch.Tensor:
        with self._running(paged):
            return self._model(
                **token_arguments(self._model, tokens, embedded),
                # All ones: without it the mask functions would look for sequences in the positions.
                attention_mask=torch.ones_like(tokens)[None],
                position_ids=positions[None],
                use_cache=False,
            ).logits[0]

    def _running(self, paged: PagedAttention) -> AbstractContextManager[None]:
        return self._attention.running(paged)


def has_attention_alone(cache: Any) -> bool:
    """True if a cache holds keys and values alone; layers that share another's have no tensors there."""
    layers = getattr(cache, "layers", None) or ()
    holders = {type(layer) for layer in layers if any(torch.is_tensor(x) for _, x in walk(layer))}
    return bool(holders) and holders <= {DynamicLayer, DynamicSlidingWindowLayer}


def latent_layers(model: Any) -> dict[int, Any]:
    """Attention modules, by layer, that cache a latent and a shared key and expand them (`expand_kv`)."""
    return {
        module.layer_idx: module
        for module in model.modules()
        if hasattr(module, "expand_kv") and isinstance(_projection(module), torch.nn.Linear)
    }


def latent_projections(model: Any) -> list[torch.nn.Linear]:
    """The linears whose weights are absorbed: they stay plain, and take no LoRA adapter."""
    return [_projection(module) for module in latent_layers(model).values()]


class LatentForward(PackedForward):
    """`PackedForward` for models with latent attention."""

    def __init__(self, model: Any, own_attention: str) -> None:
        super().__init__(model, own_attention)
        self._latents = latent_layers(model)

    @contextmanager
    def _running(self, paged: PagedAttention) -> Iterator[None]:
        for module in self._latents.values():
            module.expand_kv = lambda latents, shared_keys: (latents, shared_keys)
        try:
            with super()._running(_AbsorbedAttention(paged, self._latents)):
                yield
        finally:
            for module in self._latents.values():
                del module.expand_kv


@dataclass(frozen=True, slots=True)
class _AbsorbedAttention:
    """Paged attention whose keys and values, in layers of latent attention, are latents and shared keys."""

    paged: PagedAttention
    latents: Mapping[int, Any]

    def __call__(self, call: LayerCall) -> torch.Tensor:
        """Attend with `queries` [tokens, heads, nope + rope] to [tokens, heads, v_dim]; in a latent layer
        `keys` are latents [tokens, 1, rank], `values` shared keys [tokens, 1, rope]."""
        layer, queries, keys, values, rule = call
        module = self.latents.get(layer)
        if module is None:
            return self.paged(call)
        nope = module.qk_nope_head_dim
        weight = _projection(module).weight  # [heads * (nope + v_dim), rank]
        weight = weight.unflatten(0, (queries.shape[1], -1))
        absorbed = torch.einsum("thn,hnr->thr", queries[..., :nope], weight[:, :nope])
        joined = torch.cat([keys, values], dim=-1)
        joined_queries = torch.cat([absorbed, queries[..., nope:]], dim=-1)
        latents = joined[..., : keys.shape[-1]]
        of_latents = self.paged(LayerCall(layer, joined_queries, joined, latents, rule))
        return torch.einsum("thr,hvr->thv", of_latents, weight[:, nope:])


def _projection(module: Any) -> Any:
    return getattr(module, "kv_b_proj", None)

"""Transformers backend: causal LMs without a native decoder, over the paged KV cache.

The forward pass runs transformers' modules with the engine's paged attention (`AttentionInterface`). Models
whose attention cannot be replaced run sequence by sequence, over a `Cache` that reads and writes the blocks.
Which of the two a model supports, if any, is determined at load by comparing the logits of a few tokens with
the model's own forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from ....quant.base.errors import BadInput
from ....quant.model.checkpoint import Checkpoint
from ...config.compatibility import refuse
from ...kernels.attention.paged_attention import AttentionBatch, SequenceSpan
from ..layers.attention import LayerCache, StepInputs
from ..layers.state import StateBatch, StateLayout
from ..spec.spec import KvLayout
from .latent_forward import LatentForward, latent_layers
from .paged_modules import PackedForward
from .sequential import SequentialForward, TokenByTokenForward

_CHECKED_TOKENS = 7
_GROWING_ROTATIONS = ("dynamic", "longrope")


class TransformersModel:
    """A causal LM of transformers behind the `CausalModel` interface.

    Raises:
        BadInput: transformers does not support the model, its cache is of no kind that can be paged, it is
            quantized, or its weights do not match its config.
    """

    window = None
    """None: sliding windows are internal to the modules, so no blocks are evicted."""
    is_capturable = False
    """False: the modules may have data-dependent control flow."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self._name = f"{checkpoint.folder}: model type {checkpoint.config.get('model_type')!r}"
        config = self._checked_config(checkpoint)
        self.vocab_size = int(config.vocab_size)
        self.max_context = _longest(config)
        self._model = self._load(checkpoint, dtype).to(device).eval()
        self._device, self._dtype = device, dtype
        self._forward: PackedForward | SequentialForward
        self._forward, self.kv_layouts, self.state_layouts = self._choose()
        parameters = list(self._model.parameters())
        self.bytes_held = sum(parameter.nbytes for parameter in parameters)
        table, head = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        untied = head is not None and head.weight is not table.weight
        self.bytes_per_step = self.bytes_held - (table.weight.nbytes if untied else 0)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, caches: Sequence[LayerCache]) -> torch.Tensor:
        """Run a step and fill the KV caches; returns logits [tokens, vocab].

        Models differ in what follows the last norm, so logits are computed for every token.
        """
        return self._forward(inputs, caches)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of some rows, as `forward` returned them, in float32."""
        return hidden.float()

    def _checked_config(self, checkpoint: Checkpoint) -> Any:
        if not checkpoint.folder.is_dir() or checkpoint.quantization_config is not None:
            refuse({"transformers", "quantized"}, f"{self._name}: this checkpoint is quantized")
        try:
            config = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)
        except Exception as error:  # a broken or unknown config may raise anything
            raise BadInput(f"{self._name} is not known to transformers: {_line(error)}") from error
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or config.is_encoder_decoder:
            raise BadInput(f"{self._name} is not a causal language model of transformers")
        rope = getattr(config, "rope_parameters", None) or {}
        nested = [part for part in rope.values() if isinstance(part, Mapping)]
        for part in nested or [rope]:
            if part.get("rope_type") in _GROWING_ROTATIONS:
                raise BadInput(
                    f"{self._name} has rope_type {part['rope_type']!r}: what is cached would depend "
                    "on what follows it"
                )
        return config

    def _load(self, checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
        had_bar = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()
        load: Any = AutoModelForCausalLM.from_pretrained
        try:
            model, report = load(
                checkpoint.folder, dtype=dtype, output_loading_info=True, trust_remote_code=False
            )
        except Exception as error:
            raise BadInput(f"{self._name} does not load: {_line(error)}") from error
        finally:
            if had_bar:
                transformers_logging.enable_progress_bar()
        wrong = [*report["missing_keys"], *report["mismatched_keys"]]
        if wrong:
            raise BadInput(f"{self._name} does not load: {wrong[0]} is missing or misshapen")
        return model

    @torch.inference_mode()
    def _choose(
        self,
    ) -> tuple[PackedForward | SequentialForward, tuple[KvLayout, ...], tuple[StateLayout, ...]]:
        """The first forward whose logits match the model's own, and the layouts of what it caches."""
        tokens = torch.arange(_CHECKED_TOKENS, device=self._device) % self.vocab_size
        try:
            expected = self._model(input_ids=tokens[None], use_cache=True).logits[0].float()
        except Exception as error:  # modules may fail in any way on their own as well
            raise BadInput(f"{self._name} does not run: {_line(error)}") from error
        own_attention = self._model.config._attn_implementation
        reasons = []
        packed = [LatentForward] if latent_layers(self._model) else []
        for kind in (*packed, PackedForward, SequentialForward, TokenByTokenForward):
            try:
                forward = kind(self._model, own_attention)
                layouts, states = forward.layouts(tokens)
                if self._agrees(forward, layouts, states, tokens, expected):
                    return forward, layouts, states
                reasons.append("the results differ")
            except Exception as error:  # modules may fail in any way here
                reasons.append(_line(error))
        raise BadInput(f"{self._name} does not run over a paged cache: {'; '.join(reasons)}")

    def _agrees(
        self,
        forward: PackedForward | SequentialForward,
        layouts: Sequence[KvLayout],
        states: Sequence[StateLayout],
        tokens: torch.Tensor,
        expected: torch.Tensor,
    ) -> bool:
        """Whether two paged steps, the second with another sequence batched, give the `expected` logits."""
        caches = [LayerCache.zeros(layout, 4, 4, self._device, self._dtype) for layout in layouts]
        held = tuple(state.zeros(2, self._device) for state in states)
        split = 4
        first = self._step(tokens, [(0, split, [2])], held)
        second = self._step(tokens, [(split, len(tokens), [2, 1]), (0, 2, [3])], held)
        actual = torch.cat([forward(first, caches), forward(second, caches)]).float()
        wanted = torch.cat([expected, expected[:2]])
        tolerance = 1e-3 if self._dtype is torch.float32 else 0.05
        return bool((actual - wanted).abs().mean() <= tolerance * expected.std())

    def _step(
        self,
        tokens: torch.Tensor,
        runs: Sequence[tuple[int, int, Sequence[int]]],
        states: tuple[torch.Tensor, ...],
    ) -> StepInputs:
        """Inputs for runs of (first position, end, blocks of 4 tokens) of `tokens`.

        The state slot of a run is its index.
        """
        spans: list[SequenceSpan] = []
        positions: list[int] = []
        slots: list[int] = []
        for begin, end, blocks in runs:
            row = len(positions)
            table = torch.tensor(blocks, device=self._device)
            spans.append(SequenceSpan(row, row + end - begin, end, table))
            positions += range(begin, end)
            slots += [blocks[p // 4] * 4 + p % 4 for p in range(begin, end)]
        at = torch.tensor(positions, device=self._device)
        batch = AttentionBatch(spans, None, 4, self._dtype)
        held = StateBatch(states, torch.arange(len(runs), device=self._device))
        of_tokens = torch.tensor(slots, device=self._device)
        return StepInputs(tokens[at], at, of_tokens, batch, states=held)


def _longest(config: Any) -> int | None:
    """The context length, under any of the configs' names for it."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    lengths = [getattr(config, name, None) for name in names]
    return next((int(n) for n in lengths if isinstance(n, int) and n > 0), None)


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

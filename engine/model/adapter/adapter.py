"""Transformers backend: causal LMs without a native decoder, over the paged KV cache.

transformers' modules run with the engine's paged attention (`AttentionInterface`), or sequence by sequence
over a `Cache` on the blocks. Which of the two serves a model is found at load, by the logits of a few tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ....base.errors import BadInput, first_line, reported_as
from ....quant.model.auto import check_grouped_norm
from ....quant.model.checkpoint import Checkpoint
from ...config.compatibility import refuse
from ...kernels.attention.batch import AttentionBatch, DecodeGroup, SequenceSpan
from ...kernels.attention.dispatch import PAGED_ATTENTION, AttentionKernelQuery, reads_in_place
from ..layers.attention import LayerCache, StepInputs
from ..layers.lora import AdapterBank
from ..layers.parallel import Shard
from ..layers.spec import ImageSpec, KvLayout, LoadingOptions
from ..layers.state import StateBatch, StateLayout
from .linears import (
    CurrentAdapters,
    ProjectedLinear,
    adapter_sites,
    checked_config,
    described,
    load_model,
)
from .packed import LatentForward, PackedForward, has_attention_alone, latent_layers
from .sequential import SequentialForward, TokenByTokenForward
from .sharded import ModelShard
from .text_model import own_pass, plain_tokens, run_and_drop_uncalled, text_decoder

_log = logging.getLogger(__name__)

_CHECKED_TOKENS = 7


class TransformersModel:
    """A causal LM of transformers, with the interface of `Decoder`. BadInput: transformers does not support
    the model, its cache cannot be paged, or weights or adapters do not fit."""

    window = None
    """Sliding windows are internal to the modules, so no blocks are evicted."""
    hidden_size: int | None = None
    """Width of the hidden states that `forward` returns; None: it returns logits."""
    captures_any_step = False

    def __init__(
        self, checkpoint: Checkpoint, options: LoadingOptions, shard: Shard | None = None
    ) -> None:
        self._name = described(checkpoint)
        self.image_spec = ImageSpec()
        self.broadcast: Callable[[str, Any], None] | None = None
        config = checked_config(checkpoint)
        check_grouped_norm(config, str(checkpoint.folder))
        self.max_context = _longest(config.get_text_config(decoder=True)) or _longest(config)
        self._adapters = CurrentAdapters()
        self._device = options.device if shard is None else torch.device("cpu")
        whole = replace(options, device=self._device)
        self._model = load_model(checkpoint, config, whole, self._adapters)
        self._decoder = text_decoder(self._model)
        self._dtype, self._cache_dtype = options.dtype, options.cache_dtype
        self._forward: PackedForward | SequentialForward
        self._forward, self.kv_layouts, self.state_layouts = self._choose()
        self._shard = None if shard is None else self._divide(shard, options)
        self.bytes_held = sum(weight.nbytes for weight in self._model.parameters())
        linears = (m for m in self._model.modules() if isinstance(m, ProjectedLinear))
        self.bytes_held += sum(linear.site.projection.weight_bytes for linear in linears)
        table, head = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        untied = getattr(head, "weight", None) is not table.weight
        self.bytes_per_step = self.bytes_held - (table.weight.nbytes if untied else 0)
        self.lora_bank: AdapterBank | None = None
        if options.loras or options.max_loras is not None:
            if isinstance(self._forward, SequentialForward):
                self._forward.adapters = self._adapters
            sites = adapter_sites(self._decoder, self._model, self._dtype, self._adapters)
            bank = AdapterBank(options.loras, sites, ("",), self._device, self._dtype)
            self.bytes_held += bank.num_bytes
            self.bytes_per_step += bank.num_bytes
            if options.max_loras is not None:
                bank.prepare()
            self.lora_bank = bank

    @property
    def is_capturable(self) -> bool:
        """True if decode steps are captured: on a GPU, where all sequences decode at once."""
        forward = self._forward
        if isinstance(forward, SequentialForward):
            at_once = forward.batched is not None
        else:
            at_once = type(forward) in (PackedForward, LatentForward) and self._shard is None
        if not at_once or self._device.type != "cuda":
            return False
        widths = ((layout.key_dim, layout.value_dim) for layout in self.kv_layouts)
        queries = (
            AttentionKernelQuery("cuda", self._dtype, *dims, stored=self._cache_dtype)
            for dims in widths
        )
        return all(reads_in_place(PAGED_ATTENTION.select(query).run) for query in queries)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, caches: Sequence[LayerCache]) -> torch.Tensor:
        """Run a step and fill the KV caches; logits [tokens, vocab] of every token."""
        if self.broadcast is not None:
            self.broadcast("forward", inputs)
        self._adapters.rows = inputs.adapters
        return self._forward(inputs, caches)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.float()

    @torch.inference_mode()
    def check_shards(self) -> None:
        """Compute over all connected ranks from now on. BadInput: the logits are not the whole model's."""
        assert self._shard is not None
        self._shard.connect()
        if not self._runs_in_chunks(self._forward, self.kv_layouts, ()):
            raise BadInput(f"{self._name}: divided by transformers' plan, its results differ")

    @torch.inference_mode()
    def _divide(self, shard: Shard, options: LoadingOptions) -> ModelShard:
        """Exchange the model for this rank's shard on its device, and measure its cache; or BadInput."""
        if self.state_layouts:
            refuse({"tensor-parallel", "states"}, self._name)
        if type(self._forward) is not PackedForward:
            raise BadInput(
                f"{self._name}: tensor_parallel_size = {shard.size}: of the models that run through "
                "transformers, those with plain attention alone are divided"
            )
        with reported_as(self._name, BadInput):
            part = ModelShard(self._model, self._decoder, shard, options, self._adapters)
        self._device = options.device
        self._model.to(self._device)
        self._checked = tuple(tensor.to(self._device) for tensor in self._checked)
        with reported_as(f"{self._name} does not run divided"):
            self.kv_layouts, self.state_layouts = self._forward.layouts(self._checked[0])
        return part

    @torch.inference_mode()
    def _choose(
        self,
    ) -> tuple[PackedForward | SequentialForward, tuple[KvLayout, ...], tuple[StateLayout, ...]]:
        """The first forward whose logits match the model's own, and the layouts of what it caches."""
        tokens = plain_tokens(self._model, _CHECKED_TOKENS).to(self._device)
        with reported_as(f"{self._name} does not run on text"):
            expected, cache = run_and_drop_uncalled(
                self._model, self._decoder, lambda: own_pass(self._model, tokens)
            )
        self.vocab_size = expected.shape[-1]
        self._checked = (tokens, expected)
        own_attention = self._decoder.config._attn_implementation
        packed = (LatentForward, PackedForward) if latent_layers(self._model) else (PackedForward,)
        sequential = (SequentialForward, TokenByTokenForward)
        reasons = []
        for kind in (*packed, *sequential) if has_attention_alone(cache) else sequential:
            try:
                forward = kind(self._model, own_attention)
                layouts, states = forward.layouts(tokens)
                if self._runs_in_chunks(forward, layouts, states):
                    if isinstance(forward, SequentialForward):
                        self._batch_decode(forward, layouts, states)
                    return forward, layouts, states
                reasons.append("the results differ")
            except Exception as error:  # modules may fail in any way here
                reasons.append(first_line(error))
        try:
            alone, _ = own_pass(self._model, tokens[:2])
        except Exception:  # then it does not run at all
            alone = expected[:2]
        if bool((alone - expected[:2]).abs().mean() > 0.05 * expected.std()):
            reasons = ["a token attends to the tokens after it"]
        raise BadInput(f"{self._name} does not run over a paged cache: {'; '.join(reasons)}")

    def _batch_decode(
        self, forward: SequentialForward, layouts: Sequence[KvLayout], states: Sequence[StateLayout]
    ) -> None:
        """Have decode steps computed in one pass, where their logits are those of the model's own."""
        tokens, expected = self._checked
        try:
            forward.batch_decode()
            caches, state_batch = self._empty(layouts, states)
            forward(self._step(tokens, [(0, 4, [2])], state_batch), caches)
            # A sequence that goes on next to one that begins, each in two blocks of 4 tokens.
            tables = torch.tensor([[2, 1], [3, 0]], device=self._device)
            rows = torch.arange(2, device=self._device)
            decoded = []
            for position in (4, 5):
                at = torch.tensor([position, position - 4], device=self._device)
                group = DecodeGroup(rows, tables.flatten(), at + 1, torch.zeros_like(at))
                batch = AttentionBatch([], group, 4, self._dtype)
                slots, states_of = tables[rows, at // 4] * 4 + at % 4, StateBatch(state_batch, rows)
                step = StepInputs(tokens[at], at, slots, batch, states=states_of)
                decoded.append(forward(step, caches))
            actual = torch.cat(decoded).float()
            if self._agrees(actual, expected[[4, 0, 5, 1]]):
                return
            reason = "the results differ"
        except Exception as error:  # modules may fail in any way here
            reason = first_line(error)
        forward.batched = None
        _log.debug("%s decodes sequence by sequence: %s", self._name, reason)

    def _runs_in_chunks(
        self,
        forward: PackedForward | SequentialForward,
        layouts: Sequence[KvLayout],
        states: Sequence[StateLayout],
    ) -> bool:
        """True if two paged steps, the second with another sequence batched, give the model's own logits."""
        (tokens, expected), split = self._checked, 4
        caches, state_batch = self._empty(layouts, states)
        first = self._step(tokens, [(0, split, [2])], state_batch)
        second = self._step(tokens, [(split, len(tokens), [2, 1]), (0, 2, [3])], state_batch)
        actual = torch.cat([forward(first, caches), forward(second, caches)]).float()
        return self._agrees(actual, torch.cat([expected, expected[:2]]))

    def _agrees(self, actual: torch.Tensor, expected: torch.Tensor) -> bool:
        # Strict where rounding allows it: a state that is lost between steps may move the logits little.
        exact = self._dtype is torch.float32
        tolerance = 0.05 if not exact else 1e-5 if self._device.type == "cpu" else 1e-3
        return bool((actual - expected).abs().mean() <= tolerance * expected.std())

    def _empty(
        self, layouts: Sequence[KvLayout], states: Sequence[StateLayout]
    ) -> tuple[list[LayerCache], tuple[torch.Tensor, ...]]:
        """Caches of four blocks of 4 tokens, and states of two slots."""
        caches = [LayerCache.empty(layout, 4, 4, self._device, self._dtype) for layout in layouts]
        if self._device.type != "cpu":
            # As in `KvCache`: libraries' kernels may weigh unwritten rows.
            for part in (part for cache in caches for part in cache.parts):
                part.zero_()
        return caches, tuple(state.empty(2, self._device) for state in states)

    def _step(
        self,
        tokens: torch.Tensor,
        runs: Sequence[tuple[int, int, Sequence[int]]],
        states: tuple[torch.Tensor, ...],
    ) -> StepInputs:
        """Inputs for runs of (first position, end, blocks of 4 tokens); a run's index is its state slot."""
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
        state_batch = StateBatch(states, torch.arange(len(runs), device=self._device))
        of_tokens = torch.tensor(slots, device=self._device)
        return StepInputs(tokens[at], at, of_tokens, batch, states=state_batch)


def _longest(config: Any) -> int | None:
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    lengths = [getattr(config, name, None) for name in names]
    return next((int(n) for n in lengths if isinstance(n, int) and n > 0), None)

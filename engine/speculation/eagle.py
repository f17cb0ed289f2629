"""EAGLE: a one-layer draft head that predicts the target's next hidden states, and the proposer that runs it.

EAGLE (arXiv:2401.15077) and EAGLE-3 (arXiv:2503.01840) map (hidden state at t, token t + 1) to a hidden state
at t + 1. EAGLE reads and predicts what the target's LM head reads, EAGLE-3 the inputs of three target layers
and a hidden state of its own, with an LM head over a reduced vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from ...quant.families.spec_parts import RopeSpec
from ..base.device import packed
from ..cache.kv_cache import KvCache
from ..cache.step_inputs import Run
from ..kernels.attention.dispatch import attention_kernels, reads_in_place, takes_static_metadata
from ..model.decoder.decoder import Decoder
from ..model.layers.attention import HeadAttention, LayerCache, Step, StepInputs
from ..model.layers.embedding import RotaryEmbedding, TokenEmbedding
from ..model.layers.mlp import FeedForward
from ..model.layers.norm import Norm
from ..model.layers.projection import Projection, Weights
from ..model.layers.spec import KvLayout, LoadingOptions, ModelSpec
from ..scheduling.draft_length import Tree
from ..scheduling.step_plan import ScheduledRow
from .proposer import (
    CachedProposer,
    DraftTokens,
    SamplingRowOf,
    TargetStates,
    TreeExpansion,
    coupled_chains,
    expand_trees,
)


@dataclass(frozen=True, slots=True)
class FusedInput(Weights):
    """EAGLE's input: token embedding and hidden state, concatenated and projected to one hidden state."""

    fc: Projection

    def __call__(
        self, tokens: torch.Tensor, before: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.fc(torch.cat([tokens, before], dim=-1))
        return hidden, hidden


@dataclass(frozen=True, slots=True)
class ConcatenatedInput(Weights):
    """EAGLE-3's input: attention reads token embedding and hidden state, each normed; so does the residual,
    if `norms_residual`."""

    token_norm: Norm
    hidden_norm: Norm
    norms_residual: bool

    def __call__(
        self, tokens: torch.Tensor, before: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.hidden_norm(before)
        residual = normed if self.norms_residual else before
        return residual, torch.cat([self.token_norm(tokens), normed], dim=-1)


@dataclass(frozen=True, slots=True)
class DraftVocabularyHead:
    """EAGLE-3's LM head over `token_ids` (from `d2t`; None: all), int64; other tokens get -inf."""

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
class EagleWeights(Weights):
    """The learned parameters; a pass reads all but the embedding, the target's where the checkpoint has none.
    `aux_fusion` projects the inputs of the target's `aux_hidden_state_layers` (EAGLE-3) to one hidden state;
    None: the final ones (EAGLE). `scores` is the LM head; None: the target's."""

    embedding: TokenEmbedding
    aux_hidden_state_layers: tuple[int, ...]
    aux_fusion: Projection | None
    input_fusion: FusedInput | ConcatenatedInput
    attention: HeadAttention
    mlp_norm: Norm
    mlp: FeedForward
    scores: DraftVocabularyHead | None


class EagleHead:
    """EAGLE draft head: (hidden state at t, token t + 1) has slot t of its cache, in the target's blocks."""

    def __init__(
        self,
        spec: ModelSpec,
        rope: RopeSpec,
        weights: EagleWeights,
        target: Decoder,
        loading: LoadingOptions,
    ) -> None:
        self.kv_layouts: tuple[KvLayout, ...] = spec.kv_layouts
        self.hidden_size = spec.shape.hidden_size
        self.aux_hidden_state_layers = weights.aux_hidden_state_layers
        self._weights, self._target = weights, target
        self.bytes_held = self.bytes_per_position = weights.weight_bytes
        if weights.embedding is not target.weights.embedding:
            self.bytes_held += weights.embedding.nbytes
        if weights.scores is None:
            self.bytes_per_position += target.weights.head.weight_bytes
        device, layout = weights.embedding.device, spec.kv_layouts[0]
        dtype, longest = loading.dtype, loading.max_model_len or spec.shape.max_context
        self._rotary_embedding = RotaryEmbedding(
            [rope], spec.rotary_width, longest, device, dtype, None
        )
        self._attend = attention_kernels(
            device, dtype, layout.key_dim, layout.value_dim, loading.cache_dtype
        )

    @property
    def is_capturable(self) -> bool:
        return self._weights.mlp.is_capturable and reads_in_place(self._attend.causal)

    @property
    def captures_any_step(self) -> bool:
        return self.is_capturable and takes_static_metadata(self._attend.causal)

    @torch.inference_mode()
    def known(self, hidden: torch.Tensor) -> torch.Tensor:
        """The head's first hidden states [tokens, hidden]: of fused auxiliary states (EAGLE-3), or final
        ones."""
        if self._weights.aux_fusion is None:
            return hidden
        return self._weights.aux_fusion(hidden[:, self._target.spec.shape.hidden_size :])

    @torch.inference_mode()
    def forward(
        self, inputs: StepInputs, caches: Sequence[LayerCache], before: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states at the tokens, [tokens, hidden], from those `before` them; fills the KV cache."""
        weights, positions = self._weights, inputs.positions
        attend = self._attend.of(inputs.batch)
        step = Step(inputs, positions, self._rotary_embedding.of(positions), attend)
        hidden, read = weights.input_fusion(weights.embedding(inputs.token_ids), before)
        hidden = hidden + weights.attention(read, step, caches[0])
        return hidden + weights.mlp(weights.mlp_norm(hidden))

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        scores = self._weights.scores
        return self._target.logits(hidden) if scores is None else scores(hidden)


@dataclass(slots=True)
class _HeadTree:
    """Draft tree of a row: `hidden` at each draft token, -1: at the last known one; `order` of the slots."""

    expansion: TreeExpansion
    hidden: dict[int, torch.Tensor]
    order: list[int] = field(default_factory=list)

    def run(self) -> Run:
        """Run of the frontier, after the last known token, whose (state, next token) has its slot."""
        row, parents = self.expansion.row, self.expansion.parents
        start = row.end - 1 + len(self.order)
        self.order += self.expansion.frontier
        slots = {index: slot for slot, index in enumerate(self.order)}
        tree = Tree(tuple(slots.get(parents[index], -1) for index in self.order))
        tokens = [self.expansion.tokens[index] for index in self.expansion.frontier]
        return Run(start, tokens, row.block_ids, tree)

    def before(self) -> list[torch.Tensor]:
        return [self.hidden[self.expansion.parents[index]] for index in self.expansion.frontier]


class EagleProposer(CachedProposer):
    """Runs the EAGLE head over every token of every step; expands draft trees from its last hidden states.

    So shared blocks hold the head's keys and values too. A chain (`width` 1) stays on the device until its
    last token; of a tree the host chooses each level's frontier. The last slot of a shared prefix, and a
    fork's missing state, only lower acceptance.
    """

    def __init__(
        self, head: EagleHead, cache: KvCache, width: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(head, cache, device, dtype)
        self.aux_hidden_state_layers = head.aux_hidden_state_layers
        self._width = width
        self._hidden: dict[tuple[str, int], torch.Tensor] = {}

    def observe(self, steps: Sequence[TargetStates]) -> None:
        runs = [Run(step.row.start, step.next_ids, step.row.block_ids) for step in steps]
        hidden = self.model.known(torch.cat([step.hidden for step in steps]))
        ends = [end - 1 for end in accumulate(len(run.token_ids) for run in runs)]
        # A copy: the next replay of a graph overwrites its result.
        last = self.forward(runs, None, hidden).index_select(0, packed([ends], self._device)[0])
        self._hidden = {step.place: state for step, state in zip(steps, last, strict=True)}

    def propose(
        self, rows: Sequence[ScheduledRow], draw: SamplingRowOf
    ) -> Mapping[str, DraftTokens]:
        known = {
            row.sequence_id: hidden
            for row in rows
            if row.num_draft_tokens
            and (hidden := self._hidden.get((row.sequence_id, row.end - 1))) is not None
        }
        rows = [row for row in rows if row.sequence_id in known]
        if self._width == 1:
            return self._chains(rows, known, draw) if rows else {}
        head_trees = {
            row.sequence_id: _HeadTree(
                TreeExpansion(row, self._width), {-1: known[row.sequence_id]}
            )
            for row in rows
        }

        def logits(active: Sequence[TreeExpansion]) -> torch.Tensor:
            trees = [head_trees[expansion.row.sequence_id] for expansion in active]
            if active[0].level:
                before = [hidden for tree in trees for hidden in tree.before()]
                runs = [tree.run() for tree in trees]
                states = self.forward(runs, None, torch.stack(before))
                by_tree = states.split([len(run.token_ids) for run in runs])
                for tree, states in zip(trees, by_tree, strict=True):
                    tree.hidden |= zip(tree.expansion.frontier, states.unbind(), strict=True)
            hidden = [tree.hidden[index] for tree in trees for index in tree.expansion.frontier]
            return self.model.logits(torch.stack(hidden))

        expansions = [tree.expansion for tree in head_trees.values()]
        return expand_trees(expansions, self._sampler, draw, logits)

    def _chains(
        self, rows: Sequence[ScheduledRow], known: Mapping[str, torch.Tensor], draw: SamplingRowOf
    ) -> Mapping[str, DraftTokens]:
        hidden = torch.stack([known[row.sequence_id] for row in rows])

        def follow(
            rows: Sequence[ScheduledRow],
            chains: Sequence[list[int]],
            tokens: torch.Tensor,
            kept: torch.Tensor | None,
        ) -> torch.Tensor:
            nonlocal hidden
            before = hidden if kept is None else hidden.index_select(0, kept)
            # The pair of the last known token is in the slot before it.
            runs = [
                Run(row.end - 2 + len(chain), chain[-1:], row.block_ids)
                for row, chain in zip(rows, chains, strict=True)
            ]
            hidden = self.forward(runs, tokens, before)
            return self.model.logits(hidden)

        return coupled_chains(rows, self.model.logits(hidden), self._sampler, draw, follow)

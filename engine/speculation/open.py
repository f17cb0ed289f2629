"""Build the proposer that the speculation options name; a draft model proposes by itself.

The draft model is a smaller model with the same vocabulary (Leviathan et al., 2023).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ...base.errors import BadInput
from ...quant.source.load_processor import load_tokenizer
from ...quant.source.models import open_checkpoint, resolve_model
from ..base.device import packed
from ..cache.kv_cache import KvCache
from ..cache.step_inputs import Run
from ..config.compatibility import refuse
from ..config.config import SpeculationConfig
from ..kernels.attention.paged_tensor import CacheDtype
from ..model.adapter.open import CausalModel, open_model
from ..model.decoder.decoder import Decoder
from ..model.layers.spec import LoadingOptions
from ..scheduling.draft_length import DraftLength, Tree
from ..scheduling.step_plan import ScheduledRow
from .eagle import EagleHead, EagleProposer
from .heads import HeadsCheckpoint, MedusaHeads, MedusaProposer, load_eagle, load_medusa
from .proposer import (
    DRAFT_STREAM,
    CachedProposer,
    DraftTokens,
    NgramProposer,
    Proposer,
    SamplingRowOf,
    draft_chains,
)


class DraftModel(CachedProposer):
    """A draft model with its own KV cache, addressed by the target's block ids.

    It computes the rows of every step, so shared blocks hold its keys and values; a slot may lack them where
    all drafts were accepted, which only lowers acceptance. The host waits once, after the last draft token,
    unless sampling depends on their values.

    With `independent` noise, as rejection sampling needs, distributions are kept. Else drafts are sampled
    with the noise of the target's token (coupled), so both agree where the distributions do.
    """

    def __init__(
        self,
        model: CausalModel,
        cache: KvCache,
        device: torch.device,
        dtype: torch.dtype,
        *,
        independent: bool,
    ) -> None:
        super().__init__(model, cache, device, dtype)
        self._independent = independent

    def propose(
        self, rows: Sequence[ScheduledRow], draw: SamplingRowOf
    ) -> Mapping[str, DraftTokens]:
        runs = []
        for row in rows:
            # Before drafts one token more, whose slot is empty if all drafts were accepted.
            start = max(0, row.start - 1) if row.num_draft_tokens else row.start
            runs.append(Run(start, row.tokens[start : row.end], row.block_ids))
        ends = [end - 1 for end in accumulate(len(run.token_ids) for run in runs)]
        going = [row for row in rows if row.num_draft_tokens]
        at = [end for end, row in zip(ends, rows, strict=True) if row.num_draft_tokens]
        states = self.forward(runs, None, None)
        if not going:
            return {}
        if len(at) < len(states):
            states = states.index_select(0, packed([at], self._device)[0])
        probabilities: dict[str, list[torch.Tensor]] = {row.sequence_id: [] for row in going}

        def choose(
            rows: Sequence[ScheduledRow], chains: Sequence[list[int]], logits: torch.Tensor
        ) -> torch.Tensor:
            sampling = [draw(row, chain) for row, chain in zip(rows, chains, strict=True)]
            if not self._independent:
                return self._sampler.begin(logits, sampling).tokens
            distributions = self._sampler.distributions(logits, sampling)
            for row, q in zip(rows, distributions, strict=True):
                probabilities[row.sequence_id].append(q)
            keys = [(sampled_row.seed, sampled_row.position) for sampled_row in sampling]
            return self._sampler.chosen(distributions, keys, DRAFT_STREAM)

        def follow(
            rows: Sequence[ScheduledRow], chains: Sequence[list[int]], tokens: torch.Tensor, _: Any
        ) -> torch.Tensor:
            runs = [
                Run(row.end + len(chain) - 1, chain[-1:], row.block_ids)
                for row, chain in zip(rows, chains, strict=True)
            ]
            return self.model.logits(self.forward(runs, tokens, None))

        drafts = draft_chains(going, self.model.logits(states), choose, follow)
        return {
            name: DraftTokens(
                tuple(tokens),
                Tree.chain(len(tokens)),
                torch.stack(probabilities[name]) if self._independent else None,
            )
            for name, tokens in drafts.items()
        }


_VERIFICATION_COST = 0.05  # of one more token in a memory-bound step, relative to the step

Draft: TypeAlias = "CausalModel | MedusaHeads | EagleHead"
"""Proposers that have weights: a draft model, Medusa heads or an EAGLE head."""


def open_draft(
    options: SpeculationConfig | None, tokenizer: Any, target: CausalModel, loading: LoadingOptions
) -> Draft | None:
    """Draft model or heads of `options`, or None. BadInput: they do not load or fit the target."""
    if options is None or options.draft_model is None:
        return None
    folder = resolve_model(str(options.draft_model))
    if options.method == "draft":
        return _open_draft_model(folder, tokenizer, target, loading)
    if not isinstance(target, Decoder):
        refuse({options.method, "transformers"})
        raise AssertionError("the compatibility table allows heads for decoders only")
    checkpoint = HeadsCheckpoint(folder)
    if options.method == "eagle":
        return load_eagle(checkpoint, target, loading)
    return load_medusa(checkpoint, target.spec.shape.hidden_size, target.vocab_size, loading)


def _open_draft_model(
    folder: Path, tokenizer: Any, target: CausalModel, loading: LoadingOptions
) -> CausalModel:
    try:
        draft_tokenizer = load_tokenizer(folder)
    except BadInput as error:
        raise BadInput(f"{error} (for heads give --speculative medusa or eagle)") from error
    if draft_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise BadInput(
            f"draft model {folder}: its tokenizer is not that of the model, so its draft tokens mean "
            "nothing; choose a model of the same family"
        )
    model, _ = open_model(open_checkpoint(folder), loading)
    if model.state_layouts:
        refuse({"draft", "states"}, f"draft model {folder}")
    if model.vocab_size != target.vocab_size:
        raise BadInput(
            f"draft model {folder}: {model.vocab_size} tokens, the model has {target.vocab_size}; both "
            "need the same vocabulary"
        )
    return model


def open_proposer(
    options: SpeculationConfig | None,
    draft: Draft | None,
    num_blocks: int,
    block_size: int,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: CacheDtype,
    num_host_blocks: int = 0,
) -> Proposer | None:
    """The proposer, with a KV cache addressed by the target's block ids where it needs one."""
    if options is None:
        return None
    if draft is None:
        return NgramProposer(options.ngram_min, options.ngram_max)
    if isinstance(draft, MedusaHeads):
        return MedusaProposer(draft, options.width)
    cache = KvCache(draft.kv_layouts, num_blocks, block_size, device, kv_dtype, num_host_blocks)
    if isinstance(draft, EagleHead):
        return EagleProposer(draft, cache, options.width, device, dtype)
    independent = options.acceptance == "rejection"
    return DraftModel(draft, cache, device, dtype, independent=independent)


def draft_length(
    options: SpeculationConfig | None, draft: Draft | None, target: CausalModel
) -> DraftLength | None:
    """Draft-length controller, by bytes read; at most the widest window, if every target layer has one."""
    if options is None:
        return None
    longest, read = options.num_tokens, 0
    if isinstance(draft, MedusaHeads):
        longest, read = min(longest, len(draft.heads)), draft.bytes_per_position
    elif isinstance(draft, EagleHead):
        read = draft.bytes_per_position
    elif draft is not None:
        read = draft.bytes_per_step
    if target.window is not None:
        longest = min(longest, target.window.length)
    cost = _VERIFICATION_COST * options.width + read / target.bytes_per_step
    return DraftLength(longest, cost, options.width)

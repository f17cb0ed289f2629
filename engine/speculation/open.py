"""Build the proposer that the speculation options name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import torch

from ...quant.base.errors import BadInput
from ...quant.load_processor import load_tokenizer
from ...quant.models import open_checkpoint, resolve_model
from ..cache.kv_cache import KvCache
from ..config.compatibility import refuse
from ..config.config import SpeculationConfig
from ..model.adapter.open import CausalModel, open_model
from ..model.decoder.decoder import Decoder
from ..model.layers.spec import LoadingOptions
from ..scheduling.draft_length import DraftLength
from .draft_model import DraftModel
from .eagle import EagleHead, EagleProposer
from .head_loader import HeadsCheckpoint, load_eagle
from .medusa import MedusaHeads, MedusaProposer, load_medusa
from .proposer import NgramProposer, Proposer

_VERIFICATION_COST = 0.05  # of one more token in a memory-bound step, relative to the step

Draft: TypeAlias = "CausalModel | MedusaHeads | EagleHead"
"""Proposers that have weights: a draft model, Medusa heads or an EAGLE head."""


def open_draft(
    options: SpeculationConfig | None,
    tokenizer: Any,
    target: CausalModel,
    loading: LoadingOptions,
) -> Draft | None:
    """Load the draft model or heads that `options` name; None where they name none.

    Raises:
        BadInput: they do not load, or their vocabulary, context or sizes are not the target's.
    """
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
    kv_dtype: torch.dtype,
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
    """The draft-length controller; a draft step costs its bytes read relative to the target's.

    If every target layer has a sliding window, the draft length is at most the widest.
    """
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

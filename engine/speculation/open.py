"""From options to a proposer."""

from __future__ import annotations

from typing import Any

import torch

from ...quant.errors import BadInput
from ...quant.models import load_tokenizer, resolve_model
from ...quant.open import open_checkpoint
from ..kv_cache import KvCache
from ..model.open import CausalModel, open_model
from .draft_length import DraftLength
from .draft_model import DraftModel
from .ngram import NgramProposer
from .options import SpeculationConfig
from .proposer import Proposer

_CHECKING_COST = 0.05  # of one more token in a step whose time goes to reading weights


def open_draft_model(
    options: SpeculationConfig | None,
    tokenizer: Any,
    vocab_size: int,
    max_model_len: int,
    device: torch.device,
    dtype: torch.dtype,
) -> CausalModel | None:
    """The draft model that `options` name, if they do.

    Raises:
        BadInput: it does not load, or its tokens or its context are not the target's.
    """
    if options is None or options.draft_model is None:
        return None
    folder = resolve_model(str(options.draft_model))
    if load_tokenizer(folder).get_vocab() != tokenizer.get_vocab():
        raise BadInput(
            f"draft model {folder}: its tokenizer is not that of the model, so its guesses mean nothing; "
            "choose a model of the same family"
        )
    model, _ = open_model(open_checkpoint(folder), max_model_len, device, dtype)
    if model.vocab_size != vocab_size:
        raise BadInput(
            f"draft model {folder}: {model.vocab_size} tokens, the model has {vocab_size}; both need "
            "the same vocabulary"
        )
    return model


def open_proposer(
    options: SpeculationConfig | None,
    model: CausalModel | None,
    num_blocks: int,
    block_size: int,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> Proposer | None:
    """Who guesses, with a cache that has the target's blocks."""
    if options is None:
        return None
    if model is None:
        return NgramProposer(options.ngram_min, options.ngram_max)
    cache = KvCache(model.kv_layouts, num_blocks, block_size, device, kv_dtype)
    independent = options.acceptance == "rejection"
    return DraftModel(model, cache, device, dtype, independent=independent)


def draft_length(
    options: SpeculationConfig | None, draft: CausalModel | None, target: CausalModel
) -> DraftLength | None:
    """The rule for the number of guesses; a draft's step is taken to cost its share of the bytes read."""
    if options is None:
        return None
    share = 0.0 if draft is None else draft.bytes_per_step / target.bytes_per_step
    return DraftLength(options.num_tokens, _CHECKING_COST + share)

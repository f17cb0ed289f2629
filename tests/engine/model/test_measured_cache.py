"""What a cache holds, told from its sizes at two lengths, and a sequence's cache filled from blocks and a slot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from llmopt.engine.model.adapter.cached_tensors import StateTensor, TokenTensor
from llmopt.engine.model.adapter.sequential import measured_cache
from llmopt.engine.model.layers.attention import LayerCache
from transformers import MambaConfig
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

CPU = torch.device("cpu")


def entries(length: int, heads: int = 2, dim: int = 3) -> torch.Tensor:
    """Distinct entries of the tokens of a sequence, [1, heads, length, dim]."""
    return torch.arange(1.0, heads * length * dim + 1).view(1, length, heads, dim).transpose(1, 2)


class Cache:
    """A cache of no known class: keys per token, one state twice, a count, and whatever else."""

    def __init__(self, length: int, **others: Any) -> None:
        self.per_layer = [{"keys": entries(length)}]
        self.state = torch.full((1, 4), float(length))
        self.same_state = self.state
        self.num_seen = length
        self.dtype = torch.float32
        self.__dict__ |= others


def test_any_object_is_measured_filled_and_written_back():
    tensors = measured_cache(lambda length, _: Cache(length), None)
    (paged,), (state,) = tensors.paged, tensors.states
    assert isinstance(paged, TokenTensor) and (paged.axis, paged.shape) == (2, (1, 2, 3))
    assert isinstance(state, StateTensor) and len(state.places) == 2
    pages = [LayerCache.empty(paged.layout, 4, 4, CPU, torch.float32)]
    slot = [torch.zeros(1, 4)]
    table, of_tokens = torch.tensor([2, 1]), torch.tensor([8, 9, 10, 11, 4])
    tensors.store(Cache(5), pages, of_tokens, slot, 4, 5)
    filled = tensors.load(pages, table, slot, 4, 5)
    assert torch.equal(filled.per_layer[0]["keys"], entries(5))
    assert filled.state is filled.same_state and filled.state.tolist() == [[5.0] * 4]
    assert filled.num_seen == 5
    filled.state.zero_()
    assert slot[0].tolist() == [[5.0] * 4], "a failed step leaves the slot as it was"
    assert tensors.load(pages, table, slot, 4, 0) is None, (
        "the model begins with a cache of its own"
    )


def test_what_positions_tell_is_made_anew_and_tuples_are_filled():
    """Positions of an indexer, values of no width, and a state in a tuple."""

    def cache_of(length: int, _: Any) -> Cache:
        positions = torch.arange(length).expand(3, 1, length)
        empty, pair = torch.zeros(1, 1, length, 0), (torch.full((1, 4), float(length)), "other")
        return Cache(length, positions=positions, empty=empty, pair=pair)

    tensors = measured_cache(cache_of, MambaConfig(num_hidden_layers=1))
    assert len(tensors.paged) == 1 and len(tensors.positions) == 2
    pages = [LayerCache.empty(tensors.paged[0].layout, 4, 4, CPU, torch.float32)]
    slot = [layout.empty(1, CPU)[0] for layout in tensors.state_layouts]
    table, of_tokens = torch.tensor([2, 1]), torch.tensor([8, 9, 10, 11, 4])
    tensors.store(cache_of(5, None), pages, of_tokens, slot, 4, 5)
    filled = tensors.load(pages, table, slot, 4, 5)
    assert filled.positions.tolist() == [[[0, 1, 2, 3, 4]]] * 3
    assert filled.positions.dtype == torch.int64 and filled.empty.shape == (1, 1, 5, 0)
    assert filled.pair[0].tolist() == [[5.0] * 4] and filled.pair[1] == "other"


@pytest.mark.parametrize("length", [3, 9, 20])
def test_a_window_reads_what_it_sees_of_paged_entries(length):
    window = 6

    def cache_of(num_tokens: int, empty: Any) -> Any:
        made = empty or DynamicCache()
        made.layers = made.layers or [DynamicSlidingWindowLayer(window), DynamicLayer()]
        for index in range(2):
            made.update(entries(num_tokens), 2 * entries(num_tokens), index)
        return made

    tensors = measured_cache(cache_of, None)
    assert [tensor.window for tensor in tensors.paged] == [window - 1, window - 1, 0, 0]
    assert not tensors.states
    pages = [LayerCache.empty(layout, 9, 4, CPU, torch.float32) for layout in tensors.kv_layouts]
    written = cache_of(length, tensors.load(pages, torch.tensor([]), [], 4, 0))
    tensors.store(written, pages, torch.arange(4, 4 + length), [], 4, length)
    filled = tensors.load(pages, torch.arange(1, 9), [], 4, length)
    assert torch.equal(filled.layers[0].values, 2 * entries(length)[:, :, -(window - 1) :])
    assert torch.equal(filled.layers[1].keys, entries(length))
    assert filled.get_seq_length() == length
    whole = torch.cat([entries(length), 9 + entries(2)], dim=2)
    seen, _ = filled.layers[0].update(9 + entries(2), entries(2))
    assert torch.equal(seen, whole[:, :, -(min(length, window - 1) + 2) :])


@pytest.mark.parametrize(
    ("others", "complaint"),
    [
        (lambda n: {"late": torch.ones(1, 2)} if n > 5 else {}, "late comes and goes"),
        (lambda n: {"grid": torch.ones(n, n)}, "grid grows from"),
        (lambda n: {"half": torch.ones(1, n // 2)}, "half grows from"),
        (lambda n: {"square": n * n}, "square is not told by the length"),
        (lambda n: {"is_long": n > 5}, "is_long is not told by the length"),
        (lambda n: {"ids": torch.ones(1, n, dtype=torch.long)}, "ids grows from"),
    ],
)
def test_what_follows_no_law_is_refused(others, complaint):
    with pytest.raises(ValueError, match=complaint):
        measured_cache(lambda n, _: Cache(n, **others(n)), SimpleNamespace())

"""The Viterbi search in Triton: one launch, and the paths of the search in C to the bit."""

from __future__ import annotations

import logging
from collections import Counter
from importlib import import_module
from typing import Any

import pytest
import torch
from llmopt.quant.kinds.trellis import viterbi

from ...support.pretended_cuda.card import Card
from ...support.pretended_cuda.runtime import pretended_cuda
from ...support.triton_world import DEVICE

triton_viterbi = import_module("llmopt.quant.kinds.trellis.triton_viterbi")


def targets(length: int, bits: int) -> torch.Tensor:
    """Normal ones, and two sequences beyond the codebook, which drive costs to their limits."""
    drawn = torch.randn(3, length, generator=torch.Generator().manual_seed(bits))
    return drawn * torch.tensor([[1.0], [4.0], [1000.0]])


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("bits", "name"), [(2, "mul1"), (1, "mul1"), (3, "3inst"), (4, "mcg"), (5, "mul1"), (8, "mcg")]
)
def test_paths_are_those_of_c_in_one_launch(
    bits: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: Counter[str] = Counter()
    if DEVICE == "cpu":
        from triton.runtime.interpreter import InterpretedFunction

        run: Any = InterpretedFunction.run

        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            launched[self.fn.__name__] += 1
            return run(self, *args, **kwargs)

        monkeypatch.setattr(InterpretedFunction, "run", counted)
    if DEVICE == "cpu":  # the interpreter's time is that of its operations, however large they are
        monkeypatch.setattr(triton_viterbi, "TRANSITION_BYTES", 1 << 17)
    given = targets(12, bits)
    found = viterbi._triton_states(given.to(DEVICE), bits, name)
    assert torch.equal(found.cpu(), viterbi.nearest_states(given, bits, name))
    assert DEVICE != "cpu" or launched["_nearest_states"] == 1


@pytest.mark.skipif(DEVICE != "cpu", reason="there is a GPU")
def test_a_search_that_is_wrong_costs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """The pretended card computes nothing, so its paths are others than those of torch's search there."""
    given = targets(8, 4)
    with pretended_cuda(Card()), caplog.at_level(logging.WARNING):
        viterbi._triton_serves.cache_clear()
        found = [viterbi.nearest_states(given.to("cuda"), 4, "mul1").cpu() for _ in range(2)]
    viterbi._triton_serves.cache_clear()
    assert [record.message for record in caplog.records] == [
        "trellis codes are searched for in torch, Triton's search is left out: "
        "it finds other paths than torch's"
    ]
    expected = viterbi.nearest_states(given, 4, "mul1")
    assert all(torch.equal(each.as_subclass(torch.Tensor), expected) for each in found)

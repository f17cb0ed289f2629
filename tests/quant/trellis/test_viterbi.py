"""The Viterbi search: paths that the trellis has, of least cost, the same in C and in torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from llmopt.quant.native.processor import PATHS, VARIABLE, processor_flags
from llmopt.quant.trellis import viterbi
from llmopt.quant.trellis.codebook import codebook
from llmopt.quant.trellis.viterbi import native_viterbi, nearest_states, torch_search, values_of

NATIVE = [path.name for path in PATHS if path.needs <= processor_flags()]


def normal(count: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, length, generator=torch.Generator().manual_seed(seed))


def least_cost(targets: np.ndarray, bits: int) -> float:
    """The cost of the best path between any two nodes: the recursion of the paper, over all transitions."""
    values = codebook("mul1").astype(np.float64)
    states = np.arange(65536)
    costs = np.zeros(65536 >> bits)
    for target in targets:
        spent = costs[states >> bits] + (values - target) ** 2
        costs = np.full_like(costs, np.inf)
        np.minimum.at(costs, states & (len(costs) - 1), spent)
    return float(costs.min())


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_the_path_is_the_cheapest_of_all(bits: int) -> None:
    targets = normal(1, 12, bits)
    anywhere = torch.tensor([-1])
    best = least_cost(targets[0].double().numpy(), bits)
    for search in (torch_search, viterbi._search):
        states = search(targets, anywhere, bits, "mul1")
        assert torch.equal(states[:, 1:] >> bits, states[:, :-1] & (2 ** (16 - bits) - 1))
        cost = float((values_of(states, "mul1").double() - targets).square().sum())
        assert cost == pytest.approx(best, rel=1e-3)


@pytest.mark.parametrize("bits", [1, 2, 3, 5])
@pytest.mark.parametrize("path", NATIVE)
def test_c_and_torch_find_paths_that_cost_the_same(
    path: str, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, path)
    if native_viterbi().library is None:
        pytest.skip(str(native_viterbi().reason))
    targets, nodes = normal(3, 40, bits), torch.tensor([-1, 5, 77])
    costs = []
    for search in (viterbi._search, torch_search):
        states = search(targets, nodes, bits, "mcg")
        ends = states[1:, -1] & (2 ** (16 - bits) - 1)
        assert (states[1:, 0] >> bits).tolist() == ends.tolist() == [5, 77]
        costs.append((values_of(states, "mcg") - targets).square().sum(1))
    assert torch.allclose(*costs, rtol=1e-4)


def test_paths_are_cyclic_and_as_near_as_the_paper_says(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = 0.98 * normal(12, 256)
    states = nearest_states(targets, 2, "mul1")
    assert torch.equal(states >> 2, states.roll(1, 1) & (2**14 - 1))
    error = (values_of(states, "mul1") - targets).square().mean() / targets.square().mean()
    # Table 1 of QTIP has 0.069 for 2 bits of a normal source; 0.0625 is the bound of rate and distortion.
    assert 0.0625 < float(error) < 0.076
    monkeypatch.setenv(VARIABLE, "off")
    assert torch.equal(nearest_states(targets[:1], 2, "mul1"), states[:1])

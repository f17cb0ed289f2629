"""Cross terms of experts: over the tokens that both streams route to them, whatever the routing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llmopt.quant.model.architecture import architecture_of
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.model.experts import routed_tokens, split_experts
from llmopt.quant.stream.calls import InputRows, States, paired
from llmopt.quant.stream.chain import HIDDEN as HIDDEN_STATES
from llmopt.quant.stream.layer_stream import LayerStream
from transformers import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

from ...support.family_models import HIDDEN, save_model, token_ids

BLOCK = "block_sparse_moe"
NUM_EXPERTS = 4


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> list[LayerStream]:
    """A tiny Mixtral with its first layer loaded, as mapped, and as where no router is known."""
    folder = tmp_path_factory.mktemp("mixtral")
    save_model("mixtral", folder)
    made = []
    for routers_known in (True, False):
        checkpoint = Checkpoint(folder)
        architecture = architecture_of(checkpoint)
        if not routers_known:
            layers = tuple(replace(family, routers=()) for family in architecture.layers)
            architecture = replace(architecture, layers=layers)
        stream = LayerStream(checkpoint, architecture)
        stream.prepare(token_ids())
        stream.load(0, stream.tensors(0))
        made.append(stream)
    return made


def routed(stream: LayerStream, states: States) -> list[dict[str, dict[int, torch.Tensor]]]:
    """For each expert the inputs of `w1` and `w2` by the number of the token, from what the router says."""
    told: list[Any] = []
    experts = stream._layers[0].get_submodule("mlp.experts")
    handle = experts.register_forward_pre_hook(lambda _, inputs: told.append(inputs))
    stream.run(0, states)
    handle.remove()
    hidden, chosen, _ = told[0]
    by_expert: list[dict[str, dict[int, torch.Tensor]]] = []
    for number, expert in enumerate(experts):
        rows: dict[str, dict[int, torch.Tensor]] = {"w1": {}, "w2": {}}
        for token in range(len(hidden)):
            if number in chosen[token].tolist():
                x = hidden[token]
                rows["w1"][token] = x
                rows["w2"][token] = torch.nn.functional.silu(expert.w1(x)) * expert.w3(x)
        by_expert.append(rows)
    return by_expert


@settings(max_examples=12, deadline=None)
@given(
    order=st.permutations(range(4)), noise=st.sampled_from([0.0, 0.5]), seed=st.integers(0, 1000)
)
@torch.no_grad()
def test_experts_are_compared_token_by_token(
    streams: list[LayerStream], order: list[int], noise: float, seed: int
) -> None:
    """Samples in another order and no noise: as many tokens at each expert, and not the same ones."""
    generator = torch.Generator().manual_seed(seed)
    ids = token_ids(samples=4)
    hidden = torch.randn(*ids.shape, HIDDEN, generator=generator)
    other = hidden[order] + noise * torch.randn(hidden.shape, generator=generator)
    states, floats = (States(ids, {HIDDEN_STATES: values}) for values in (hidden, other))
    names = [f"{BLOCK}.experts.{n}.{leaf}" for n in range(NUM_EXPERTS) for leaf in ("w1", "w2")]
    ours, theirs = (routed(streams[0], each) for each in (states, floats))
    for stream in streams:
        measured = stream.measure(0, states, names, floats=floats)
        for number in range(NUM_EXPERTS):
            for leaf in ("w1", "w2"):
                mine, wanted = ours[number][leaf], theirs[number][leaf]
                record = measured[f"{BLOCK}.experts.{number}.{leaf}"]
                expected = torch.zeros_like(record.gram)
                for token in mine.keys() & wanted.keys():
                    expected += torch.outer(wanted[token] - mine[token], mine[token])
                cross = torch.zeros_like(expected) if record.cross is None else record.cross
                assert record.num_tokens == len(mine)
                assert (cross - expected).abs().max() <= 1e-4 * max(
                    1.0, float(expected.abs().max())
                )


@given(
    ours=st.lists(st.integers(-1, 9), max_size=12), theirs=st.lists(st.integers(-1, 9), max_size=12)
)
def test_only_rows_of_one_token_are_paired(ours: list[int], theirs: list[int]) -> None:
    """In any order; a token that only one side has, and a row of no token, have no pair."""
    sides = [
        InputRows(torch.tensor(side).float()[:, None], torch.tensor(side, dtype=torch.long))
        for side in (ours, theirs)
    ]
    pair = paired(sides[0], sides[1], num_tokens=10)
    assert pair is not None
    assert torch.equal(*pair)
    assert pair[0].flatten().tolist() == [t for t in ours if t >= 0 and t in theirs]


def test_rows_that_nobody_tells_are_paired_only_where_all_tokens_are_there() -> None:
    whole, part = InputRows(torch.ones(2, 3, 5)), InputRows(torch.ones(4, 5))
    assert paired(whole, InputRows(torch.zeros(6, 5)), num_tokens=6) is not None
    assert paired(part, part, num_tokens=6) is None
    assert paired(whole, part, num_tokens=6) is None
    assert paired(part, InputRows(torch.ones(4, 5), torch.arange(4)), num_tokens=4) is None


def test_experts_that_are_given_all_tokens_tell_those_routed_to_them() -> None:
    """Those of Llama 4 get zeros in place of the other tokens."""
    config = Llama4TextConfig(
        hidden_size=8, intermediate_size=8, num_local_experts=2, intermediate_size_mlp=8
    )
    experts: Any = split_experts(Llama4TextExperts(config), ("w1", "w3", "w2"), config)
    inputs = torch.randn(2, 3, 8)
    inputs[0, 1] = 0
    experts(inputs.flatten(0, 1))
    told = [routed_tokens(expert) for expert in experts]
    assert [tokens.tolist() for tokens in told if tokens is not None] == [[0, -1, 2], [0, 1, 2]]

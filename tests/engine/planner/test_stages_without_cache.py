"""Plans of models with layers, and pipeline stages, that cache nothing."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llmopt.engine.planner.catalog import PlannedModel, shape_of, table_configs
from llmopt.engine.planner.devices import find_device
from llmopt.engine.planner.engine_rules import RULES
from llmopt.engine.planner.explain import explain
from llmopt.engine.planner.memory import Deployment, Reserve
from llmopt.engine.planner.plan import DeploymentPlan, make_plan
from llmopt.engine.planner.plan_json import plan_as_dict
from llmopt.engine.planner.probed_shape import ProbedShape
from llmopt.engine.planner.setup import PlannedWorkload, Setup
from llmopt.engine.planner.weights import BF16
from llmopt.engine.probe.facts import CachedTensor, Parameters, ProbedModel
from llmopt.quant.families.shapes import ModelShape

RESERVE = Reserve(max_num_seqs=64)

# What a layer caches: nothing (an MLP, or the keys of another layer), a state, keys, or both.
KINDS = {
    "nothing": (),
    "state": (CachedTensor("conv_states", 0, 40, 1, 4, "constant"),),
    "keys": (CachedTensor("keys", 0, 2, 16, 2, "growing"),),
    "window": (CachedTensor("keys", 0, 2, 16, 2, "growing", window=7),),
    "compressed": (
        CachedTensor("entries", 0, 1, 16, 2, "growing", stride=4),
        CachedTensor("buffer", 0, 1, 16, 2, "remainder", stride=4),
    ),
    "indexer": (CachedTensor("index_keys", 0, 1, 8, 2, "growing"),),
}


def probed(layers: list[str], num_shared: int = 0) -> ProbedShape:
    """A model with these layers, behind which `num_shared` share the keys of earlier ones."""
    kinds = [*layers, *["nothing"] * num_shared]
    cache = tuple(replace(t, layer=i) for i, kind in enumerate(kinds) for t in KINDS[kind])
    linears = tuple(
        Parameters("text", "linear", "ranks", i, 64, 64, 1, 1) for i in range(len(kinds))
    )
    heads = (4, 2, 16) if any("keys" in t.name for t in cache) else (0, 0, 0)
    facts = ProbedModel(
        "made",
        "0",
        len(kinds),
        64,
        *heads,
        64,
        128,
        4096,
        True,
        0,
        0,
        0,
        num_shared,
        linears,
        cache,
    )
    return ProbedShape.from_facts(facts, {})


def plan_of(shape: ModelShape, pp: int | None, engine: str = "llmopt") -> DeploymentPlan:
    model = PlannedModel("made", shape, {}, "a test")
    devices = [find_device("h100"), find_device("l4")]
    setup = Setup(pp=pp, engine=engine, max_num_seqs=64)
    return make_plan(model, BF16, PlannedWorkload(1024, 2), devices, setup=setup)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=6),
    st.integers(0, 3),
    st.sampled_from(list(RULES)),
    st.data(),
)
def test_every_model_is_planned_at_every_number_of_stages(
    layers: list[str], num_shared: int, engine: str, data: st.DataObject
) -> None:
    shape = probed(layers, num_shared)
    pp = data.draw(st.none() | st.integers(1, shape.num_layers))
    plan = plan_of(shape, pp, engine)
    assert plan_as_dict(plan)["max_concurrent_sequences"] == 64
    assert all(formula.result for formula in explain(plan))


@pytest.mark.parametrize("name", ["nemotron-3-nano-30b-a3b", "gemma-4-26b-a4b", "llama-3.1-8b"])
def test_models_of_the_table_have_sequences_with_a_stage_a_layer(name: str) -> None:
    shape = shape_of(table_configs()[name])
    for engine in RULES.values():
        deployment = Deployment(shape, BF16, pp=shape.num_layers, engine=engine)
        assert deployment.max_sequences(80 * 2**30, RESERVE, 1024) == 64


def test_a_stage_that_caches_nothing_limits_no_sequence_once_its_weights_fit() -> None:
    mixed = Deployment(probed(["keys", "nothing"]), BF16, pp=2)
    alone = Deployment(probed(["keys"]), BF16)
    memory = 2**30
    fitting = mixed.sequences_that_fit(memory, RESERVE, 1024)
    # The stage of the keys has half of the weights, and the same cache: only communication is more.
    budget = mixed.kv_budget(memory, RESERVE)
    assert fitting == budget // alone.kv_bytes(1024, RESERVE) > 0
    nothing = Deployment(probed(["nothing"]), BF16)
    assert nothing.sequences_that_fit(memory, RESERVE, 1024) == sys.maxsize
    assert nothing.max_sequences(memory, RESERVE, 1024) == 64
    assert nothing.max_context(memory, RESERVE, 2, 4096) == 4096
    assert nothing.max_sequences(nothing.overhead_bytes(), RESERVE, 1024) == 0


def test_a_stage_of_kv_sharing_layers_holds_a_copy_of_what_they_read() -> None:
    """Gemma 3n: layers behind the first ones read the keys of the last of those with their kind of
    attention. On another pipeline stage they cannot reach them."""
    shape = probed(["keys", "window", "keys", "window"], num_shared=4)
    first, second = (shape.cache_of_stage(stage) for stage in shape.stages(2))
    assert {t.layer for t in first.layer_tensors} == {0, 1, 2, 3}
    assert {t.layer for t in second.layer_tensors} == {2, 3}
    assert 0 < second.kv_bytes(100, 2) == first.kv_bytes(100, 2) / 2
    whole = shape.cache_of_stage(range(8))
    assert whole.kv_bytes(100, 2) == shape.kv_bytes(100, 2)

"""The solver in each direction, and that its plans hold."""

from __future__ import annotations

import pytest
from llmopt.base.errors import BadInput
from llmopt.engine.planner.catalog import find_model
from llmopt.engine.planner.devices import Device, choose_devices, devices, find_device
from llmopt.engine.planner.engine_rules import RULES
from llmopt.engine.planner.memory import Deployment, Reserve
from llmopt.engine.planner.plan import DevicePlan, make_plan
from llmopt.engine.planner.setup import PlannedWorkload, Setup
from llmopt.engine.planner.speed import DATA_SHEET, Efficiency, decode_time
from llmopt.engine.planner.weights import BF16, recipe_for, weight_bytes

GIB = 2**30


def solve(
    name: str = "llama-70b",
    context: int = 131072,
    sequences: int = 1,
    gpu: str = "h100",
    kv: str = "bf16",
    **setup: object,
) -> DevicePlan:
    workload = PlannedWorkload(context, sequences, kv)
    chosen = Setup(**setup)  # type: ignore[arg-type]
    return make_plan(find_model(name), BF16, workload, [find_device(gpu)], setup=chosen).devices[0]


def test_each_relaxation_brings_what_it_says() -> None:
    plan = solve(tp=8)
    found = {change.change: change.max_concurrent_sequences for change in plan.relaxations}
    assert found["--max-num-seqs 256"] == solve(tp=8, max_num_seqs=256).max_concurrent_sequences
    assert found["--kv-dtype fp8"] == solve(tp=8, kv="fp8").max_concurrent_sequences == 19
    for change in plan.relaxations:
        assert change.gained_sequences == change.max_concurrent_sequences - 9 > 0
    four = {change.change: change for change in solve(tp=4).relaxations}
    assert (four["--tp 8"].max_concurrent_sequences, four["--tp 8"].gpus) == (9, 8)
    quantized = recipe_for("int4", find_model("llama-70b").shape)
    made = make_plan(
        find_model("llama-70b"),
        quantized,
        PlannedWorkload(131072),
        [find_device("h100")],
        Setup(tp=4),
    ).devices[0]
    assert four["--weights int4"].max_concurrent_sequences == made.max_concurrent_sequences


def test_a_lighter_recipe_keeps_the_width_of_what_it_leaves_unquantized() -> None:
    model, device = find_model("llama-8b"), find_device("h100")
    wide, setup = recipe_for("float32", model.shape), Setup(tp=1, keeps_float32=True)
    plan = make_plan(model, wide, PlannedWorkload(131072), [device], setup=setup).devices[0]
    found = {change.change: change.kv_budget_bytes for change in plan.relaxations}
    lighter = recipe_for("int4", model.shape, plain_bytes=4)
    made = make_plan(model, lighter, PlannedWorkload(131072), [device], setup=setup).devices[0]
    assert found["--weights int4"] == made.kv_budget_bytes


def test_fewer_sequences_in_a_step_free_the_samplers_memory() -> None:
    """Llama-3.1-8B: 4.75 GiB for 1,024 rows, a quarter of it for 256, as long as no chunk needs more."""
    deployment = Deployment(find_model("llama-8b").shape, BF16)
    many, few = (deployment.activation_terms(Reserve(max_num_seqs=n))[1] for n in (1024, 256))
    assert (many / GIB, few / GIB) == (pytest.approx(4.75, abs=0.01), pytest.approx(1.19, abs=0.01))


def test_the_constraint_is_named() -> None:
    assert solve(tp=4).binding_constraint == "kv_cache"
    assert solve("llama-405b", 4096, tp=8, gpu="l4").binding_constraint == "weights"
    full = solve("llama-3.2-1b", 128)
    assert full.binding_constraint == "max_num_seqs"
    assert full.relaxations[0].change == "--max-num-seqs 2048"


def test_the_least_reduced_types_that_fit_each_number_of_gpus() -> None:
    found = {c.gpus: (c.weights, c.kv_dtype) for c in solve(gpu="h100").dtypes_that_fit}
    assert found[1] == ("int4 g128 asymmetric", "fp8")
    assert found[2] == ("fp8 per channel", "bf16")
    assert found[4] == found[8] == ("bf16", "bf16")
    many = {c.gpus: c.weights for c in solve(gpu="l4").dtypes_that_fit}
    assert many[1] is None


@pytest.mark.parametrize("gpu", ["h100", "l40s", "4090"])
def test_what_is_said_to_fit_does_and_one_step_less_does_not(gpu: str) -> None:
    plan = solve(gpu=gpu, sequences=2)
    assert plan.fits
    assert plan.gpus_needed == plan.deployment.gpus
    held = plan.max_concurrent_sequences * plan.deployment.kv_bytes(131072, plan.reserve)
    assert held <= plan.kv_budget_bytes < held + plan.deployment.kv_bytes(131072, plan.reserve)


def test_longest_context_and_sequences_are_inverse() -> None:
    for engine in RULES:
        plan = solve("gemma-3-27b", 131072, 30, tp=2, engine=engine)
        longest = plan.max_context
        args = (plan.device.memory_bytes, plan.reserve)
        if longest:
            assert plan.deployment.sequences_that_fit(*args, longest) >= 30
        if longest < 131072:
            assert plan.deployment.sequences_that_fit(*args, longest + 1) < 30


def test_more_machines_are_tried_after_one() -> None:
    plan = solve("llama-405b", 131072, gpu="h100")
    assert (plan.deployment.tp, plan.deployment.pp, plan.gpus_needed) == (8, 2, 16)
    odd = solve("phi-4", 16384, 40, gpu="4090")  # 10 KV heads go on 1 or 2 ranks
    assert (odd.deployment.tp, odd.deployment.pp) == (2, 4)


def test_all_devices_are_ranked_by_how_few_hold_it() -> None:
    plan = make_plan(
        find_model("llama-70b"),
        BF16,
        PlannedWorkload(131072),
        choose_devices(["all"], None),
        ranked=True,
    )
    order = [(not one.fits, one.gpus_needed or 99) for one in plan.devices]
    assert order == sorted(order)
    assert {one.gpu for one in plan.devices} == {device.name for device in devices()}


def test_stages_split_layers_and_add_up() -> None:
    shape = find_model("llama-70b").shape
    whole = weight_bytes(shape, BF16)
    split = Deployment(shape, BF16, pp=4)
    assert sum(stage.weight_bytes for stage in split.stages) == whole
    assert split.all_kv_bytes(4096) == shape.kv_bytes(4096, 2) == 4 * split.kv_bytes(4096)
    uneven = Deployment(shape, BF16, pp=3)
    assert [stage.cache.num_layers for stage in uneven.stages] == [27, 27, 26]
    assert uneven.kv_bytes(4096) == 27 * shape.kv_bytes(4096, 2) // 80
    tied = find_model("llama-3.2-1b").shape  # the last stage needs the tied embedding too
    copy = 2 * tied.vocab_size * tied.hidden_size
    stages = Deployment(tied, BF16, pp=2).stages
    assert sum(stage.weight_bytes for stage in stages) == weight_bytes(tied, BF16) + copy


def test_stages_of_a_mixture_hold_their_own_layers() -> None:
    """DeepSeek-V3's three dense layers are all in the first stage, so the others are heavier."""
    shape = find_model("deepseek-v3").shape
    stages = Deployment(shape, BF16, pp=4).stages
    assert sum(stage.weight_bytes for stage in stages) == weight_bytes(shape, BF16)
    assert stages[0].weight_bytes < stages[1].weight_bytes


def test_stages_turn_off_vllms_windows() -> None:
    shape = find_model("gemma-3-27b").shape
    one, two = (Deployment(shape, BF16, pp=pp, engine=RULES["vllm"]) for pp in (1, 2))
    assert two.all_kv_bytes(131072) == 62 * GIB > 4 * one.all_kv_bytes(131072)


def test_a_token_passes_every_stage_but_stages_overlap_in_a_batch() -> None:
    shape, device = find_model("llama-8b").shape, find_device("h100")
    times = [
        decode_time(Deployment(shape, BF16, pp=pp), device, 1, 4096, DATA_SHEET).seconds
        for pp in (1, 2)
    ]
    assert times[1] == pytest.approx(times[0], rel=0.001)
    many = [
        decode_time(Deployment(shape, BF16, pp=pp), device, 64, 4096, DATA_SHEET).seconds
        for pp in (1, 2)
    ]
    assert many[1] < many[0]


def test_kv_heads_are_replicated_past_their_number() -> None:
    shape = find_model("qwen3-30b-a3b").shape  # 4 KV heads
    bytes_by_tp = {tp: Deployment(shape, BF16, tp=tp).all_kv_bytes(4096) for tp in (1, 2, 4, 8)}
    assert bytes_by_tp[1] == bytes_by_tp[2] == bytes_by_tp[4] == bytes_by_tp[8] // 2
    latent = find_model("deepseek-v3").shape
    assert Deployment(latent, BF16, tp=8).all_kv_bytes(4096) == 8 * latent.kv_bytes(4096, 2)
    with pytest.raises(BadInput, match="do not divide"):
        solve("phi-4", 4096, tp=4)
    with pytest.raises(BadInput, match="32 layers"):
        solve("llama-8b", 4096, pp=33)


def test_communication_grows_with_ranks_and_tokens() -> None:
    shape, device = find_model("llama-70b").shape, find_device("h100")
    by_hand = Efficiency(0.74, 0.6, 63e-6, 25e-6, "by hand")

    def spent(tp: int, batch: int) -> float:
        deployment = Deployment(shape, BF16, tp=tp)
        return decode_time(deployment, device, batch, 1024, by_hand).communication

    assert spent(1, 1) == 0
    assert spent(2, 1) == pytest.approx(160 * 25e-6, rel=0.01)
    assert spent(8, 1) < spent(8, 64)
    # A message of 64 rows: two thirds and more of it travel, twice, over one direction of the link.
    travel = 160 * 2 * 7 / 8 * 64 * 8192 * 2 / 450e9
    assert spent(8, 64) == pytest.approx(160 * 25e-6 + travel)


def test_a_mixtures_step_slows_down_with_its_batch() -> None:
    shape, device = find_model("qwen3-30b-a3b").shape, find_device("h100")
    one, eight = (
        decode_time(Deployment(shape, BF16), device, batch, 128, DATA_SHEET).seconds
        for batch in (1, 8)
    )
    assert eight > 3 * one
    dense = find_model("llama-8b").shape
    one, eight = (
        decode_time(Deployment(dense, BF16), device, batch, 128, DATA_SHEET).seconds
        for batch in (1, 8)
    )
    assert eight < 1.05 * one


def test_a_cache_of_a_given_size_bounds_the_sequences() -> None:
    plan = solve("llama-8b", 4096, kv_cache_bytes=4 * GIB)
    assert (plan.kv_budget_bytes, plan.max_concurrent_sequences) == (4 * GIB, 8)
    small = Device("own", 24 * GIB)
    given = Setup(kv_cache_bytes=64 * GIB, tp=1)
    (too_much,) = make_plan(
        find_model("llama-8b"), BF16, PlannedWorkload(4096), [small], given
    ).devices
    assert too_much.kv_budget_bytes < 8 * GIB  # no more than is there

"""The step model's physics, its parameters, the closed loop, and the bands of its error."""

from __future__ import annotations

from dataclasses import replace

import pytest
from llmopt.base.errors import BadInput
from llmopt.engine.planner.catalog import find_model
from llmopt.engine.planner.devices import find_device
from llmopt.engine.planner.error_bands import FEWEST_ROWS, Likeness, error_band
from llmopt.engine.planner.expected import Expectation, Loop, steady_state
from llmopt.engine.planner.load import Prediction
from llmopt.engine.planner.memory import Deployment
from llmopt.engine.planner.setup import Setup
from llmopt.engine.planner.step_model import Parallelism, StepModel, StepWork
from llmopt.engine.planner.step_parameters import (
    StepParameters,
    measured_parameters,
    parameter_file,
    resolve,
    shared_value,
)
from llmopt.engine.planner.weights import BF16, recipe_for

H100 = find_device("h100")


def step_model(name: str = "llama-3.1-8b", gpu: str = "h100", **options: object) -> StepModel:
    shape = find_model(name).shape
    recipe = recipe_for(str(options.pop("weights", "bf16")), shape)
    return StepModel.build(shape, recipe, find_device(gpu), model=name, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt-oss-120b", "deepseek-v3", "qwen3.5-35b-a3b"])
def test_a_step_takes_longer_with_more_to_do(name: str) -> None:
    model = step_model(name, parallel=Parallelism(8))
    for grown in (
        [StepWork.of(batch, 1000) for batch in (1, 2, 8, 64, 512)],
        [StepWork.of(16, context) for context in (10, 1000, 100_000)],
        [StepWork.of(0, 0, prompt) for prompt in (16, 256, 4096)],
        [StepWork.of(8, 1000, 512, cached) for cached in (0, 4096, 32768)],
    ):
        times = [model.seconds(work) for work in grown]
        assert times == sorted(times) and times[0] < times[-1]


def test_a_faster_device_takes_less_time() -> None:
    shape, recipe = find_model("llama-3.1-8b").shape, BF16
    assert H100.bandwidth is not None
    faster = replace(H100, bandwidth=2 * H100.bandwidth)
    plain, fast = (
        StepModel.build(shape, recipe, device).seconds(StepWork.of(32, 2000))
        for device in (H100, faster)
    )
    assert plain / 2 < fast < plain


def test_ranks_share_the_work_but_not_the_latencies() -> None:
    work = StepWork.of(64, 2000)
    one, eight = (step_model(parallel=Parallelism(tp)).seconds(work) for tp in (1, 8))
    assert one / 8 < eight < one
    parts = {name: part for name, part, _ in step_model().operators(work)}
    assert "all-reduce" not in parts and "experts" not in parts
    assert sum(parts.values()) == pytest.approx(step_model().seconds(work))


def test_attention_ranks_exchange_tokens_and_experts_are_split_over_all() -> None:
    spread = step_model("deepseek-v3", parallel=Parallelism(1, 1, 8, 8))
    whole = step_model("deepseek-v3", parallel=Parallelism(8))
    work = StepWork.of(256, 1000)
    names = {name for name, _, _ in spread.operators(work)}
    assert "all-to-all" in names and "all-reduce" not in names
    assert spread.loads(work).expert_bytes == pytest.approx(whole.loads(work).expert_bytes)
    assert spread.loads(work).linear_bytes > 4 * whole.loads(work).linear_bytes
    with pytest.raises(BadInput, match="--ep 3"):
        Parallelism(8, 1, 3)


def test_launches_are_counted_in_those_of_a_dense_layer() -> None:
    work = StepWork.of(4, 1000)
    dense = step_model().loads(work)
    assert (dense.layers, dense.mixture_layers) == (32, 0)
    quantized = step_model(weights="fp8").loads(work)
    assert quantized.layers == pytest.approx(32 * 1.4)
    mixture = step_model("qwen3-235b-a22b", parallel=Parallelism(4)).loads(work)
    assert (mixture.layers, mixture.mixture_layers) == (pytest.approx(94 * 0.7), 94)


def test_each_attention_rank_has_its_own_host() -> None:
    spread = step_model("deepseek-v3", parallel=Parallelism(1, 1, 8, 8))
    assert spread.loads(StepWork.of(256, 1000)).rows == 32


def test_a_decode_step_is_its_bytes_and_its_flops() -> None:
    """With whole roofs and no latencies, a step of one dense model is what the roofline counts."""
    values = measured_parameters(1.0, 1.0, 0.0, "by hand").values
    model = step_model(parameters=StepParameters(dict(values) | {"activations.bandwidth": 1e9}))
    loads = model.loads(StepWork.of(4, 1000))
    shape = model.shape
    read = 2 * (shape.num_parameters - shape.vocab_size * shape.hidden_size)
    assert loads.linear_bytes == read
    assert loads.cache_bytes == 4 * shape.kv_bytes_per_token(2) * 1000
    assert model.seconds(StepWork.of(4, 1000)) == pytest.approx(
        (loads.linear_bytes + loads.cache_bytes) / 3.35e12, rel=1e-3
    )


def test_every_parameter_and_factor_is_used() -> None:
    """A parameter that no deployment's prediction depends on would be dead."""
    table = parameter_file()["parameters"]
    deployments = [
        step_model("deepseek-v3", parallel=Parallelism(2, 1, 8, 4)),
        step_model("qwen3.5-35b-a3b", parallel=Parallelism(2)),
    ]

    def predicted(values: dict[str, float]) -> list[Prediction]:
        models = [replace(model, parameters=StepParameters(values)) for model in deployments]
        return [steady_state(model, Loop(2000, 500, 256, 128)) for model in models]

    plain = resolve(table, ())
    before = predicted(plain)
    for name, entry in table.items():
        assert predicted(plain | {name: 1.1 * plain[name]}) != before, name
        assert entry["unit"] and entry["standard_error"] > 0, name
        for tag, factor in entry.get("factors", {}).items():
            assert resolve(table, (tag,))[name] == pytest.approx(plain[name] * factor["value"])
            assert factor["standard_error"] > 0


def test_what_was_measured_of_a_model_corrects_it_and_the_rest_takes_the_shared_physics() -> None:
    known = step_model(engine="vllm", weights="fp8").parameters
    assert known.tpot_log != 0
    other = step_model("phi-4", engine="vllm").parameters
    assert (other.tpot_log, other.ttft_log) == (0, 0)
    nobody = step_model("phi-4", engine="llmopt", gpu="a100").parameters
    assert nobody.values != other.values
    assert nobody.values["host.sequence"] == shared_value("host.sequence")


def test_a_closed_loop_waits_for_prompts_and_for_places() -> None:
    model = step_model()
    few, many = (steady_state(model, Loop(1000, 500, n, n)) for n in (1, 64))
    assert many.tpot_seconds > few.tpot_seconds
    assert many.ttft_seconds > few.ttft_seconds
    assert few.throughput < many.throughput < 64 * few.throughput
    held = steady_state(model, Loop(1000, 500, 64, 16))
    assert held.ttft_seconds > 2 * 500 * held.tpot_seconds
    assert held.tpot_seconds < many.tpot_seconds


BANDS = {
    "vllm|hopper|model measured": {
        "rows": 90,
        "tpot": [0.8, 1.2],
        "ttft": [0.5, 2.0],
        "throughput": [0.8, 1.3],
    },
    "vllm|hopper|model measured|dense|small batch": {
        "rows": 30,
        "tpot": [0.9, 1.1],
        "ttft": [0.6, 1.5],
        "throughput": [0.9, 1.1],
    },
}


def test_the_closest_band_is_taken_and_none_where_nothing_is_like_it() -> None:
    like = Likeness("vllm", "hopper", "model measured", "dense", "small batch")
    close = error_band(like, BANDS)
    assert close and close.num_rows == 30 and close.text == "-10 to +10 %, 30 rows"
    wider = error_band(replace(like, kind="mixture"), BANDS)
    assert wider and wider.num_rows == 90
    assert error_band(replace(like, known="model not measured"), BANDS) is None
    assert error_band(replace(like, engine="llmopt"), BANDS) is None
    left_out = {"vllm|hopper|model not measured": BANDS["vllm|hopper|model measured"]}
    assert error_band(like, left_out) == error_band(
        replace(like, known="model not measured"), left_out
    )


def test_bundled_bands_hold_the_prediction_and_enough_rows() -> None:
    for engine in ("vllm", "sglang", "trtllm"):
        for generation in ("hopper", "blackwell"):
            like = Likeness(engine, generation, "model not measured", "mixture", "medium batch")
            band = error_band(like)
            assert band and band.num_rows >= FEWEST_ROWS
            for low, high in (band.tpot, band.ttft, band.throughput):
                assert 0 < low < high


def test_a_plan_says_how_far_off_deployments_like_it_were() -> None:
    shape = find_model("llama-3.1-70b").shape
    deployment = Deployment(shape, recipe_for("fp8", shape), tp=4)
    expected = Expectation.of(deployment, H100, "llama-3.1-70b", Setup(engine="vllm"))
    band = expected.band(32)
    assert band and band.alike.startswith("vllm, hopper, model measured")
    unlike = Expectation.of(deployment, H100, "llama-3.1-70b", Setup()).band(32)
    assert (
        unlike
        and not unlike.is_near
        and unlike.words.startswith("no measurement near it; a measured one may be ")
    )


def test_a_measured_machine_has_its_own_shares() -> None:
    values = measured_parameters(0.5, 0.4, 1e-5, "a run").values
    assert {values["linear.bandwidth"], values["experts.bandwidth"]} == {0.5}
    assert (values["prefill.compute"], values["layer.seconds"]) == (0.4, 1e-5)
    assert values["host.step"] == values["load.fixed"] == 0
    assert values["all_reduce.latency"] == shared_value("all_reduce.latency")

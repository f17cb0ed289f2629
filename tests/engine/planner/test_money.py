"""Costs, break-even and speculation, by hand."""

from __future__ import annotations

from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.engine.planner.catalog import find_model
from llmopt.engine.planner.devices import find_device
from llmopt.engine.planner.plan import make_plan
from llmopt.engine.planner.setup import PlannedWorkload, Prices, Setup, Speculation, cost_of
from llmopt.engine.planner.weights import BF16


def cost(**changes: Any) -> Any:
    prices = {"gpu_hour": 3.6, "api_input": 1.0, "api_output": 3.0, "duty_cycle": 0.5, **changes}
    return cost_of(
        Prices(**prices),
        gpus=2,
        input_tokens=3000,
        output_tokens=1000,
        input_tokens_per_second=10_000,
        output_tokens_per_second=500,
    )


def test_cost_per_million_tokens_at_a_duty_cycle() -> None:
    """2 GPUs at 3.6 $/h are 0.002 $/s; half idle, a second of work costs 0.004 $."""
    found = cost()
    assert found.output_per_million == pytest.approx(0.004 / 500 * 1e6)
    assert found.input_per_million == pytest.approx(0.004 / 10_000 * 1e6)
    assert found.request == pytest.approx(0.004 * (0.3 + 2))
    assert cost(duty_cycle=1.0).output_per_million == pytest.approx(found.output_per_million / 2)


def test_break_even_is_where_the_api_costs_what_the_gpus_do() -> None:
    found = cost()
    assert found.api_request == pytest.approx((3000 * 1 + 1000 * 3) / 1e6)
    assert found.dollars_per_day == pytest.approx(24 * 2 * 3.6)
    assert found.break_even_requests_per_day * found.api_request == pytest.approx(172.8)
    assert found.break_even_tokens_per_day == pytest.approx(28_800 * 4000)
    assert found.capacity_requests_per_day == pytest.approx(86_400 / 2.3)
    assert found.break_even_duty_cycle == pytest.approx(28_800 * 2.3 / 86_400)


def test_the_duty_cycle_decides_which_is_cheaper() -> None:
    even = cost().break_even_duty_cycle
    assert cost(duty_cycle=even + 0.01).cheaper == "own GPUs"
    assert cost(duty_cycle=even - 0.01).cheaper == "the API"
    # And the two agree: at break-even a request costs the same.
    assert cost(duty_cycle=even).request == pytest.approx(cost().api_request)


def test_a_free_api_is_never_beaten() -> None:
    found = cost(api_input=0.0, api_output=0.0)
    assert (found.break_even_requests_per_day, found.cheaper) == (None, "the API")
    assert cost(api_input=None, api_output=None).cheaper is None


@pytest.mark.parametrize(
    "changes",
    [{"gpu_hour": -1}, {"duty_cycle": 0}, {"duty_cycle": 1.1}, {"api_input": None}],
)
def test_nonsense_prices_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        cost(**changes)


@pytest.mark.parametrize(
    ("a", "k", "tokens"), [(0.8, 4, 3.36), (0.7, 5, 2.94), (1, 3, 4), (0, 3, 1)]
)
def test_expected_tokens_of_a_verification(a: float, k: int, tokens: float) -> None:
    assert Speculation(k, a).expected_tokens == pytest.approx(tokens, abs=0.005)


def test_drafting_costs_and_can_cost_more_than_it_brings() -> None:
    assert Speculation(4, 0.8, 0.1).speedup() == pytest.approx(3.3616 / 1.4)
    assert Speculation(8, 0.1, 0.5).speedup() < 1
    assert Speculation(4, 0.8, 0.0).speedup(verification=5) < 1


@pytest.mark.parametrize("values", [(0, 0.5), (3, -0.1), (3, 1.1), (3, 0.5, -1.0)])
def test_nonsense_drafts_are_refused(values: tuple[Any, ...]) -> None:
    with pytest.raises(BadInput):
        Speculation(*values)


def test_speculation_helps_small_batches_and_not_full_ones() -> None:
    """A verification is nearly free while memory bounds the step, and not where arithmetic does."""
    model, device = find_model("llama-3.1-8b"), find_device("h100")

    def gain(sequences: int) -> Any:
        setup = Setup(speculation=Speculation(4, 0.8), max_num_seqs=1024, tp=1)
        (plan,) = make_plan(model, BF16, PlannedWorkload(256, sequences), [device], setup).devices
        return plan.speculation

    assert gain(1).verification_steps == pytest.approx(1, abs=0.02)
    assert gain(512).verification_steps > 2
    assert gain(512).speedup < 1.5 < gain(1).speedup


def test_a_plan_prices_its_requests() -> None:
    model, device = find_model("llama-3.1-8b"), find_device("h100")
    setup = Setup(prices=Prices(3.0), tp=1)
    workload = PlannedWorkload(4096, 8, output_tokens=1024)
    (plan,) = make_plan(model, BF16, workload, [device], setup).devices
    assert plan.cost and (speed := plan.tokens_per_second)
    # A request costs its answer at the one predicted throughput, which pays for the prompt.
    assert plan.cost.request == pytest.approx(3.0 / 3600 * 1024 / speed)
    assert plan.dollars_per_million == pytest.approx(plan.cost.request / 1024 * 1e6)
    assert plan.cost.input_per_million < plan.cost.output_per_million
    assert (workload.prompt_tokens, workload.answer_tokens) == (3072, 1024)
    assert PlannedWorkload(4096).answer_tokens == 1024


def test_draft_tokens_and_cached_prefixes_count_in_the_cost() -> None:
    model, device, prices = find_model("llama-3.1-8b"), find_device("h100"), Prices(3.0)

    def plan(prefix_share: float = 0.0, draft: Speculation | None = None) -> Any:
        setup = Setup(prices=prices, speculation=draft, tp=1)
        work = PlannedWorkload(4096, 8, prefix_share=prefix_share)
        return make_plan(model, BF16, work, [device], setup).devices[0]

    plain, cached, drafted = plan(), plan(0.5), plan(draft=Speculation(4, 0.8))
    assert cached.cost.input_per_million < 0.8 * plain.cost.input_per_million
    assert cached.cost.request < plain.cost.request
    gain = drafted.speculation.speedup
    assert gain > 1.5
    assert plain.cost.request / gain < drafted.cost.request < plain.cost.request
    assert drafted.tokens_per_second_bound == pytest.approx(gain * plain.tokens_per_second_bound)

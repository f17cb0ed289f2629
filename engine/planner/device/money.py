"""Cost per token on rented GPUs, and the break-even against an API.

Prices are inputs, never assumed: they change by the month.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....quant.base.errors import BadInput

SECONDS_PER_HOUR = 3600
HOURS_PER_DAY = 24
MILLION = 1e6


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices in dollars: per GPU-hour, and per million input and output tokens of an API.

    `duty_cycle` is the fraction of the day in which the GPUs have work; they are paid for all of it.
    """

    gpu_hour: float
    api_input: float | None = None
    api_output: float | None = None
    duty_cycle: float = 1.0

    def __post_init__(self) -> None:
        for option, value in (
            ("--gpu-hour-price", self.gpu_hour),
            ("--api-price-in", self.api_input),
            ("--api-price-out", self.api_output),
        ):
            if value is not None and not value >= 0:
                raise BadInput(f"{option} {value}: a price in dollars is needed")
        if not 0 < self.duty_cycle <= 1:
            raise BadInput(
                f"--duty-cycle {self.duty_cycle}: a fraction of the day in (0, 1] is needed"
            )
        if (self.api_input is None) != (self.api_output is None):
            raise BadInput("give --api-price-in and --api-price-out together")


@dataclass(frozen=True, slots=True)
class Cost:
    """Dollars per million tokens at the duty cycle, and the break-even against an API.

    `request` is the cost of one request, prompt and output. `break_even_requests_per_day` is the number of
    API requests that cost as much as the GPUs; `capacity_requests_per_day` is the most that the GPUs can
    serve. None without an API price.
    """

    input_per_million: float
    output_per_million: float
    request: float
    dollars_per_day: float
    capacity_requests_per_day: float
    api_request: float | None
    break_even_requests_per_day: float | None
    break_even_tokens_per_day: float | None
    break_even_duty_cycle: float | None
    cheaper: str | None


def cost_of(
    prices: Prices,
    *,
    gpus: int,
    input_tokens: int,
    output_tokens: int,
    input_tokens_per_second: float,
    output_tokens_per_second: float,
) -> Cost:
    """Cost of a workload on GPUs that alternate between prefill and decode at the given rates.

    A request takes in/rate_in + out/rate_out seconds of the GPUs; at a price p per hour for all of them
    and a duty cycle u, a busy second costs p / (3600·u).
    """
    hourly = gpus * prices.gpu_hour
    second = hourly / SECONDS_PER_HOUR / prices.duty_cycle
    seconds = input_tokens / input_tokens_per_second + output_tokens / output_tokens_per_second
    per_day = hourly * HOURS_PER_DAY
    capacity = HOURS_PER_DAY * SECONDS_PER_HOUR / seconds
    api = even = tokens = duty = cheaper = None
    if prices.api_input is not None and prices.api_output is not None:
        api = (input_tokens * prices.api_input + output_tokens * prices.api_output) / MILLION
        if api > 0:
            even = per_day / api
            tokens = even * (input_tokens + output_tokens)
            duty = even / capacity
        cheaper = "own GPUs" if duty is not None and duty < prices.duty_cycle else "the API"
    return Cost(
        input_per_million=second / input_tokens_per_second * MILLION,
        output_per_million=second / output_tokens_per_second * MILLION,
        request=second * seconds,
        dollars_per_day=per_day,
        capacity_requests_per_day=capacity,
        api_request=api,
        break_even_requests_per_day=even,
        break_even_tokens_per_day=tokens,
        break_even_duty_cycle=duty,
        cheaper=cheaper,
    )

"""Arrival processes: all at once, gamma gaps at a rate (vLLM's burstiness), or a ramp."""

from __future__ import annotations

import math

import numpy as np

from ...quant.base.errors import BadInput


def arrival_offsets(
    count: int, request_rate: float, *, burstiness: float = 1.0, seed: int = 0
) -> np.ndarray:
    """Seconds from the start of the run at which each of `count` requests is due, ascending.

    Gaps are drawn from Gamma(shape = burstiness, scale = 1/(rate·burstiness)): 1 is Poisson, less is
    burstier, infinity is one request every 1/rate seconds. As in vLLM the sum is then rescaled so
    that the last request is due at exactly `count / rate`: the rate is the one asked for, and the
    process is a Poisson process conditioned on its end.

    Raises:
        BadInput: a rate or burstiness that is not above zero.
    """
    if not request_rate > 0:
        raise BadInput(f"--request-rate is {request_rate}: it must be above 0, or inf")
    if not burstiness > 0:
        raise BadInput(f"--burstiness is {burstiness}: it must be above 0")
    if math.isinf(request_rate):
        return np.zeros(count)
    if math.isinf(burstiness):
        return np.arange(1, count + 1) / request_rate
    rng = np.random.default_rng(seed)
    due = np.cumsum(rng.gamma(shape=burstiness, scale=1 / (request_rate * burstiness), size=count))
    return due * (count / request_rate / due[-1])


def ramp_offsets(
    count: int,
    strategy: str,
    start_rps: float,
    end_rps: float,
    *,
    burstiness: float = 1.0,
    seed: int = 0,
) -> np.ndarray:
    """Seconds at which each of `count` requests is due while the rate climbs (or falls).

    The rate is a function of the request's index, not of time, as in vLLM: request i of n has
    p = i/(n - 1) behind it and the rate start + (end - start)·p (`linear`) or start·(end/start)^p
    (`exponential`); its gap is drawn around the inverse of that. Nothing is rescaled.

    Raises:
        BadInput: a rate or burstiness that is not above zero, or an unknown strategy.
    """
    rates = ramp_rates(count, strategy, start_rps, end_rps)
    if not burstiness > 0:
        raise BadInput(f"--burstiness is {burstiness}: it must be above 0")
    if math.isinf(burstiness):
        return np.cumsum(1 / rates)
    rng = np.random.default_rng(seed)
    return np.cumsum(rng.gamma(shape=burstiness, scale=1 / (rates * burstiness)))


def ramp_rates(count: int, strategy: str, start_rps: float, end_rps: float) -> np.ndarray:
    """The rate under which each of `count` requests of a ramp is sent.

    Raises:
        BadInput: a rate that is not above zero, or an unknown strategy.
    """
    if not (0 < start_rps < math.inf and 0 < end_rps < math.inf):
        raise BadInput(f"ramp-up from {start_rps} to {end_rps}: both rates must be above 0")
    done = np.arange(count) / max(count - 1, 1)
    if strategy == "linear":
        return start_rps + (end_rps - start_rps) * done
    if strategy == "exponential":
        return start_rps * (end_rps / start_rps) ** done
    raise BadInput(f"--ramp-up-strategy is {strategy!r}: linear or exponential")

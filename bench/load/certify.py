"""Client certification: the load client's own error, measured against a server of known latency.

The server (`known_server`) reports in each event when it read the request and when it wrote, on the client's
clock (`time.perf_counter()` is one clock for all processes of a machine). This separates the client's error
from the server's lateness.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ...base.progress import Progress
from ..machine.environment import describe
from .exchange import EncodedRequest, Endpoint
from .fleet import Fleet, FleetPass, default_workers
from .known_server import known_server

TTFT_MS, ITL_MS = 50.0, 10.0
TOKENS = 40  # a stream of 50 + 39 × 10 ms
EVENTS_PER_SECOND = 6400
"""Most that the server writes on one core; more streams get theirs more slowly, and shorter ones."""
ROUNDS = 3
CHECKED_STREAMS = (1, 16, 100, 500, 1000)
MAX_SHARE = 0.05

FORMULAS = {
    "client_ttft_error_ms": "per request to the server of known latency: (first read − sent) in the client "
    "− (first write − request read) in the server",
    "client_itl_error_ms": "per gap: |gap between reads in the client − gap between writes in the server|",
    "loop_lag_ms": "wake-up of the client's event loop after the requested time, beyond its timer's 1 ms",
    "certified": f"median TTFT error and mean loop lag ≤ {MAX_SHARE:.0%} of the median TTFT, median ITL "
    f"error ≤ {MAX_SHARE:.0%} of the median ITL, and in an open loop without a concurrency limit the "
    f"median lateness of sending ≤ {MAX_SHARE:.0%} of the median end-to-end latency",
}


@dataclass(frozen=True, slots=True)
class ClientError:
    """The client's error at a number of streams; milliseconds.

    Attributes:
        server_lateness_ms: how late the server wrote its first events, by the server's clock: an overload of
            the machine, not an error of the client.
        failed: failed requests.
    """

    streams: int
    workers: int
    requests: int
    failed: int
    client_ttft_error_ms: dict[str, float]
    client_itl_error_ms: dict[str, float]
    server_lateness_ms: dict[str, float]
    loop_lag_ms: dict[str, float]


def measure_client(
    fleet: Fleet,
    num_workers: int,
    streams: int,
    *,
    burden: float = 0.0,
    progress: Progress | None = None,
) -> ClientError:
    """Drive the known-latency server with `streams` concurrent streams for about two seconds."""
    itl_ms = timetable(streams)[0]
    with known_server(TTFT_MS, itl_ms) as port:
        fleet_pass = known_pass(fleet, port, streams, itl_ms, burden=burden, progress=progress)
    return client_error(fleet_pass, streams, num_workers)


def timetable(streams: int) -> tuple[float, int]:
    """(ITL in milliseconds, tokens of a stream) of the known-latency server under so many streams."""
    itl = max(ITL_MS, 1000 * streams / EVENTS_PER_SECOND)
    return itl, max(5, round(TOKENS * ITL_MS / itl))


def known_pass(
    fleet: Fleet,
    port: int,
    streams: int,
    itl_ms: float,
    *,
    burden: float = 0.0,
    progress: Progress | None = None,
) -> FleetPass:
    """Send `streams` concurrent streams, evenly begun, to a known-latency server, or a proxy before it."""
    tokens = timetable(streams)[1]
    body = json.dumps({"prompt": "x", "max_tokens": tokens, "stream": True}).encode()
    every = (TTFT_MS + (tokens - 1) * itl_ms) / 1000 / streams
    requests = [
        EncodedRequest(f"known-{number}", body, number * every)
        for number in range(streams * ROUNDS)
    ]
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    fleet_pass = fleet.run(
        Endpoint("127.0.0.1", port, head, timeout=60.0),
        requests,
        streams,
        burden=burden,
        progress=progress,
        description=f"client check, {streams} streams",
    )
    if fleet_pass.interrupted:
        raise KeyboardInterrupt
    return fleet_pass


def check_client(
    num_workers: int | None = None,
    *,
    streams: Sequence[int] = CHECKED_STREAMS,
    burden: float = 0.0,
    progress: Progress | None = None,
) -> tuple[dict[str, Any], list[ClientError]]:
    """The client's error at several numbers of streams: (record, errors)."""
    errors = []
    for count in streams:
        workers = num_workers or default_workers(count)
        with Fleet(workers) as fleet:
            error = measure_client(fleet, workers, count, burden=burden, progress=progress)
        errors.append(error)
    environment = describe("cpu")
    wanted = ("machine", "load_average", "system", "python", "command", "commit")
    record = {
        "server": {
            "ttft_ms": TTFT_MS,
            "itl_ms_and_tokens": {str(count): timetable(count) for count in streams},
        },
        "formulas": {key: FORMULAS[key] for key in FORMULAS if key != "certified"},
        "client_burden_ms": burden * 1000,
        "environment": {key: environment[key] for key in wanted},
        "errors": [asdict(error) for error in errors],
    }
    return record, errors


def client_error(fleet_pass: FleetPass, streams: int, num_workers: int) -> ClientError:
    """The client's errors in one pass against the known-latency server."""
    done = [exchange for exchange in fleet_pass.exchanges if not exchange.answer.error]
    first, gaps, late = [], [], []
    for exchange in done:
        times, (received, *written) = exchange.answer.times, exchange.answer.server_times
        first.append((times[0] - exchange.sent) - (written[0] - received))
        late.append(written[0] - received - TTFT_MS / 1000)
        gaps += [
            abs((b - a) - (d - c))
            for (a, b), (c, d) in zip(pairwise(times), pairwise(written), strict=True)
        ]
    return ClientError(
        streams,
        num_workers,
        len(fleet_pass.exchanges),
        len(fleet_pass.exchanges) - len(done),
        _summary(first),
        _summary(gaps),
        _summary(late),
        fleet_pass.lag_ms,
    )


def _summary(seconds: Sequence[float]) -> dict[str, float]:
    values = np.asarray(seconds or [0.0]) * 1000
    return {
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "p99": float(np.percentile(values, 99)),
        "max": float(values.max()),
    }


def judge(
    error: ClientError | None,
    metrics: Mapping[str, Mapping[str, Any]],
    *,
    loop_lag_ms: float,
    send_lag_ms: float | None,
) -> list[str]:
    """Reasons against certifying a run (client overhead too large); empty when it is certified.

    Args:
        error: the client's error before the run; None where it was not measured.
        metrics: the run's distributions (`run_statistics.distributions`).
        loop_lag_ms: mean event-loop lag over the run's passes.
        send_lag_ms: median lateness of sending; None under a concurrency limit, where waiting is part of
            the load.
    """
    # A pooling response has no first token: its end is its only time.
    first = "ttft" if metrics["ttft"]["median"] is not None else "e2el"
    if metrics[first]["median"] is None:
        return ["no request succeeded, so there is nothing to certify"]
    if error is None:
        return ["the client was not checked (--no-check-client)"]
    if error.failed:
        return [f"{error.failed} of {error.requests} requests to the known-latency server failed"]
    reasons = []
    for name, error_ms, metric in (
        ("TTFT error", error.client_ttft_error_ms["median"], first),
        ("ITL error", error.client_itl_error_ms["median"], "itl"),
        ("event loop lag", loop_lag_ms, first),
        ("lateness of sending", send_lag_ms, "e2el"),
    ):
        measured = metrics[metric]["median"]
        if error_ms is not None and measured and error_ms > MAX_SHARE * measured:
            reasons.append(
                f"the client's {name} is {error_ms:.2f} ms, {error_ms / measured:.0%} of the median "
                f"{metric.upper()} of {measured:.2f} ms (limit {MAX_SHARE:.0%})"
            )
    return reasons

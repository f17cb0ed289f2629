"""Messages between the fleet and its load workers: jobs, exchanges and reports, as picklable values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .answer import Answer


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The server that requests are sent to.

    Attributes:
        host, port: to connect to.
        is_tls: whether to use TLS; `verify_tls`: whether certificates are verified.
        head: the request line and every header but the length, ready to send.
        timeout: seconds for one request from sending to the end of its response.
    """

    host: str
    port: int
    head: bytes
    is_tls: bool = False
    verify_tls: bool = True
    timeout: float = 600.0


@dataclass(frozen=True, slots=True)
class EncodedRequest:
    """One request, encoded before the clock starts, and when it is due (seconds from the origin)."""

    request_id: str
    body: bytes
    due: float = 0.0


@dataclass(frozen=True, slots=True)
class Job:
    """One pass of one worker.

    Attributes:
        limit: maximum requests in flight over all workers; None is no limit.
        places: (read, write) file descriptors of the permit pipe, which holds a byte per free concurrency
            permit; None without a limit.
        burden: seconds of every 50 ms in which the worker busy-waits, to test that a starved client is
            detected.
    """

    endpoint: Endpoint
    requests: tuple[EncodedRequest, ...]
    limit: int | None
    burden: float = 0.0
    permits: tuple[int, int] | None = None


@dataclass(slots=True)
class Exchange:
    """One request and its response. Times are `time.perf_counter()`, one clock for all processes."""

    request_id: str
    sent: float
    ended: float
    answer: Answer = field(default_factory=Answer)


@dataclass(slots=True)
class Report:
    """A worker's results at the end of a pass.

    Attributes:
        lag_ms: event-loop lag (wake-up after the requested time), sampled through the pass: mean, p99, max.
        late_connections: connections opened after the clock had started.
    """

    exchanges: list[Exchange]
    lag_ms: Mapping[str, float]
    late_connections: int = 0

"""What a load worker is told and what it gives back: plain values that travel between processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .answer import Answer


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go.

    Attributes:
        host, port: to connect to.
        is_tls: whether to speak TLS; `verify_tls` whether to believe only known certificates.
        head: the request line and every header but the length, ready to send.
        timeout: seconds for one request from its sending to the end of its answer.
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
        limit: most requests in flight, of all workers together; None is no limit.
        places: (reading, writing) file descriptors of the pipe that holds a byte for every free place;
            None without a limit.
        burden: seconds that the worker wastes in every twentieth of a second, to prove that a run with
            a starved client is noticed.
    """

    endpoint: Endpoint
    requests: tuple[EncodedRequest, ...]
    limit: int | None
    burden: float = 0.0
    permits: tuple[int, int] | None = None


@dataclass(slots=True)
class Exchange:
    """What happened to one request. Times are `time.perf_counter()`, one clock for all processes."""

    request_id: str
    sent: float
    ended: float
    answer: Answer = field(default_factory=Answer)


@dataclass(slots=True)
class Report:
    """What a worker gives back at the end of a pass.

    Attributes:
        lag_ms: how much later than asked its loop woke up, sampled through the pass: mean, p99, max.
        late_connections: connections that had to be opened after the clock had started.
    """

    exchanges: list[Exchange]
    lag_ms: Mapping[str, float]
    late_connections: int = 0

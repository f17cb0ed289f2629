"""What a deployment must know of each engine's server: image, probes, API key, metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...quant.base.errors import BadInput
from ..server.loop.metric_names import llmopt_metric, no_metric, sglang_metric, vllm_metric
from .engines import ENGINES
from .translation import ServerCommand


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """A server in a container. `/health` is each one's liveness.

    Attributes:
        name: as `--engine` takes it.
        image: of the version whose options are written; None: the user's own.
        ready_path: answers 200 while the server takes new requests.
        key_variable: the environment variable of its API key; None: it takes none from there.
        metric: its name of a metric of llmopt, None for one that it has not.
        metrics_need_key: whether `/metrics` asks for the API key.
        command: None for llmopt's own server.
        words: arguments that a deployment adds.
    """

    name: str
    title: str
    image: str | None
    ready_path: str
    key_variable: str | None
    metric: Callable[[str], str | None]
    metrics_need_key: bool = False
    command: ServerCommand | None = None
    words: Sequence[str] = ()

    @property
    def has_metrics(self) -> bool:
        """Whether it exposes the length of its queue."""
        return self.metric("num_requests_waiting") is not None


def _other(
    name: str,
    image: str,
    metric: Callable[[str], str | None],
    ready_path: str,
    words: Sequence[str] = (),
) -> ServedEngine:
    command = ENGINES[name]
    return ServedEngine(
        name,
        command.title,
        f"{image}{command.version}",
        ready_path,
        command.key_variable,
        metric,
        command=command,
        words=words,
    )


SERVED: Mapping[str, ServedEngine] = {
    engine.name: engine
    for engine in (
        ServedEngine(
            "llmopt", "llmopt", None, "/ready", "LLMOPT_API_KEY", llmopt_metric, metrics_need_key=True
        ),
        _other("vllm", "vllm/vllm-openai:v", vllm_metric, "/health"),
        _other("sglang", "lmsysorg/sglang:v", sglang_metric, "/ready", ["--enable-metrics"]),
        # Its Prometheus metrics have to be switched on in a YAML file, and lack the length of the queue.
        _other("trtllm", "nvcr.io/nvidia/tensorrt-llm/release:", no_metric, "/health"),
    )
}  # fmt: skip


def served_engine(name: str) -> ServedEngine:
    """The engine of that name.

    Raises:
        BadInput: there is none.
    """
    if name not in SERVED:
        raise BadInput(f"--engine {name}: choose {', '.join(SERVED)}")
    return SERVED[name]

"""What a user chooses of a deployment: model, engine, names, replicas."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...quant.base.errors import BadInput
from .served_engine import served_engine

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,51}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class Choices:
    """User choices; the rest follows from the plan.

    Attributes:
        model: that the pods load, a hub id or a path in the image.
        key_secret: Kubernetes secret whose entry `api-key` is the API key; None: no API key.
        replicas, max_replicas: minimum and maximum number.
        queue_target: waiting requests per replica above which the autoscaler adds replicas.
        max_surge: replicas that a rollout starts before it stops an old one; with 0 it stops one first.
        drain_seconds: that requests in flight have to finish when a pod is stopped.
        ttft_target: seconds; an alert tells when the 99th percentile of the time to first token is above.
    """

    model: str
    name: str
    engine: str = "vllm"
    image: str | None = None
    namespace: str = "default"
    key_secret: str | None = None
    replicas: int = 1
    max_replicas: int = 4
    queue_target: int = 4
    gpus_per_node: int = 8
    max_surge: int = 1
    drain_seconds: int = 300
    ttft_target: float = 10.0

    def __post_init__(self) -> None:
        for name in (self.name, self.namespace):
            if not _NAME.fullmatch(name):
                raise BadInput(f"{name!r} is no name for Kubernetes: small letters, digits and -")
        served = served_engine(self.engine)
        if self.image is None and served.image is None:
            raise BadInput(
                f"--engine {self.engine}: give the --image that {served.title} is installed in"
            )
        if self.key_secret is not None and served.key_variable is None:
            raise BadInput(
                f"--api-key-secret: {served.title} reads no key from its environment; put a proxy before it"
            )
        if not 1 <= self.replicas <= self.max_replicas:
            raise BadInput(
                f"--replicas {self.replicas}, --max-replicas {self.max_replicas}: at least 1, and no "
                "more than the most"
            )
        if self.queue_target < 1:
            raise BadInput(f"--queue-target {self.queue_target}: at least 1")
        if self.max_surge < 0:
            raise BadInput(f"--max-surge {self.max_surge}: at least 0")
        if self.drain_seconds < 1:
            raise BadInput(f"--drain-seconds {self.drain_seconds}: at least 1")
        if not self.ttft_target > 0:
            raise BadInput(f"--ttft-target {self.ttft_target:g}: seconds above 0")

"""Facts of each engine's server that a deployment needs: image, probes, API key, metrics, KV-cache dtypes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...quant.base.errors import BadInput
from ..server.loop.metric_names import llmopt_metric, no_metric, sglang_metric, vllm_metric
from .engine_commands import ENGINES, ServerCommand
from .stored_quantization import StoredQuantization

PORT = 8000


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
        kv_dtypes: its names of the planner's dtypes of the KV cache, None for the default; without them it
            has the planner's, bf16 by default.
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
    kv_dtypes: Mapping[str, str | None] | None = None

    @property
    def has_metrics(self) -> bool:
        """Whether it exposes the length of its queue."""
        return self.metric("num_requests_waiting") is not None

    def cache_words(self, kv_dtype: str, stored: StoredQuantization | None) -> Sequence[str]:
        """The option for the planner's dtype of the KV cache.

        Raises:
            BadInput: it has no such cache, or not with this checkpoint.
        """
        if self.name == "trtllm":
            # From the checkpoint, or from a YAML file.
            held = (stored and stored.kv_dtype) or "bf16"
            if kv_dtype != held:
                raise BadInput(
                    f"--kv-dtype {kv_dtype}: TensorRT-LLM takes it from the checkpoint, which has {held}; "
                    "quantize it with --kv-cache fp8 --format modelopt"
                )
            return []
        names = {kv_dtype: kv_dtype, "bf16": None} if self.kv_dtypes is None else self.kv_dtypes
        if kv_dtype not in names:
            title = "our engine" if self.command is None else self.title
            raise BadInput(f"--kv-dtype {kv_dtype}: {title} has {', '.join(names)}")
        name = names[kv_dtype]
        return [] if name is None else ["--kv-cache-dtype", name]


def _other(
    name: str,
    image: str,
    metric: Callable[[str], str | None],
    ready_path: str,
    words: Sequence[str] = (),
    kv_dtypes: Mapping[str, str | None] | None = None,
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
        kv_dtypes=kv_dtypes,
    )


SERVED: Mapping[str, ServedEngine] = {
    engine.name: engine
    for engine in (
        ServedEngine(
            "llmopt",
            "llmopt",
            None,
            "/ready",
            "LLMOPT_API_KEY",
            llmopt_metric,
            metrics_need_key=True,
            kv_dtypes={"bf16": "bfloat16", "float32": "float32", "fp8": "fp8", "int8": "int8"},
        ),
        _other("vllm", "vllm/vllm-openai:v", vllm_metric, "/health"),
        _other(
            "sglang",
            "lmsysorg/sglang:v",
            sglang_metric,
            "/ready",
            ["--enable-metrics"],
            {"bf16": None, "fp8": "fp8_e4m3", "nvfp4": "nvfp4"},
        ),
        # Its Prometheus metrics have to be switched on in a YAML file, and lack the length of the queue.
        _other("trtllm", "nvcr.io/nvidia/tensorrt-llm/release:", no_metric, "/health"),
    )
}


def served_engine(name: str) -> ServedEngine:
    """The engine of that name.

    Raises:
        BadInput: there is none.
    """
    if name not in SERVED:
        raise BadInput(f"--engine {name}: choose {', '.join(SERVED)}")
    return SERVED[name]

"""Options of `llmopt serve-local` and `llmopt batch` beside the engine's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ...quant.base.option import option

TLS = "TLS"
LIMITS = "Keys and rate limits"


@dataclass(frozen=True, slots=True)
class HandoverOptions:
    """Options for serving with another engine than llmopt's."""

    PANEL: ClassVar = "Another engine"

    engine: str = option(
        "llmopt", "llmopt, or vllm, sglang or trtllm: exec that server with these options."
    )
    pipeline_parallel_size: int = option(1, "Other engines: pipeline-parallel size.")
    ray: bool = option(False, "vllm: distribute over a Ray cluster.", flag="--ray")
    print_command: bool = option(
        False, "Other engines: print the command and exit.", flag="--print-command"
    )


@dataclass(frozen=True, slots=True)
class ServedModelOptions:
    """The served name, chat template and parsers."""

    served_model_name: str | None = option(None, "Served model name. Default: the model's.")
    chat_template: str | None = option(
        None, "File with a Jinja chat template. Default: the model's."
    )
    tool_call_parser: str | None = option(
        None,
        "Tool-call parser, such as hermes, qwen3_coder or openai. Default: detected from the chat "
        "template.",
    )
    reasoning_parser: str | None = option(
        None,
        "Reasoning parser: think, mistral or seed_oss. Default: detected from the chat template.",
    )
    pooling_type: str | None = option(
        None,
        "Pooling of embeddings: last, mean, cls or max. Default: the checkpoint's, if it has one.",
    )

    def served_name(self, model: str) -> str:
        """The served name of `model`, a folder, a GGUF file or a name."""
        from ...quant.models import short_name

        path = Path(model).expanduser()
        return self.served_model_name or (short_name(path) if path.exists() else model)


@dataclass(frozen=True, slots=True)
class ServingOptions(ServedModelOptions):
    """Options of a served model, and the address of its server."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port to listen on; 0 picks a free one.", span=(0, 65535))
    as_json: bool = option(
        False, "When ready, print url, model and pid as one JSON line.", flag="--json"
    )


@dataclass(frozen=True, slots=True)
class ProtectionOptions:
    """API keys, CORS origins, size and time limits, queues."""

    PANEL: ClassVar = "Protection"

    api_key: list[str] | None = option(
        None, "Required API key; repeatable. Default: none.", envvar="LLMOPT_API_KEY"
    )
    cors_origin: list[str] | None = option(
        None, "Allowed CORS origin, * for all; repeatable. Default: none."
    )
    allowed_host: list[str] | None = option(
        None, "Allowed Host name of a loopback server, besides localhost; repeatable."
    )
    max_body: str = option("16MiB", "Maximum request body size.")
    max_header: str = option("32KiB", "Maximum size of a request's URL and headers.")
    header_timeout: float = option(30.0, "Timeout for receiving the head of a request, in seconds.")
    max_connections: int = option(1024, "Maximum open connections.")
    body_timeout: float = option(30.0, "Timeout for receiving a request, in seconds.")
    send_timeout: float = option(60.0, "Timeout for a client that stops reading, in seconds.")
    max_concurrency_per_key: int | None = option(
        None, "Concurrent requests per API key. Default: no limit. Without keys, clients share it."
    )
    max_queue_per_key: int = option(0, "Queued requests per API key.")
    max_waiting: int = option(4096, "Maximum waiting sequences in the engine's queue.")
    request_timeout: float = option(3600.0, "Request timeout in seconds.")
    step_timeout: float = option(
        120.0, "Age of an engine step from which /health reports it, in seconds."
    )
    shutdown_delay: float = option(
        0.0, "Seconds after SIGTERM in which requests are still taken while /ready is 503."
    )
    drain_seconds: float = option(
        5.0, "Seconds to drain requests in flight after Ctrl-C or SIGTERM."
    )
    admin_api_key: str | None = option(
        None,
        "API key that may load adapters and see metrics; others then may not.",
        envvar="LLMOPT_ADMIN_API_KEY",
    )
    allow_runtime_lora_updating: bool = option(
        False,
        "Load and unload LoRA adapters by request; see --max-loras.",
        flag="--allow-runtime-lora-updating",
        envvar="LLMOPT_ALLOW_RUNTIME_LORA_UPDATING",
    )
    allowed_lora_path: list[Path] | None = option(
        None, "Folder below which adapters may be loaded by request; repeatable."
    )
    log_prompts: bool = option(
        False, "Write requests with their prompts into the log.", flag="--log-prompts"
    )
    scripted_output: str | None = option(
        None,
        "JSON list of {after, text}: a conversation whose prompt has 'after' in it gets 'text'. "
        "For tests of agents.",
    )


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """Hosts and limits of images."""

    PANEL: ClassVar = "Images"

    allowed_media_domains: list[str] | None = option(
        None,
        "Host whose http(s) image URLs are fetched; repeatable. Default: none, data URLs only.",
    )
    limit_mm_per_prompt: str | None = option(
        None,
        "Images per prompt, as JSON: '{\"image\": 4}'. Default: 16.",
        hidden_flags=("--limit-mm-per-prompt.image",),
    )
    max_image_pixels: int = option(1 << 25, "Maximum pixels of an image, by its header.")
    max_image_bytes: str = option("16MiB", "Maximum encoded size of an image.")
    media_timeout: float = option(5.0, "Timeout for fetching an image, in seconds.")


@dataclass(frozen=True, slots=True)
class OperationOptions:
    """Options that an operator adds to a server: logs, traces, API keys, limits and TLS."""

    PANEL: ClassVar = "Logs and traces"

    log_format: str = option("text", "Log lines: text, or json, an object a line.")
    otlp_traces_endpoint: str | None = option(
        None,
        "Send OpenTelemetry traces to this OTLP/HTTP URL. Needs the extra otel. Default: none.",
    )
    api_key_file: Path | None = option(
        None,
        "YAML file of API keys with names and limits, read again when it changes.",
        panel=LIMITS,
    )
    rpm_per_key: int | None = option(
        None, "Requests per minute of an API key. Default: no limit.", panel=LIMITS
    )
    tpm_per_key: int | None = option(
        None,
        "Tokens per minute of an API key, prompts and completions. Default: no limit.",
        panel=LIMITS,
    )
    ssl_certfile: Path | None = option(
        None, "TLS certificate, PEM. Default: plain HTTP.", panel=TLS
    )
    ssl_keyfile: Path | None = option(
        None, "Its private key. Default: in the certificate.", panel=TLS
    )
    ssl_ca_certs: Path | None = option(None, "Authorities of clients' certificates.", panel=TLS)
    ssl_cert_reqs: int = option(
        0, "Clients' certificates: 0 not asked for, 1 optional, 2 required.", panel=TLS
    )
    enable_ssl_refresh: bool = option(
        False, "Read the TLS files again when they change.", panel=TLS
    )

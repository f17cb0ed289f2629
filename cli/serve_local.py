"""`llmopt serve-local`: the engine behind an OpenAI-compatible HTTP server on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from . import handover
from .options import engine as speculation
from .options import protection
from .options.common import (
    AttentionSinks,
    CpuActivations,
    EnforceEager,
    GpuMemoryUtilization,
    KvCacheDtype,
    Lora,
    ModelArgument,
    ModelOption,
    OverlappedLoop,
    SchedulingPolicy,
    SwapSpace,
    TensorParallelSize,
    Window,
)

if TYPE_CHECKING:
    from ..engine.engine import Engine


def serve_local(
    context: typer.Context,
    model: ModelArgument = None,
    model_option: ModelOption = None,
    engine: handover.EngineName = "llmopt",
    pipeline_parallel_size: handover.PipelineParallelSize = 1,
    ray: handover.Ray = False,
    print_command: handover.PrintCommand = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8000,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens in a sequence. Default: the model's own.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Sequences that run at once; more wait.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Tokens computed in one step.")
    ] = None,
    scheduling_policy: SchedulingPolicy = "fcfs",
    overlapped_loop: OverlappedLoop = False,
    enforce_eager: EnforceEager = False,
    kv_cache_memory: Annotated[
        str | None, typer.Option(help="Size of the KV cache, as in 4GiB. Default: derived.")
    ] = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    gpu_memory_utilization: GpuMemoryUtilization = None,
    swap_space: SwapSpace = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens in a KV block.")] = None,
    no_prefix_caching: Annotated[
        bool, typer.Option("--no-prefix-caching", help="Compute every prompt from its beginning.")
    ] = False,
    cpu_activations: CpuActivations = 16,
    tensor_parallel_size: TensorParallelSize = 1,
    window: Window = None,
    attention_sinks: AttentionSinks = 0,
    lora: Lora = None,
    speculative: speculation.Speculative = None,
    draft_model: speculation.DraftModel = None,
    num_speculative_tokens: speculation.NumSpeculativeTokens = 4,
    speculative_tree_width: speculation.SpeculativeTreeWidth = None,
    prompt_lookup_min: speculation.PromptLookupMin = 2,
    prompt_lookup_max: speculation.PromptLookupMax = 4,
    speculative_acceptance: speculation.SpeculativeAcceptance = "coupled",
    served_model_name: Annotated[
        str | None, typer.Option(help="Name for clients. Default: the model's.")
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(help="File with a chat template, in Jinja. Default: the model's own."),
    ] = None,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(
            help="How the model writes tool calls: hermes, llama3_json or mistral. Default: as its "
            "chat template does."
        ),
    ] = None,
    api_key: protection.ApiKey = None,
    cors_origin: protection.CorsOrigin = None,
    allowed_host: protection.AllowedHost = None,
    max_body: protection.MaxBody = "16MiB",
    max_header: protection.MaxHeader = "32KiB",
    body_timeout: protection.BodyTimeout = 30.0,
    max_concurrency_per_key: protection.MaxConcurrencyPerKey = None,
    max_queue_per_key: protection.MaxQueuePerKey = 0,
    max_waiting: protection.MaxWaiting = 4096,
    request_timeout: protection.RequestTimeout = 3600.0,
    drain_seconds: protection.DrainSeconds = 5.0,
    log_prompts: protection.LogPrompts = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="When ready, print url, model and pid as one JSON line."),
    ] = False,
) -> None:
    """Serve a model with OpenAI's completions and chat endpoints, until Ctrl-C."""
    from pathlib import Path

    from ..engine.base.units import parse_bytes
    from ..engine.config.adapters import parse_adapters
    from ..engine.config.config import EngineConfig
    from ..engine.server.launch import base_url, bind, bound_kernel_caches, is_loopback
    from ..engine.server.protocol.server_options import ServerOptions
    from ..engine.server.text.tool_calls import tool_format
    from ..quant.base.errors import BadInput
    from ..quant.model.models import resolve_model
    from ..recipes import DEFAULT_MODEL
    from .output.console import people

    if model is not None and model_option is not None and model != model_option:
        raise BadInput(f"two models were given, {model!r} and {model_option!r}: give one")
    name = model or model_option or DEFAULT_MODEL
    asked = handover.asked(context)
    if engine == "vllm":
        handover.hand_over(name, asked)
        return
    if engine != "llmopt":
        raise BadInput(f"--engine {engine}: choose llmopt or vllm")
    handover.refuse_handover_options(asked)
    options = ServerOptions(
        api_keys=tuple(api_key or ()),
        cors_origins=tuple(cors_origin or ()),
        host_names=frozenset(allowed_host or ()) if is_loopback(host) else None,
        max_body_bytes=parse_bytes(max_body),
        max_header_bytes=parse_bytes(max_header),
        body_timeout_seconds=body_timeout,
        max_concurrency_per_key=max_concurrency_per_key,
        max_queue_per_key=max_queue_per_key,
        max_waiting=max_waiting,
        request_timeout_seconds=request_timeout,
        drain_seconds=drain_seconds,
        log_prompts=log_prompts,
    )
    config = EngineConfig(
        model=name,
        dtype=dtype,
        device=device,
        block_size=block_size,
        kv_cache_dtype=kv_cache_dtype,
        window=window,
        attention_sinks=attention_sinks,
        kv_cache_memory_bytes=None if kv_cache_memory is None else parse_bytes(kv_cache_memory),
        gpu_memory_utilization=gpu_memory_utilization,
        swap_space_bytes=0 if swap_space is None else parse_bytes(swap_space),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        scheduling_policy=scheduling_policy,
        overlapped_loop=overlapped_loop,
        enforce_eager=enforce_eager,
        enable_prefix_caching=not no_prefix_caching,
        cpu_activations=cpu_activations,
        tensor_parallel_size=tensor_parallel_size,
        loras=parse_adapters(lora or ()),
        speculation=speculation.speculation(
            speculative,
            draft_model,
            num_speculative_tokens,
            speculative_tree_width,
            prompt_lookup_min,
            prompt_lookup_max,
            speculative_acceptance,
        ),
    )
    template = None if chat_template is None else _read_template(chat_template)
    if tool_call_parser is not None:
        tool_format(tool_call_parser)
    listener = bind(host, port)
    folder = resolve_model(name)
    path = Path(name).expanduser()
    served = served_model_name or (path.resolve().name if path.is_dir() else name)

    if served in config.loras:
        raise BadInput(f"--lora {served}: the model itself is served by that name")
    people.print(f"loading {folder} ...", soft_wrap=True, markup=False)
    bound_kernel_caches()
    from ..engine.engine import Engine
    from ..engine.server.app import create_app, describe_template
    from ..engine.server.launch import serve

    opened = Engine(config)
    app = create_app(
        opened,
        model_name=served,
        options=options,
        chat_template=template,
        tool_call_parser=tool_call_parser,
    )
    url = base_url(listener)
    facts = (
        f"{str(opened.dtype).removeprefix('torch.')} on {opened.device}, "
        f"{_context(opened)}, "
        f"chat template: {describe_template(app.state.service.text)}"
    )
    has_key = bool(options.api_keys)
    serve(app, listener, on_ready=lambda: _announce(url, served, facts, has_key, as_json))
    people.print("stopped")


def _read_template(path: str) -> str:
    from pathlib import Path

    from ..quant.base.errors import BadInput

    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or "it is not UTF-8 text"
        raise BadInput(f"--chat-template {path}: {reason}") from error


def _context(engine: Engine) -> str:
    if (stream := engine.config.stream) is not None:
        return f"streams without end: the first {stream.sinks} and the last {stream.length} tokens stay"
    return f"context {engine.max_model_len} tokens"


def _announce(url: str, model: str, facts: str, has_key: bool, as_json: bool) -> None:
    import json
    import os

    if as_json:
        typer.echo(json.dumps({"url": url, "model": model, "pid": os.getpid()}))
        return
    body = json.dumps({"model": model, "prompt": "Once upon a time", "max_tokens": 64})
    key = " -H 'Authorization: Bearer YOUR_KEY'" if has_key else ""
    typer.echo(f"ready: {model} at {url}/v1 ({facts})")
    typer.echo(
        f"try: curl {url}/v1/completions{key} -H 'Content-Type: application/json' -d '{body}'",
        err=True,
    )
    typer.echo("Ctrl-C stops it", err=True)

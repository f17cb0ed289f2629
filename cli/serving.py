"""Options of `llmopt serve-local` and `batch`, read for a server: limits, TLS, keys, templates.

With `--engine vllm|sglang|trtllm` they are translated, and that engine's server takes the process over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import typer

from .options.command import shown_name

if TYPE_CHECKING:
    from ..engine.multimodal.media import MediaLimits
    from ..engine.server.protocol.server_options import ServerOptions, TlsOptions
    from .options.serving import (
        MediaOptions,
        OperationOptions,
        ProtectionOptions,
        ServedModelOptions,
    )


def server_options(
    protection: ProtectionOptions,
    operation: OperationOptions,
    media: MediaOptions,
    *,
    is_loopback: bool,
) -> ServerOptions:
    """The server's options, all checked: files, packages and addresses.

    Raises:
        BadInput: what is wrong with one of them.
    """
    from ..engine.server.protocol.server_options import LogFormat
    from ..engine.server.requests.keys import KeyRing
    from ..engine.server.requests.reload import open_context
    from ..engine.server.requests.tracing import check_tracing
    from ..quant.base.errors import BadInput

    form = next((name for name in get_args(LogFormat) if name == operation.log_format), None)
    if form is None:
        raise BadInput(
            f"--log-format {operation.log_format}: choose {', '.join(get_args(LogFormat))}"
        )
    options = replace(
        _protected(protection, is_loopback=is_loopback),
        api_key_file=operation.api_key_file,
        rpm_per_key=operation.rpm_per_key,
        tpm_per_key=operation.tpm_per_key,
        log_format=form,
        otlp_traces_endpoint=operation.otlp_traces_endpoint,
        tls=_tls(operation),
        media=media_limits(media),
    )
    if options.otlp_traces_endpoint is not None:
        check_tracing(options.otlp_traces_endpoint)
    if options.tls is not None:
        open_context(options.tls)
    KeyRing(options)
    return options


def _tls(operation: OperationOptions) -> TlsOptions | None:
    from ..engine.server.protocol.server_options import TlsOptions
    from ..quant.base.errors import BadInput

    if operation.ssl_certfile is not None:
        return TlsOptions(
            operation.ssl_certfile,
            operation.ssl_keyfile,
            operation.ssl_ca_certs,
            operation.ssl_cert_reqs,
            operation.enable_ssl_refresh,
        )
    others = {
        "--ssl-keyfile": operation.ssl_keyfile,
        "--ssl-ca-certs": operation.ssl_ca_certs,
        "--ssl-cert-reqs": operation.ssl_cert_reqs,
        "--enable-ssl-refresh": operation.enable_ssl_refresh,
    }
    for name, value in others.items():
        if value:
            raise BadInput(f"{name} needs --ssl-certfile, the server's certificate")
    return None


def _protected(protection: ProtectionOptions, *, is_loopback: bool) -> ServerOptions:
    """The server's options.

    Raises:
        BadInput: an invalid size, or a number out of range.
    """
    from ..engine.base.units import parse_bytes
    from ..engine.server.protocol.server_options import ServerOptions, read_script

    return ServerOptions(
        api_keys=tuple(protection.api_key or ()),
        cors_origins=tuple(protection.cors_origin or ()),
        host_names=frozenset(protection.allowed_host or ()) if is_loopback else None,
        max_body_bytes=parse_bytes(protection.max_body),
        max_header_bytes=parse_bytes(protection.max_header),
        header_timeout_seconds=protection.header_timeout,
        max_connections=protection.max_connections,
        body_timeout_seconds=protection.body_timeout,
        send_timeout_seconds=protection.send_timeout,
        max_concurrency_per_key=protection.max_concurrency_per_key,
        max_queue_per_key=protection.max_queue_per_key,
        max_waiting=protection.max_waiting,
        request_timeout_seconds=protection.request_timeout,
        step_timeout_seconds=protection.step_timeout,
        shutdown_delay_seconds=protection.shutdown_delay,
        drain_seconds=protection.drain_seconds,
        log_prompts=protection.log_prompts,
        admin_api_key=protection.admin_api_key,
        lora_folders=_lora_folders(protection),
        script=read_script(Path(protection.scripted_output)) if protection.scripted_output else (),
    )


def _lora_folders(protection: ProtectionOptions) -> tuple[Path, ...]:
    from ..quant.base.errors import BadInput

    folders = tuple(protection.allowed_lora_path or ())
    if protection.allow_runtime_lora_updating != bool(folders):
        raise BadInput(
            "--allow-runtime-lora-updating and --allowed-lora-path go together: adapters are loaded from "
            "below that folder alone"
        )
    return folders


def media_limits(media: MediaOptions) -> MediaLimits:
    """The limits of images.

    Raises:
        BadInput: an invalid limit or host name.
    """
    from ..engine.base.units import parse_bytes
    from ..engine.multimodal.media import MediaLimits

    limits = MediaLimits(
        allowed_domains=frozenset(name.lower() for name in media.allowed_media_domains or ()),
        max_image_bytes=parse_bytes(media.max_image_bytes),
        max_image_pixels=media.max_image_pixels,
        fetch_timeout_seconds=media.media_timeout,
    )
    return limits.with_max_images(_max_images(media.limit_mm_per_prompt))


def _max_images(text: str | None) -> int | None:
    """The count of images in vLLM's `{"image": 4}` or `{"image": {"count": 4}}`, or the number alone as
    its `--limit-mm-per-prompt.image 4` gives it."""
    from ..quant.base.errors import BadInput

    if text is None:
        return None
    usage = BadInput(
        f"--limit-mm-per-prompt {text}: give JSON such as "
        "'{\"image\": 4}'; models here take images alone"
    )
    try:
        asked = json.loads(text)
    except ValueError as error:
        raise usage from error
    if type(asked) is int:
        return asked
    if not isinstance(asked, dict):
        raise usage
    counts = {k: v.get("count") if isinstance(v, dict) else v for k, v in asked.items()}
    if any(type(count) is not int for count in counts.values()):
        raise usage
    if any(count for kind, count in counts.items() if kind != "image"):
        raise usage
    return counts.get("image")


def app_options(served: ServedModelOptions) -> dict[str, str | None]:
    """Keyword arguments for `create_app`.

    Raises:
        BadInput: no such parser, or a template file that cannot be read.
    """
    from ..engine.base.sampling_params import PoolingParams
    from ..engine.server.parsing.formats import reasoning_format, tool_format

    if served.tool_call_parser is not None:
        tool_format(served.tool_call_parser)
    if served.reasoning_parser is not None:
        reasoning_format(served.reasoning_parser)
    if served.pooling_type is not None:
        PoolingParams(served.pooling_type.lower())
    return {
        "chat_template": chat_template(served),
        "tool_call_parser": served.tool_call_parser,
        "reasoning_parser": served.reasoning_parser,
        "pooling_type": served.pooling_type,
    }


def chat_template(served: ServedModelOptions) -> str | None:
    """The chat template from --chat-template.

    Raises:
        BadInput: its file cannot be read.
    """
    from ..quant.base.errors import BadInput

    if served.chat_template is None:
        return None
    try:
        return Path(served.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or "it is not UTF-8 text"
        raise BadInput(f"--chat-template {served.chat_template}: {reason}") from error


_OF_THE_HANDOVER = ("model", "model_option", "engine", "print_command", "debug", "config")


def options_given(context: typer.Context) -> dict[str, Any]:
    """Options set explicitly: on the command line, in the environment, or in the file of `--config`."""
    named = ("COMMANDLINE", "ENVIRONMENT", "DEFAULT_MAP")
    return {
        shown_name(name): value
        for name, value in context.params.items()
        if getattr(context.get_parameter_source(name), "name", "") in named
    }


def refuse_handover_options(given: Mapping[str, Any]) -> None:
    """Raises `BadInput` for options of other engines with llmopt's."""
    from ..quant.base.errors import BadInput

    for name in ("pipeline_parallel_size", "ray", "print_command"):
        if name in given:
            raise BadInput(f"--{name.replace('_', '-')} is for another --engine")


def hand_over(engine: str, name: str, given: Mapping[str, Any]) -> None:
    """Replace this process by another engine's server for the model `name`, or only print the command.

    Raises:
        BadInput: an option without a counterpart, or an engine that is unknown or not installed.
    """
    import os
    import shlex
    from pathlib import Path

    from ..engine.deploy.engine_commands import server_command
    from ..quant.models import bundled_models, resolve_model, short_name
    from .output.console import people

    server = server_command(engine)
    options = {key: value for key, value in given.items() if key not in _OF_THE_HANDOVER}
    path = Path(name).expanduser()
    is_here = name in bundled_models() or path.exists()
    if is_here and not path.is_file():
        path = resolve_model(name)
    model = str(path.absolute()) if is_here else name
    if is_here and "served_model_name" in server.table:
        options.setdefault("served_model_name", short_name(Path(model)))
    command = server.command(model, options)
    key = next(iter(given.get("api_key") or ()), None)
    environment = {server.key_variable: key} if key and server.key_variable else {}
    shown = " ".join([*(f"{variable}=..." for variable in environment), shlex.join(command)])
    if given.get("print_command"):
        typer.echo(shown)
        return
    program = server.find()
    people.print(f"handing over: {shown}", soft_wrap=True, markup=False)
    os.execve(program, command, {**os.environ, **environment})

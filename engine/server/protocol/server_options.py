"""Options of a served model, of serving it with another engine, and of the server: address, authentication,
limits, timeouts, shutdown, TLS, and outputs that a script dictates.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from ....base.atomic_io import expanded
from ....base.errors import BadInput
from ....base.option import check_limits, flag_of, no_less_than, option, options_of
from ...base.image_input import MediaLimits, size_option


@dataclass(frozen=True, slots=True)
class HandoverOptions:
    """Options for serving with another engine than llmopt's."""

    PANEL: ClassVar = "Another engine"

    engine: str = option(
        "llmopt",
        "llmopt, or vllm, sglang or trtllm: exec that server with these options.",
        common=True,
    )
    pipeline_parallel_size: int = option(1, "Other engines: pipeline-parallel size.")
    ray: bool = option(False, "vllm: distribute over a Ray cluster.")
    print_command: bool = option(False, "Other engines: print the command and exit.")


@dataclass(frozen=True, slots=True)
class ServedModelOptions:
    """The served name, chat template and parsers."""

    served_model_name: str | None = option(
        None, "Served model name. Default: the model's.", common=True
    )
    chat_template: str | None = option(
        None, "File with a Jinja chat template. Default: the model's."
    )
    tool_call_parser: str | None = option(
        None,
        "Tool-call parser, such as hermes, qwen3_coder or openai. Default: detected from the chat template.",
        common=True,
    )
    reasoning_parser: str | None = option(
        None,
        "Reasoning parser: think (or qwen3, deepseek_r1), mistral or seed_oss. Default: detected from the "
        "chat template.",
    )
    pooling_type: str | None = option(
        None,
        "Pooling of embeddings: last, mean, cls or max. Default: the checkpoint's, if it has one.",
    )

    def served_name(self, model: str) -> str:
        """The served name of `model`, a folder, a GGUF file or a name."""
        from ....quant.source.models import short_name

        path = expanded(model)
        return self.served_model_name or (short_name(path) if path.exists() else model)


@dataclass(frozen=True, slots=True)
class ServingOptions(ServedModelOptions):
    """Options of a served model, and the address of its server."""

    host: str = option("127.0.0.1", "Address to listen on.", common=True)
    port: int = option(8000, "Port to listen on; 0 picks a free one.", span=(0, 65535), common=True)
    as_json: bool = option(
        False, "When ready, print url, model and pid as one JSON line.", flag="--json", common=True
    )


LogFormat = Literal["text", "json"]
_FORMATS = get_args(LogFormat)


def _seconds(default: float, help: str, flag: str, least: int = 1) -> Any:
    return option(default, help, flag=flag, limit=no_less_than(least))


def _several(help: str, flag: str, word: Any = list[str], **details: Any) -> Any:
    return option((), help, flag=flag, word=word, parse=tuple, **details)


@dataclass(frozen=True, slots=True)
class ScriptedText:
    """The text of an output whose prompt has `after` in it, later than any other entry's."""

    after: str
    text: str


def read_script(path: Path | str) -> tuple[ScriptedText, ...]:
    """A script from a JSON file: a list of objects with `after` and `text`. Raises `BadInput`: no such file,
    or something else in it."""
    try:
        entries = json.loads(Path(path).read_text())
        return tuple(ScriptedText(str(entry["after"]), str(entry["text"])) for entry in entries)
    except OSError as error:
        raise BadInput(f"--scripted-output {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise BadInput(
            f"--scripted-output {path}: write a JSON list of objects with after and text"
        ) from error


def scripted_text(script: Sequence[ScriptedText], prompt: str) -> str | None:
    """The text for a prompt; None where no entry fits."""
    ranked = [(prompt.rfind(entry.after), entry) for entry in script]
    position, entry = max(ranked, key=lambda pair: pair[0], default=(-1, None))
    return entry.text if entry is not None and position >= 0 else None


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """Files of PEM, as vLLM's `--ssl-...` options name them. Raises `BadInput`: an unknown mode, or
    certificates of clients to check without their authorities."""

    PANEL: ClassVar = "TLS"

    certfile: Path = option(
        MISSING, "TLS certificate, PEM. Default: plain HTTP.", flag="--ssl-certfile"
    )
    keyfile: Path | None = option(
        None, "Its private key. Default: in the certificate.", flag="--ssl-keyfile"
    )
    ca_certs: Path | None = option(
        None, "Authorities of clients' certificates.", flag="--ssl-ca-certs"
    )
    cert_reqs: int = option(  # `ssl.VerifyMode`
        0,
        "Clients' certificates: 0 not asked for, 1 optional, 2 required.",
        flag="--ssl-cert-reqs",
        limit=lambda mode: None if mode in (0, 1, 2) else "0 (none), 1 (optional) or 2 (required)",
    )

    @classmethod
    def asked(cls, certfile: Path | None = None, **others: Any) -> TlsOptions | None:
        """The options of a command line; None for plain HTTP."""
        if certfile is not None:
            return cls(certfile, **others)
        for name, value in others.items():
            if value:
                flag = flag_of(name, options_of(cls)[name])
                raise BadInput(f"{flag} needs --ssl-certfile, the server's certificate")
        return None

    def __post_init__(self) -> None:
        check_limits(self, by_flag=True)
        if self.cert_reqs and self.ca_certs is None:
            raise BadInput(
                f"--ssl-cert-reqs {self.cert_reqs} needs --ssl-ca-certs, whose certificates to accept"
            )

    def for_uvicorn(self) -> dict[str, Any]:
        """Keyword arguments of `uvicorn.Config`."""
        return {
            "ssl_certfile": self.certfile,
            "ssl_keyfile": self.keyfile,
            "ssl_ca_certs": None if self.ca_certs is None else str(self.ca_certs),
            "ssl_cert_reqs": self.cert_reqs,
        }

    def check_files(self) -> None:
        """Load the files once, before the model. Raises `BadInput`: a file cannot be read or is not PEM, or
        the key is another certificate's."""
        for path in (self.certfile, self.keyfile, self.ca_certs):
            try:
                if path is not None:
                    path.open("rb").close()
            except OSError as error:
                raise BadInput(f"TLS: cannot read {path}: {error.strerror}") from error
        context, pair = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), f"{self.certfile}"
        if self.keyfile is not None:
            pair += f", --ssl-keyfile {self.keyfile}"
        try:
            # A password: without one OpenSSL would ask for it on the terminal.
            context.load_cert_chain(self.certfile, self.keyfile, password="")
        except (ssl.SSLError, ValueError) as error:
            is_pair = getattr(error, "reason", None) != "KEY_VALUES_MISMATCH"
            problem = "not a PEM certificate and a key without a password"
            problem = problem if is_pair else "the key is not the certificate's"
            raise BadInput(f"--ssl-certfile {pair}: {problem}") from error
        try:
            if self.ca_certs is not None:
                context.load_verify_locations(self.ca_certs)
        except ssl.SSLError as error:
            raise BadInput(f"--ssl-ca-certs {self.ca_certs}: not PEM certificates") from error


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of the HTTP server; those of the engine are in `EngineConfig`. Without keys there is no
    authentication, and all clients are one.

    Attributes:
        host_names: names that requests may ask for, None for any; addresses and `localhost` are always
            allowed. Guards against DNS rebinding, which CORS does not stop.
        header_timeout_seconds: time from the connection, or the first byte of the request.
        max_connections, max_waiting: limits beyond which a client gets 503 and 429.
        admin_api_key: another key, or one of `api_keys`; None makes each of `api_keys` an admin.

    Raises `BadInput`: a number out of range, a key or an origin of another form, or options that contradict.
    """

    PANEL: ClassVar = "Protection"

    api_keys: tuple[str, ...] = _several(
        "Required API key; repeatable. Default: none.",
        "--api-key",
        envvar="LLMOPT_API_KEY",
        common=True,
    )
    cors_origins: tuple[str, ...] = _several(
        "Allowed CORS origin, * for all; repeatable. Default: none.", "--cors-origin"
    )
    host_names: frozenset[str] | None = option(
        None,
        "Allowed Host name besides localhost, * for all; repeatable. Default beyond the loopback: the "
        "machine's own names, with an API key any.",
        flag="--allowed-host",
        word=list[str],
        parse=frozenset,
    )
    max_body_bytes: int = size_option("16MiB", "Maximum request body size.", "--max-body")
    max_header_bytes: int = size_option(
        "32KiB", "Maximum size of a request's URL and headers.", "--max-header"
    )
    header_timeout_seconds: float = _seconds(
        30.0, "Timeout for receiving the head of a request, in seconds.", "--header-timeout"
    )
    max_connections: int = option(1024, "Maximum open connections.", limit=no_less_than(1))
    body_timeout_seconds: float = _seconds(
        30.0, "Timeout for receiving a request, in seconds.", "--body-timeout"
    )
    send_timeout_seconds: float = _seconds(
        60.0, "Timeout for a client that stops reading, in seconds.", "--send-timeout"
    )
    max_waiting: int = option(
        4096, "Maximum waiting sequences in the engine's queue.", limit=no_less_than(0)
    )
    request_timeout_seconds: float = _seconds(
        3600.0, "Request timeout in seconds.", "--request-timeout"
    )
    step_timeout_seconds: float = _seconds(
        120.0, "Age of an engine step from which /health reports it, in seconds.", "--step-timeout"
    )
    max_step_seconds: float | None = option(
        None,
        "Seconds of a step that computes a part of a prompt beside sequences that decode. Default: 4 times "
        "the median decode step. A block is computed at least.",
        limit=lambda seconds: None if seconds > 0 else "more than 0",
    )
    shutdown_delay_seconds: float = _seconds(
        0.0,
        "Seconds after SIGTERM in which requests are still taken while /ready is 503.",
        "--shutdown-delay",
        least=0,
    )
    drain_seconds: float = option(
        5.0, "Seconds to drain requests in flight after Ctrl-C or SIGTERM.", limit=no_less_than(0)
    )
    admin_api_key: str | None = option(
        None,
        "API key that may load adapters and see metrics; others then may not.",
        envvar="LLMOPT_ADMIN_API_KEY",
    )
    allow_runtime_lora_updating: bool = option(
        False,
        "Load and unload LoRA adapters by request; see --max-loras.",
        envvar="LLMOPT_ALLOW_RUNTIME_LORA_UPDATING",
    )
    lora_folders: tuple[Path, ...] = _several(
        "Folder below which adapters may be loaded by request; repeatable.",
        "--allowed-lora-path",
        list[Path],
    )
    log_prompts: bool = option(False, "Write requests with their prompts into the log.")
    script: tuple[ScriptedText, ...] = option(
        (),
        "JSON list of {after, text}: a conversation whose prompt has 'after' in it gets 'text'. "
        "For tests of agents.",
        flag="--scripted-output",
        word=str,
        parse=read_script,
    )
    log_format: LogFormat = option(
        "text",
        "Log lines: text, or json, an object a line.",
        word=str,
        limit=lambda form: None if form in _FORMATS else f"choose {', '.join(_FORMATS)}",
    )
    tls: TlsOptions | None = option(None, "TLS.", config=TlsOptions)
    media: MediaLimits = option(MediaLimits(), "Images.", config=MediaLimits)

    def __post_init__(self) -> None:
        check_limits(self, by_flag=True)
        # A file's last line feed is no part of a key.
        object.__setattr__(self, "api_keys", tuple(key.rstrip("\r\n") for key in self.api_keys))
        admin = self.admin_api_key and self.admin_api_key.rstrip("\r\n")
        object.__setattr__(self, "admin_api_key", admin)
        for key in self.api_keys if admin is None else (*self.api_keys, admin):
            if not (key and key.isascii() and key.isprintable() and key == key.strip()):
                raise BadInput("an API key is empty or has characters that no header can carry")
        if admin is not None and not self.api_keys:
            raise BadInput("--admin-api-key: give --api-key too, for everybody else")
        if self.lora_folders and self.api_keys and admin is None:
            raise BadInput(
                "--allow-runtime-lora-updating with --api-key: --admin-api-key names the key that may"
            )
        for folder in self.lora_folders:
            if not folder.is_dir():
                raise BadInput(f"--allowed-lora-path {folder} is not a folder")
        for origin in self.cors_origins:
            scheme, separator, rest = origin.partition("://")
            if origin != "*" and (not separator or not scheme or not rest or "/" in rest):
                raise BadInput(
                    f"--cors-origin {origin!r}: give an origin such as https://example.org, or *"
                )

    def share_of_key(self, limit: int) -> int:
        """The part of a limit that one API key may take: half of it where there are several keys."""
        num_keys = len({*self.api_keys, self.admin_api_key} - {None})
        return limit if num_keys < 2 else max(1, limit // 2)

"""`llmopt bench` of a server behind a URL, and the client that drives it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """The server, and the client."""

    PANEL: ClassVar = "Server"

    serve: Annotated[
        str | None,
        typer.Option(
            help="Start a server of this kind with the model on a free port, measure it over HTTP, and stop "
            "it: vllm, llama.cpp, transformers, llmopt, or a command line with {port}, {model}, {name} in it."
        ),
    ] = None
    serve_args: Annotated[
        str | None,
        typer.Option(help='Additional arguments for that server, such as "--max-num-seqs 16".'),
    ] = None
    serve_program: Annotated[
        Path | None,
        typer.Option(
            help="The executable to start. Default: the server's, beside this Python or on the PATH."
        ),
    ] = None
    serve_timeout: Annotated[
        float, typer.Option(help="Start-up timeout of the server in seconds.")
    ] = 600.0
    base_url: Annotated[
        str | None,
        typer.Option(
            help="Measure the OpenAI-compatible server at this URL instead of a model here."
        ),
    ] = None
    backend: Annotated[
        str | None,
        typer.Option(
            help="openai (default): completions with prompts as token ids (vllm is the same); openai-chat: "
            "chats; transformers: completions as `transformers serve` takes them; openai-embeddings, "
            "vllm-rerank, vllm-pooling: one response each."
        ),
    ] = None
    endpoint: Annotated[
        str | None, typer.Option(help="Path of the endpoint. Default: the backend's.")
    ] = None
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Folder, bundled model or hub id whose tokenizer makes the prompts. Default: the model's."
        ),
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option(
            help="Sent as a bearer token. Default: OPENAI_API_KEY. Never written to a result."
        ),
    ] = None
    header: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for every request; repeatable.")
    ] = None
    extra_body: Annotated[
        str | None,
        typer.Option(
            help="JSON object with fields to add to every request; null leaves a field out."
        ),
    ] = None
    insecure: Annotated[bool, typer.Option("--insecure", help="Accept any TLS certificate.")] = (
        False
    )
    server_gpu: Annotated[
        str | None,
        typer.Option(
            help="The server's hardware, such as 8xH100, for comparisons. Default: what its metrics say."
        ),
    ] = None
    request_timeout: Annotated[
        float, typer.Option(help="Seconds after which a request counts as failed.")
    ] = 600.0
    client_workers: Annotated[
        int | None,
        typer.Option(
            help="Load-client processes. Default: one per 64 streams, at most half of the cores."
        ),
    ] = None
    check_client: Annotated[
        bool | None,
        typer.Option(
            "--check-client/--no-check-client",
            help="Before a run, certify the client: measure its error against a server of known latency "
            "(default). Without --base-url: print that error at 1, 16, 64 and 256 streams, and end.",
        ),
    ] = None
    client_burden_ms: Annotated[
        float,
        typer.Option(
            help="Starve the client by repeated busy waits of this many ms, to prove that such a "
            "run is not certified. The result records it."
        ),
    ] = 0.0

    @property
    def asks_for_the_client_alone(self) -> bool:
        """Whether only the client certification was requested."""
        return bool(self.check_client) and self.base_url is None and self.serve is None

    def added_fields(self) -> dict[str, object]:
        """The object in `--extra-body`.

        Raises:
            BadInput: not a JSON object.
        """
        from ...quant.base.errors import BadInput

        try:
            found = json.loads(self.extra_body or "{}")
        except ValueError as error:
            raise BadInput(f"--extra-body is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise BadInput("--extra-body is not a JSON object")
        return found

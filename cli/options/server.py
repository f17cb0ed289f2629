"""The options of `llmopt bench` that concern a server behind a URL and the client that drives it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SERVER = "Server"

BaseUrl = Annotated[
    str | None,
    typer.Option(
        help="Measure the OpenAI-compatible server at this URL instead of a model here.",
        rich_help_panel=SERVER,
    ),
]
Serve = Annotated[
    str | None,
    typer.Option(
        help="Start a server of this kind with the model on a free port, measure it over HTTP, and stop it: "
        "vllm, llama.cpp, transformers, llmopt.",
        rich_help_panel=SERVER,
    ),
]
ServeArgs = Annotated[
    str | None,
    typer.Option(
        help='More words for the command line of that server, such as "--max-num-seqs 16".',
        rich_help_panel=SERVER,
    ),
]
ServeProgram = Annotated[
    Path | None,
    typer.Option(
        help="The program to start. Default: the server's own name beside this Python or on the PATH.",
        rich_help_panel=SERVER,
    ),
]
ServeTimeout = Annotated[
    float,
    typer.Option(
        help="Seconds that the server may take to load the model.", rich_help_panel=SERVER
    ),
]
Backend = Annotated[
    str | None,
    typer.Option(
        help="openai (default): completions with prompts as token ids (vllm is the same); openai-chat: "
        "chats; transformers: completions as `transformers serve` takes them.",
        rich_help_panel=SERVER,
    ),
]
Endpoint = Annotated[
    str | None,
    typer.Option(help="Path of the endpoint. Default: the backend's.", rich_help_panel=SERVER),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        help="Folder, bundled model or hub id whose tokenizer makes the prompts. Default: the model's.",
        rich_help_panel=SERVER,
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        help="Sent as a bearer token. Default: OPENAI_API_KEY. Never written to a result.",
        rich_help_panel=SERVER,
    ),
]
Header = Annotated[
    list[str] | None,
    typer.Option(
        "--header", help="NAME=VALUE for every request; repeatable.", rich_help_panel=SERVER
    ),
]
ExtraBody = Annotated[
    str | None,
    typer.Option(
        help="JSON object with fields to add to every request; null leaves a field out.",
        rich_help_panel=SERVER,
    ),
]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", help="Accept any TLS certificate.", rich_help_panel=SERVER),
]
RequestTimeout = Annotated[
    float,
    typer.Option(help="Seconds after which a request counts as failed.", rich_help_panel=SERVER),
]
ClientWorkers = Annotated[
    int | None,
    typer.Option(
        help="Processes that send. Default: one for 64 streams, at most half of the cores.",
        rich_help_panel=SERVER,
    ),
]
CheckClient = Annotated[
    bool | None,
    typer.Option(
        "--check-client/--no-check-client",
        help="Before a run, measure the client's own error against a server of known latency "
        "(default). Without --base-url: print that error at 1, 16, 64 and 256 streams, and end.",
        rich_help_panel=SERVER,
    ),
]
ClientBurdenMs = Annotated[
    float,
    typer.Option(
        help="Starve the client by this many ms of busy waiting, again and again, to prove that such a "
        "run is not certified. The result records it.",
        rich_help_panel=SERVER,
    ),
]


def extra_body(text: str | None) -> dict[str, object]:
    """The object in `--extra-body`.

    Raises:
        BadInput: no JSON object.
    """
    import json

    from ...quant.base.errors import BadInput

    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise BadInput(f"--extra-body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise BadInput("--extra-body is not a JSON object")
    return found

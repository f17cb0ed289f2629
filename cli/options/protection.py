"""The options of `llmopt serve-local` that say who may ask for how much, and how the server ends."""

from __future__ import annotations

from typing import Annotated

import typer

PANEL = "Protection"

ApiKey = Annotated[
    list[str] | None,
    typer.Option(
        envvar="LLMOPT_API_KEY",
        help="Ask clients for this key; repeatable. Default: ask for none.",
        rich_help_panel=PANEL,
    ),
]
CorsOrigin = Annotated[
    list[str] | None,
    typer.Option(
        help="A web origin whose pages may call the server, * for all; repeatable. Default: none.",
        rich_help_panel=PANEL,
    ),
]
AllowedHost = Annotated[
    list[str] | None,
    typer.Option(
        help="A name by which clients may call a server of the loopback, beside localhost; repeatable.",
        rich_help_panel=PANEL,
    ),
]
MaxBody = Annotated[str, typer.Option(help="Size of a request's body.", rich_help_panel=PANEL)]
MaxHeader = Annotated[
    str, typer.Option(help="Size of a request's address and headers.", rich_help_panel=PANEL)
]
BodyTimeout = Annotated[
    float, typer.Option(help="Seconds in which a request must arrive.", rich_help_panel=PANEL)
]
MaxConcurrencyPerKey = Annotated[
    int | None,
    typer.Option(
        help="Requests of one key at once. Default: no limit. Without keys all clients share one.",
        rich_help_panel=PANEL,
    ),
]
MaxQueuePerKey = Annotated[
    int,
    typer.Option(help="Requests of one key that wait for their turn.", rich_help_panel=PANEL),
]
MaxWaiting = Annotated[
    int, typer.Option(help="Sequences that wait in the engine's queue.", rich_help_panel=PANEL)
]
RequestTimeout = Annotated[
    float, typer.Option(help="Seconds that an answer may take.", rich_help_panel=PANEL)
]
DrainSeconds = Annotated[
    float,
    typer.Option(
        help="How long requests in flight may go on after Ctrl-C or SIGTERM.", rich_help_panel=PANEL
    ),
]
LogPrompts = Annotated[
    bool,
    typer.Option(
        "--log-prompts",
        help="Write requests with their prompts into the log.",
        rich_help_panel=PANEL,
    ),
]

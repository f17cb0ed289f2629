"""Conversation options: multi-turn threads, think time, agentic sessions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer


@dataclass(frozen=True, slots=True)
class ConversationOptions:
    """How conversations are built, and when their turns are sent."""

    PANEL: ClassVar = "Conversations"

    multi_turn: Annotated[
        bool,
        typer.Option(
            "--multi-turn", help="Whole ShareGPT threads: one turn after another, with the history."
        ),
    ] = False
    multi_turn_min_turns: Annotated[
        int, typer.Option(help="Leave threads with fewer turns out.")
    ] = 2
    multi_turn_max_turns: Annotated[
        int | None, typer.Option(help="Cut threads after this turn.")
    ] = None
    multi_turn_history: Annotated[
        str, typer.Option(help="Answers in the history: the model's own, or the dataset's.")
    ] = "model"
    think_time: Annotated[
        str,
        typer.Option(
            help="Pause before each later turn: seconds, or exponential:MEAN, uniform:LOW:HIGH, "
            "normal:MEAN:STD, lognormal:MEAN:STD."
        ),
    ] = "0"
    agentic_num_turns: Annotated[
        int | None, typer.Option(help="Number of turns of an agentic session. Default: 8.")
    ] = None
    agentic_system_len: Annotated[
        int | None, typer.Option(help="Shared system prompt with tools. Default: 1024.")
    ] = None
    agentic_task_len: Annotated[
        int | None, typer.Option(help="Tokens of the first task. Default: 64.")
    ] = None
    agentic_tool_output_len: Annotated[
        int | None, typer.Option(help="Tokens of the first tool result. Default: 128.")
    ] = None
    agentic_tool_output_growth: Annotated[
        float | None, typer.Option(help="Growth of each next tool result. Default: 1.25.")
    ] = None
    agentic_output_len: Annotated[
        int | None, typer.Option(help="Tokens of each answer. Default: 48.")
    ] = None

"""Help screens: arguments and options by heading, whole at every width, and lines to copy.

Typer's own tables cut names and types in a narrow terminal, and read brackets in a help text as markup. A
command that has options which few people need (`rare`, see `cli/options/command.py`) shows them with
`--help-all`. Lines to copy stand in `QUESTIONS` and `EXAMPLES`; a test compares them with the options.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from inspect import cleandoc
from itertools import takewhile
from textwrap import fill
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from ..options.command import SHOW_ALL

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
MOST_LABEL = 26
"""Columns of the names; the help of a longer one begins below it."""

Rows = list[tuple[str, str]]


class HelpCommand(TyperCommand):
    """A command with our help screen; where `--help` leaves nothing out, `--help-all` is the same."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        write_screen(self, ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = [*takewhile("--".__ne__, args)]
        if not any(parameter.name == "help_all" for parameter in self.params):
            own = ["--help" if word == "--help-all" else word for word in own]
        return super().parse_args(ctx, own + args[len(own) :])

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # Typer exits silently
            raise typer.Abort from None


class HelpGroup(TyperGroup):
    """A command of sub-commands, with our help screen, which `--help-all` shows too."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        write_screen(self, ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, ["--help"] if args[:1] == ["--help-all"] else args)


class App(typer.Typer):
    """A Typer app with our help screens."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            cls=HelpGroup, pretty_exceptions_enable=False, context_settings=_CONTEXT, **options
        )

    def command(self, name: str | None = None, **options: Any) -> Any:
        return super().command(name, cls=HelpCommand, **options)


def write_screen(command: Any, context: Any, formatter: Any) -> None:
    """Usage, purpose, options, sub-commands and examples of a command."""
    command.format_usage(context, formatter)
    _write_text(formatter, command.help)
    _, _, name = context.command_path.partition("llmopt ")
    name = name or context.command_path
    if questions := QUESTIONS.get(name):
        lines = (
            f"{question}\n      {_styled(line, fg='cyan')}" for question, line in questions.items()
        )
        _write_heading(formatter, "Questions", lines)
    rare = () if context.meta.get(SHOW_ALL) else getattr(command.callback, "rare", ())
    panels: dict[str, Rows] = {}
    left_out: Counter[str] = Counter()
    if commands := getattr(command, "commands", {}):
        panels["Commands"] = [(inner, other.help or "") for inner, other in commands.items()]
    for parameter in command.get_params(context):
        row = parameter.get_help_record(context)
        if row is None:
            continue
        kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
        usual = "Help" if parameter.name in ("help", "help_all") else kind
        heading = getattr(parameter, "rich_help_panel", None) or usual
        if parameter.name in rare:
            left_out[heading] += 1
        else:
            panels.setdefault(heading, []).append(row)
    for heading, rows in [*panels.items(), *CHOICES.get(name, {}).items()]:
        column = max(
            (len(label) for label, _ in rows if len(label) <= MOST_LABEL), default=MOST_LABEL
        )
        _write_heading(formatter, heading, (_row(*row, column, formatter.width) for row in rows))
    if left_out:
        counts = (f"{heading} ({count})" for heading, count in left_out.items())
        more = f"{left_out.total()} more options, which --help-all shows: {', '.join(counts)}"
        _write_text(formatter, more)
    if lines := EXAMPLES.get(name):
        _write_heading(formatter, "Examples", lines)
    _write_text(formatter, command.epilog)


def _row(label: str, text: str, column: int, width: int) -> str:
    """An option's name and help in two columns, or the help below a long name."""
    help = _wrapped(text, width, column + 4)
    if len(label) <= column:
        return f"{_styled(label, fg='cyan')}{help[len(label) + 2 :]}".rstrip()
    return f"{_styled(_wrapped(label, width, 2).lstrip(), fg='cyan')}\n{help}".rstrip()


def _wrapped(text: str, width: int, indent: int) -> str:
    """Indented lines of whole words: a name with hyphens and a value stay in one piece."""
    how: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return fill(text, width, initial_indent=" " * indent, subsequent_indent=" " * indent, **how)


def _write_text(formatter: Any, text: str | None) -> None:
    if text:
        formatter.write(f"\n{_wrapped(cleandoc(text), formatter.width, 2)}\n")


def _write_heading(formatter: Any, heading: str, items: Iterable[str]) -> None:
    formatter.write(f"\n{_styled(heading, bold=True)}\n")
    for item in items:
        formatter.write(f"  {item}\n")


def _styled(text: str, **style: Any) -> str:
    has_colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return typer.style(text, **style) if has_colour else text


QUESTIONS: Mapping[str, Mapping[str, str]] = {
    "llmopt": {
        "Which format for my card?": "llmopt best ./my-model --gpu l40s --loads-in vllm --dry-run",
        "Does it fit?": "llmopt kv-plan llama-70b --gpu h100 --ctx 32k --concurrency 16",
        "Is it slower than last week?": "llmopt compare runs/LAST_WEEK runs/TODAY",
        "Will this checkpoint load?": "llmopt check ./my-checkpoint --gpu rtx-5090",
        "Is this server sane?": "llmopt bench --base-url localhost:8000",
    },
}
"""{command: {question: the line that answers it}}."""

CHOICES: Mapping[str, Mapping[str, Rows]] = {
    "quantize": {
        "Methods": [
            ("awq", "integers for vLLM, transformers and llmopt: the default"),
            ("gptq", "the same in about half the time, at more error"),
            ("rtn", "rounded to nearest, in seconds with --no-errors; no data"),
            ("hqq", "integers fitted to the weights alone, without data"),
            ("autoround", "integers, tuned by the output of each layer"),
            ("Q4_K_M", "a file for llama.cpp; any GGUF type is a method"),
            ("auto", "a given size: the best width for each linear"),
            ("trellis", "least error at 2 to 4 bits, for ExLlamaV3"),
            ("quip", "2 to 4 bits in lattice codes, for llmopt"),
            ("fp8", "8-bit floats, for GPUs that multiply them"),
            ("smoothquant", "8-bit integers, weights and activations"),
            ("int8", "8-bit weights; for bitsandbytes by --outlier-threshold 6"),
            ("nvfp4, mxfp4", "4-bit floats, for vLLM on GPUs"),
            ("nf4, fp4", "4 bits for bitsandbytes, without data"),
            ("squeezellm", "a table for each channel; only llmopt loads it"),
        ]
    }
}
"""{command: {heading: values of an option, and when to take each}}."""

EXAMPLES: Mapping[str, Sequence[str]] = {
    "quantize": (
        "llmopt quantize --method awq",
        "llmopt quantize ./my-model --method gptq --bits 4 --group-size 128 -o out",
        "llmopt quantize ./my-model --method rtn --format gguf --gguf-type Q4_K_M",
    ),
    "best": (
        "llmopt best --max-kl 0.05",
        "llmopt best ./my-model --size 6GiB --loads-in llama.cpp",
        "llmopt best ./my-model --gpu h100 --ctx 32k --slo tpot:20 --loads-in vllm",
    ),
    "verify": ("llmopt verify stories3M-awq-4bit", "llmopt verify model.Q4_K_M.gguf --json"),
    "check": (
        "llmopt check ./my-checkpoint",
        "llmopt check ./my-checkpoint --engine vllm --gpu l40s --tp 2",
    ),
    "convert": (
        "llmopt convert stories3M-awq-4bit --format gptq -o out",
        "llmopt convert model.gguf --format compressed-tensors",
    ),
    "merge": (
        "llmopt merge ./my-model ./my-adapter -o merged",
        "llmopt merge ./my-model ./first ./second --weights 0.7,0.3",
    ),
    "bench": (
        "llmopt bench --dataset sharegpt",
        "llmopt bench ./quantized --reference ./my-model --gate 'kl<=0.02'",
        "llmopt bench ./my-model --serve vllm --max-concurrency 32",
    ),
    "freeze": (
        "llmopt freeze ./my-model --num-prompts 256 -o workload.jsonl",
        "llmopt freeze --dataset azure --trace-speed 5 -o azure.jsonl",
    ),
    "compare": (
        "llmopt compare runs/BASE runs/NEW --threshold 5% --max-kl 0.02",
        "llmopt compare --run base=v1/.venv --run new=v2/.venv --max-minutes 8",
    ),
    "serve-local": (
        "llmopt serve-local",
        "llmopt serve-local ./my-model --port 9000 --max-model-len 8192",
        "llmopt serve-local ./my-model --lora sql=adapters/sql --api-key SECRET",
    ),
    "batch": (
        "llmopt batch requests.jsonl",
        "llmopt batch requests.jsonl -o answers.jsonl --model ./my-model",
    ),
    "kv-plan": (
        "llmopt kv-plan llama-70b --ctx 128k",
        "llmopt kv-plan qwen3-32b --gpu all --slo 'ttft:1s tpot:20ms'",
        "llmopt kv-plan ./my-model --weights int4 --gpu l40s --concurrency 32",
    ),
    "deploy": (
        "llmopt deploy meta-llama/Llama-3.1-8B-Instruct --like llama-3.1-8b",
        "llmopt deploy /models/mine --like llama-70b --ctx 32k --gpu h100 -o deploy",
    ),
    "report": (
        "llmopt report runs/A runs/B",
        "llmopt report runs/A runs/B runs/C -o page.html --markdown page.md",
        "llmopt report runs/*-nightly --otava nightly.csv",
    ),
    "run": (
        "llmopt run quickstart",
        "llmopt run method-shootout --dry-run",
        "llmopt run my-recipe.yaml -o runs/mine",
    ),
    "doctor": ("llmopt doctor", "llmopt doctor --all", "llmopt doctor --gpu -o gpu.json"),
}
"""{command: its lines}, the shortest first."""

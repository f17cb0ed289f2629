"""Help screens: arguments and options by heading, whole at every width, and lines to copy.

Typer's own tables cut names and types in a narrow terminal, and read brackets in a help text as markup. A
command that has options which few people need (`rare`, see `cli/options/command.py`) shows them with
`--help-all`. Each command's lines to copy stand in `EXAMPLES`; a test compares them with its options.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from inspect import cleandoc
from itertools import takewhile
from textwrap import wrap
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
    formatter.write("\n")
    _write_lines(formatter, _wrapped(cleandoc(command.help or ""), formatter.width - 2))
    rare = () if context.meta.get(SHOW_ALL) else getattr(command.callback, "rare", ())
    panels: dict[str, Rows] = {}
    left_out: Counter[str] = Counter()
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
    for heading, rows in panels.items():
        _write_section(formatter, heading, rows)
    if commands := getattr(command, "commands", {}):
        rows = [(name, cleandoc(inner.help or "")) for name, inner in commands.items()]
        _write_section(formatter, "Commands", rows)
    if left_out:
        counts = (f"{heading} ({count})" for heading, count in left_out.items())
        more = f"{left_out.total()} more options, which --help-all shows: {', '.join(counts)}"
        formatter.write("\n")
        _write_lines(formatter, _wrapped(more, formatter.width - 2))
    _, _, name = context.command_path.partition("llmopt ")
    if lines := EXAMPLES.get(name or context.command_path):
        formatter.write(f"\n{_styled('Examples', bold=True)}\n")
        _write_lines(formatter, lines)
    if command.epilog:
        formatter.write("\n")
        _write_lines(formatter, _wrapped(command.epilog, formatter.width - 2))


def _write_section(formatter: Any, heading: str, rows: Rows) -> None:
    """The rows below their heading: name and help in two columns, or the help below a long name."""
    formatter.write(f"\n{_styled(heading, bold=True)}\n")
    column = max((len(label) for label, _ in rows if len(label) <= MOST_LABEL), default=MOST_LABEL)
    for label, text in rows:
        lines = _wrapped(text, formatter.width - column - 4)
        names = _wrapped(label, formatter.width - 2)
        if len(label) <= column:
            first = " " * (column - len(label)) + "  " + (lines.pop(0) if lines else "")
            formatter.write(f"  {_styled(label, fg='cyan')}{first}".rstrip() + "\n")
        else:
            _write_lines(formatter, (_styled(name, fg="cyan") for name in names))
        _write_lines(formatter, lines, indent=column + 4)


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of whole words: a name with hyphens and a value stay in one piece."""
    return wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _write_lines(formatter: Any, lines: Iterable[str], indent: int = 2) -> None:
    for line in lines:
        formatter.write(f"{'':{indent}}{line}\n")


def _styled(text: str, **style: Any) -> str:
    """The text in colour, on a terminal that has some."""
    has_colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return typer.style(text, **style) if has_colour else text


EXAMPLES: Mapping[str, Sequence[str]] = {
    "llmopt": (
        "llmopt quantize --method awq",
        "llmopt bench --dataset sharegpt",
        "llmopt kv-plan --model llama-70b --ctx 128k",
        "llmopt serve-local",
    ),
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
"""{command: its lines}, the shortest first; `llmopt` itself by its name."""

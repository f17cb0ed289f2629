"""The entry point: the commands, and the one place where an error becomes a line and an exit code."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module

import typer

COMMANDS = {
    "quantize": "Quantize a model's weights; an interrupted run goes on where it stopped.",
    "verify": "Re-read a quantized checkpoint with an independent reader; exit 1 if it is not what was "
    "computed.",
    "convert": "Write a quantized checkpoint in another format, with the same numbers wherever the grids "
    "allow it.",
    "bench": "Measure a model: latency, throughput, quality and memory, in a folder under runs/.",
    "freeze": "Write a workload with its token ids, lengths, arrival times and hash.",
    "compare": "Judge a run against another: exit 0 pass, 1 regression, 3 no verdict.",
    "serve-local": "Serve a model with OpenAI's completions and chat endpoints, until Ctrl-C.",
    "kv-plan": "Plan memory, speed and price of serving a model, from its config alone. No GPU and no "
    "network.",
    "deploy": "Write Kubernetes manifests and a compose file for a server that a plan is made for.",
    "report": "Join runs into one page: speed, quality and size beside each other, and the Pareto front.",
    "run": "Carry out a recipe: bench, quantize, verify, bench again, compare, report.",
    "doctor": "Show what this machine has, which kernel serves each operation on it, and whether the "
    "kernels are right.",
}
"""What the commands do. Each is the function of its name, in the module of its name."""


def application(*names: str) -> typer.Typer:
    """The command line with these commands, by default with all."""
    app = _empty()
    for name in names or COMMANDS:
        word = name.replace("-", "_")
        command: Callable[..., None] = getattr(import_module(f".{word}", __package__), word)
        app.command(name)(_interruptible(command))
    return app


def summaries() -> typer.Typer:
    """The command line as its help screen shows it, with no command imported."""
    app = _empty()
    for name, summary in COMMANDS.items():
        app.command(name, help=summary)(lambda: None)
    return app


def _empty() -> typer.Typer:
    app = typer.Typer(
        name="llmopt",
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    # With a callback one command is still a command by its name.
    app.callback(
        help="Quantize a language model, prove the checkpoint, serve it and benchmark it, on one machine.",
        epilog="Exit codes: 0 done or pass, 1 regression or failed verification, 2 bad input, "
        "3 no verdict. Every command takes --debug, which shows the traceback of an error.",
    )(lambda: None)
    return app


def _interruptible(command: Callable[..., None]) -> Callable[..., None]:
    """Say that Ctrl-C was heard; typer alone would end without a word."""

    @wraps(command)
    def call(*arguments: object, **options: object) -> None:
        try:
            command(*arguments, **options)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(130) from None

    return call


def main(argv: list[str] | None = None) -> None:
    """Run the command line; never returns."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments or bool(os.environ.get("LLMOPT_DEBUG"))
    arguments = [word for word in arguments if word != "--debug"]
    # `bench` takes a model, so it cannot have sub-commands; a model of that name is `./freeze`.
    if arguments[:2] == ["bench", "freeze"]:
        arguments = arguments[1:]
    arguments = arguments or ["--help"]
    first = arguments[0]
    if first in ("-h", "--help"):
        app = summaries()
    else:
        app = application(first) if first in COMMANDS else application()
    sys.exit(
        run_guarded(lambda: app(arguments, prog_name="llmopt", standalone_mode=False), debug=debug)
    )


def run_guarded(call: Callable[[], object], *, debug: bool) -> int:
    """Run `call`; turn what it raises into a line on stderr and an exit code."""
    from ..quant.base.errors import BadInput, Failure

    try:
        code = call()
    except (KeyboardInterrupt, typer.Abort):  # outside a command
        print("interrupted", file=sys.stderr)
        return 130
    except BadInput as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Failure as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 3
    except BrokenPipeError:
        # Whoever read our output has gone; there is nobody left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if debug or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise
        where = f" {error.filename}" if error.filename else ""
        print(f"error: cannot write{where}: {error.strerror}", file=sys.stderr)
        return 2
    except Exception as error:
        if debug or (complaint := _usage_complaint(error)) is None:
            raise
        print(f"error: {complaint}", file=sys.stderr)
        return 2
    return code if isinstance(code, int) else 0


def _usage_complaint(error: Exception) -> str | None:
    """What is wrong with the command line, if that is what `error` says.

    typer carries a copy of click of its own, whose exceptions have no public name; what they all have
    is `format_message` and the context of the command.
    """
    format_message = getattr(error, "format_message", None)
    if format_message is None:
        return None
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "llmopt"
    return f"{format_message().rstrip('.')}: see {command} --help"


if __name__ == "__main__":
    main()

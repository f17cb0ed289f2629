"""The entry point: the commands, and the one place where an error becomes a line and an exit code."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module

import typer

app = typer.Typer(
    name="llmopt",
    help="Quantize a language model, prove the checkpoint, serve it and benchmark it, on one machine.",
    epilog="Exit codes: 0 done or pass, 1 regression or failed verification, 2 bad input, "
    "3 no verdict. Every command takes --debug, which shows the traceback of an error.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

COMMANDS = {
    "quantize": "quantize",
    "verify": "verify",
    "convert": "convert",
    "bench": "bench",
    "freeze": "freeze",
    "compare": "compare",
    "serve-local": "serve_local",
    "kv-plan": "kv_plan",
    "deploy": "deploy",
    "report": "report",
    "run": "run",
    "doctor": "doctor",
}


def _register() -> None:
    for name, function in COMMANDS.items():
        module = import_module(f".{function}", __package__)
        command: Callable[..., None] = getattr(module, function)
        app.command(name)(_interruptible(command))


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
    _register()
    arguments = arguments or ["--help"]
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

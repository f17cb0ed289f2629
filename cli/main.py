"""The entry point: command dispatch, and mapping of exceptions to messages and exit codes."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Annotated

import typer

from ..base.errors import BadInput, Failure
from .output.help_screen import App
from .output.screen import check_shown, install

COMMANDS = {
    "doctor": "Show this machine's hardware, what is wrong and what to do about it; with --all also the "
    "kernel selected for each operation.",
    "kv-plan": "Plan memory, speed and price of serving a model, from its config alone. No GPU and no "
    "network.",
    "best": "Find the checkpoint for a model, hardware and promises, proven; an interrupted run is resumed.",
    "quantize": "Quantize a model's weights; an interrupted run is resumed.",
    "verify": "Re-read a quantized checkpoint with an independent reader; exit 1 if it is not what was "
    "computed.",
    "check": "Say which engines load a checkpoint, with which kernels; exit 1 if none does.",
    "convert": "Convert a quantized checkpoint to another format, or to plain weights.",
    "merge": "Fold LoRA and DoRA adapters into the weights of a checkpoint.",
    "serve-local": "Serve a model with OpenAI's completions and chat endpoints, until Ctrl-C.",
    "batch": "Answer an OpenAI batch file with the engine in this process; an interrupted run is resumed.",
    "bench": "Measure a model: latency, throughput, quality and memory, in a folder under runs/.",
    "compare": "Compare two runs, or paired starts of two builds: exit 0 pass, 1 regression, 3 no verdict.",
    "report": "Combine runs into one page: speed, quality and size side by side, and the Pareto front.",
    "freeze": "Write a workload with its token ids, lengths, arrival times and hash.",
    "run": "Run a recipe: bench, quantize, verify, bench again, compare, report.",
    "deploy": "Write manifests, a compose file, alert rules and Dockerfiles, as planned.",
}
"""Help summaries in the order of the workflow. Each command is a function in the module of its name."""


def application(*names: str) -> typer.Typer:
    """The Typer app with the given commands, by default all."""
    app = _empty()
    for name in names or COMMANDS:
        module = name.replace("-", "_")
        app.command(name)(getattr(import_module(f".{module}", __package__), module))
    return app


def summaries() -> typer.Typer:
    """The Typer app for the top-level help screen, without importing the commands."""
    app = _empty()
    for name, summary in COMMANDS.items():
        app.command(name, help=summary)(lambda: None)
    return app


def _empty() -> typer.Typer:
    app = App(name="llmopt")
    # With a callback, Typer keeps the command name even if there is only one command.
    app.callback(
        help="Quantize a language model, prove the checkpoint, serve it and benchmark it, on one machine.",
        epilog="Exit codes: 0 done or pass, 1 regression or failed verification, 2 bad input, "
        "3 no verdict. Every command takes --debug, which shows the traceback of an error and "
        "lines of libraries.",
    )(_root)
    return app


def _show_version(is_given: bool) -> None:
    if is_given:
        from ..base.version import VERSION

        print(f"llmopt {VERSION}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Options before the command; each is handled by its callback."""


def main(argv: list[str] | None = None) -> None:
    """Run the command line; never returns."""
    install()
    given = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in given or bool(os.environ.get("LLMOPT_DEBUG"))
    if debug:
        logging.basicConfig(format="%(name)s: %(message)s")
        logging.getLogger("llmopt").setLevel(logging.DEBUG)
    arguments = [word for word in given if word != "--debug"]
    # `bench` takes a model, so it cannot have sub-commands; a model of that name is `./freeze`.
    if arguments[:2] == ["bench", "freeze"]:
        arguments = arguments[1:]
    arguments = arguments or ["--help"]
    import_module("..engine", __package__)  # before torch: it bounds how long OpenMP's threads spin
    # A shell that asks for completions hands the line over in the environment: bash's name, and Typer's.
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")
    is_completing = "_LLMOPT_COMPLETE" in os.environ
    first = [*line.split(), "", ""][1] if is_completing else arguments[0]
    # Of llmopt itself, or of no command: none is imported.
    app = application(first) if first in COMMANDS else summaries()
    # The context's object: the words for a process that does the same.
    how = {"prog_name": "llmopt", "standalone_mode": False, "obj": given}
    sys.exit(check_shown(run_guarded(lambda: app(arguments, **how), debug=debug)))


_ELSEWHERE = {
    "bench --num-passes": "a pass is a run here: --num-runs",
    "best --method": "it compares the methods itself; --format and --candidates narrow it",
    "check --loads-in": "give --engine",
    "quantize --max-kl": "llmopt best --max-kl searches for it, llmopt bench --gate checks it",
}
"""Options that people look for in a command that has them under another name, or not."""
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENAMETOOLONG)


def run_guarded(call: Callable[[], object], *, debug: bool) -> int:
    """Run `call`; map exceptions to a line on stderr and an exit code."""
    try:
        code = call()
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return 130
    except (BadInput, Failure) as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, BadInput) else 3
    except OSError as error:
        if debug or error.errno not in _UNWRITABLE:
            raise
        path = f" {error.filename}" if error.filename else ""
        verb = "open" if error.errno == errno.ENAMETOOLONG else "write"
        print(f"error: cannot {verb}{path}: {error.strerror}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        package = (error.name or "llmopt").partition(".")[0]
        if debug or package == "llmopt":  # a module of its own is a fault of llmopt
            raise
        print(f"error: {package} is not installed: pip install {package}", file=sys.stderr)
        return 2
    except Exception as error:
        # A usage error. Typer vendors click, whose exceptions have no public name there.
        format_message = getattr(error, "format_message", None)
        if debug or format_message is None:
            raise
        context = getattr(error, "ctx", None)
        command = "llmopt" if context is None else context.command_path
        message = format_message().rstrip(".").replace("Value error, ", "")
        hint = _ELSEWHERE.get(f"{command.partition(' ')[2]} {getattr(error, 'option_name', '')}")
        if hint is not None:
            message = f"{message.partition(' (')[0]}: {hint}"
        divider = "" if message.endswith("?") else ":"  # after a near name
        print(f"error: {message}{divider} see {command} --help", file=sys.stderr)
        return 2
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    main()

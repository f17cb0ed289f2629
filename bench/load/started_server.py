"""Lifecycle of a server started for one benchmark: start, readiness, shutdown."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from ...quant.base.atomic_io import end_with_parent, expanded, interrupts_held
from ...quant.base.errors import BadInput
from ...quant.base.processor import without_openmp_spins
from ...quant.base.progress import Progress, Silent
from ...quant.model.checkpoint import gguf_file_of, read_json
from ...quant.models import bundled_models, resolve_model
from ...recipes import DEFAULT_MODEL
from ..machine.environment import without_secrets
from ..options.options import BenchOptions
from .presets import HOST, Preset, preset

READY_PATH = "/health"
POLL_SECONDS = 0.1
ANSWER_SECONDS = 5.0
STOP_SECONDS = 10.0
VERSION_SECONDS = 120.0
LOG_LINES = 12


@contextmanager
def served(options: BenchOptions, progress: Progress | None = None) -> Iterator[BenchOptions]:
    """Start the server of `options.serve` and yield the options that measure it; without `serve`, the options
    unchanged. Leaving always stops the server.

    Raises:
        BadInput: an unknown or missing program, an unsupported model, malformed arguments, or a server that
            exited or was not ready in time; with the end of its log.
    """
    if options.serve is None:
        for name in ("serve_args", "serve_program"):
            if getattr(options, name):
                raise BadInput(f"--{name.replace('_', '-')} needs --serve")
        yield options
        return
    if options.base_url is not None:
        raise BadInput("--serve and --base-url were given: a run has one server, give one")
    chosen = preset(options.serve)
    program = chosen.find(options.serve, options.serve_program)
    model, tokenizer = _model(options, chosen)
    name = Path(model).name
    port = _free_port()
    command = [program, *server_arguments(options, chosen, model, port)]
    progress = progress or Silent()
    found_version = version_of([program, *chosen.version]) if chosen.version else None
    progress.note(f"starting {shlex.join(without_secrets(command))}")
    with tempfile.TemporaryFile() as log:
        # A new session: Ctrl-C reaches only the benchmark, which then stops the server.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=without_openmp_spins(os.environ),
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        try:
            began = time.perf_counter()
            url = f"http://{HOST}:{port}"
            _wait_until_ready(process, url, options, log)
            seconds = time.perf_counter() - began
            progress.note(f"{_label(options)} is ready after {seconds:.1f} s at {url}")
            known = {
                "preset": options.serve,
                "command": without_secrets(command),
                "version": found_version,
                "seconds_to_ready": seconds,
                "pid": process.pid,
            }
            yield options.model_copy(
                update={
                    "serve": None,
                    "serve_args": None,
                    "serve_program": None,
                    "base_url": url,
                    "backend": _backend(options, chosen),
                    "model": _served_name(chosen, model, name),
                    "tokenizer": tokenizer,
                    "max_model_len": options.max_model_len or _context(model, chosen),
                    "name": options.name or options.label or f"{_label(options)}-{name}",
                    "started_server": known,
                }
            )
        finally:
            with interrupts_held():
                stop(process)


def server_arguments(options: BenchOptions, chosen: Preset, model: str, port: int) -> list[str]:
    """A server's command line after its program.

    Raises:
        BadInput: malformed `--serve-args`.
    """
    words = chosen.arguments(model, Path(model).name, port)
    if options.loras:
        if chosen.adapters is None:
            raise BadInput(f"--lora: --serve {options.serve} takes no adapters at its start")
        words += chosen.adapters({name: path.resolve() for name, path in options.loras.items()})
    return [*words, *_words(options.serve_args)]


def dry_command(options: BenchOptions, port: int) -> list[str]:
    """The command that `served` would start, the program as it is called where it is not installed.

    Raises:
        BadInput: an unknown server, an unsupported model or malformed arguments.
    """
    assert options.serve is not None
    chosen = preset(options.serve)
    model, _ = _model(options, chosen)
    program = str(options.serve_program or chosen.program or sys.executable)
    return without_secrets([program, *server_arguments(options, chosen, model, port)])


def _served_name(chosen: Preset, model: str, name: str) -> str | None:
    """The name in requests; None: the running server says it."""
    if chosen.has_no_name:
        return None
    return model if chosen.is_served_by_path else name


def _label(options: BenchOptions) -> str:
    """The server's kind in a run's name."""
    words = (options.serve or "").split()
    return Path(words[0]).name if words else ""


def _backend(options: BenchOptions, chosen: Preset) -> str:
    return options.backend if "backend" in options.model_fields_set else chosen.backend


def _model(options: BenchOptions, chosen: Preset) -> tuple[str, str]:
    """(the model for the server's command line, location of its tokenizer)."""
    name = options.model or DEFAULT_MODEL
    path = expanded(name)
    if path.is_file() and gguf_file_of(path) is not None:
        name = str(path.absolute())  # a link keeps its name; the server knows what it reads
    elif chosen.needs_gguf:
        raise BadInput(f"--serve {options.serve}: give a .gguf file as the model, not {name!r}")
    elif name in bundled_models() or path.exists():
        name = str(resolve_model(name).resolve())
    return name, options.tokenizer or name


def _context(model: str, chosen: Preset) -> int | None:
    """The context length by the model's config, for a server whose model list lacks it."""
    config = Path(model) / "config.json"
    if not chosen.is_served_by_path or not config.is_file():
        return None
    length = read_json(config).get("max_position_embeddings")
    return length if isinstance(length, int) else None


def _words(text: str | None) -> list[str]:
    try:
        return shlex.split(text or "")
    except ValueError as error:
        raise BadInput(f"--serve-args {text!r}: {error}") from error


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return listener.getsockname()[1]


def version_of(command: list[str]) -> str | None:
    """The last line with a digit of a program's version output; None if there is none."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=VERSION_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = [line.strip() for line in (done.stderr + "\n" + done.stdout).splitlines()]
    said = [line for line in lines if any(letter.isdigit() for letter in line)]
    return said[-1][:200] if said and done.returncode == 0 else None


def _wait_until_ready(
    process: subprocess.Popen[bytes], url: str, options: BenchOptions, log: IO[bytes]
) -> None:
    deadline = time.perf_counter() + options.serve_timeout
    while not is_ready(url):
        if (code := process.poll()) is not None:
            raise BadInput(
                f"--serve {options.serve}: the server ended with code {code} before it was ready; "
                f"{last_words(log)}"
            )
        if time.perf_counter() > deadline:
            raise BadInput(
                f"--serve {options.serve}: not ready after {options.serve_timeout:g} s (--serve-timeout); "
                f"{last_words(log)}"
            )
        time.sleep(POLL_SECONDS)


def is_ready(url: str) -> bool:
    """Whether the server at `url` answers its health check."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url + READY_PATH, timeout=ANSWER_SECONDS) as answer:
            return answer.status == 200
    except (OSError, ValueError):
        return False


def last_words(log: IO[bytes]) -> str:
    """The end of a server's log, in one line."""
    size = os.fstat(log.fileno()).st_size
    data = os.pread(log.fileno(), 8192, max(0, size - 8192))
    lines = [line.strip() for line in data.decode("utf-8", "replace").splitlines()]
    said = [line for line in lines if line][-LOG_LINES:]
    return f"end of its log: {' | '.join(said)}" if said else "its log is empty"


def stop(process: subprocess.Popen[Any]) -> None:
    """Stop a server's process group, with increasingly strong signals."""
    for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            break
        _signal_all(process.pid, sent)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    # Surviving workers would keep the port and the memory.
    _signal_all(process.pid, signal.SIGKILL)


def _signal_all(group: int, sent: signal.Signals) -> None:
    try:
        os.killpg(group, sent)
    except (ProcessLookupError, PermissionError):
        return

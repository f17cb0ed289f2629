"""Servers started for one benchmark: presets of llmopt, vLLM, SGLang, TensorRT-LLM, llama.cpp and
transformers (command line, request format), start, readiness and shutdown."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ...base.atomic_io import end_with_parent, expanded, interrupts_held
from ...base.errors import BadInput
from ...base.processor import without_openmp_spins
from ...base.progress import Progress, Silent
from ...engine.deploy.engine_commands import SGLANG, TRTLLM, VLLM, find_program
from ...quant.model.checkpoint import gguf_file_of, read_json
from ...quant.source.models import bundled_models, refuse_mock, resolve_model
from ...recipes import DEFAULT_MODEL
from ..machine.environment import without_secrets
from ..options.options import BenchOptions
from .json_http import JsonClient, RequestFailed

HOST = "127.0.0.1"
MODEL, NAME, PORT = "{model}", "{name}", "{port}"
"""Placeholders in the words of a command line."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A server that a benchmark can start.

    Attributes:
        program: the executable, looked up beside this Python or on the PATH; None is this Python.
        templates: the arguments, with placeholders for the model, its served name, the host and the port.
        backend: the request format (`client.address.BACKENDS`).
        is_served_by_path: requests name the model by its path; the served name cannot be chosen.
        needs_gguf: True if the server only loads GGUF files.
        has_no_name: the name of its model is only known from the running server.
        adapters: {name: folder} of LoRA adapters to command-line arguments; None: it loads none at its start.
    """

    program: str | None
    templates: tuple[str, ...]
    version: tuple[str, ...]
    install: str
    backend: str = "openai"
    is_served_by_path: bool = False
    needs_gguf: bool = False
    has_no_name: bool = False
    adapters: Callable[[Mapping[str, Path]], list[str]] | None = None

    def find(self, name: str, given: Path | None) -> str:
        """The program's path; BadInput: it is not installed."""
        if given is not None:
            if path := shutil.which(str(expanded(given))):
                return path
            raise BadInput(f"--serve-program {given} is no program that can be run")
        if self.program is None:
            return sys.executable
        if path := find_program(self.program):
            return path
        raise BadInput(
            f"--serve {name}: there is no program {self.program!r} here: {self.install}, or name it with "
            "--serve-program"
        )

    def arguments(self, model: str, name: str, port: int) -> list[str]:
        places = {MODEL: model, NAME: name, "{host}": HOST, PORT: str(port)}
        filled = list(self.templates)
        # Not str.format: braces may also be JSON.
        for placeholder, value in places.items():
            filled = [word.replace(placeholder, value) for word in filled]
        return filled


def _named(folders: Mapping[str, Path]) -> list[str]:
    return [f"{name}={folder}" for name, folder in folders.items()]


WHERE = ("--host", "{host}", "--port", PORT)
SERVED = (MODEL, "--served-model-name", NAME)
PRESETS = {
    "vllm": Preset(
        VLLM.program,
        (*VLLM.words, *SERVED, *WHERE),
        ("--version",),
        VLLM.install,
        adapters=lambda folders: ["--enable-lora", "--lora-modules", *_named(folders)],
    ),
    "sglang": Preset(
        SGLANG.program,
        (*SGLANG.words, *SERVED, *WHERE),
        ("version",),
        SGLANG.install,
        # Its batches have a slot for requests without an adapter too.
        adapters=lambda folders: (
            ["--max-loras-per-batch", str(len(folders) + 1), "--lora-paths", *_named(folders)]
        ),
    ),
    # It names its model by the folder, whatever the requests say.
    "trtllm": Preset(TRTLLM.program, (MODEL, *WHERE), (), TRTLLM.install, has_no_name=True),
    "llama.cpp": Preset(
        "llama-server",
        ("--model", MODEL, "--alias", NAME, *WHERE),
        ("--version",),
        "install llama.cpp (github.com/ggml-org/llama.cpp)",
        needs_gguf=True,
    ),
    "transformers": Preset(
        "transformers",
        ("serve", MODEL, *WHERE),
        ("version",),
        "pip install 'transformers[serving]'",
        backend="transformers",
        is_served_by_path=True,
    ),
    "llmopt": Preset(
        None,
        ("-m", "llmopt.cli.main", "serve-local", *SERVED, *WHERE),
        ("-c", "import llmopt; print(llmopt.__version__)"),
        "it is part of llmopt",
        adapters=lambda folders: [
            word for adapter in _named(folders) for word in ("--lora", adapter)
        ],
    ),
}


def preset(name: str) -> Preset:
    """The preset of that name, or one for a whole command line; raises `BadInput` where it is neither."""
    if name in PRESETS:
        return PRESETS[name]
    if PORT not in name:
        raise BadInput(
            f"--serve {name!r}: it is none of {', '.join(PRESETS)}, and no command line with {PORT} in it"
        )
    try:
        program, *arguments = shlex.split(name)
    except ValueError as error:
        raise BadInput(f"--serve {name!r}: {error}") from error
    return Preset(
        program,
        tuple(arguments),
        (),
        "give the program's path",
        is_served_by_path=NAME not in name and MODEL in name,
        has_no_name=NAME not in name,
    )


READY_PATH = "/health"
POLL_SECONDS = 0.1
ANSWER_SECONDS = 5.0
STOP_SECONDS = 10.0
VERSION_SECONDS = 120.0
LOG_LINES = 12


@contextmanager
def served(options: BenchOptions, progress: Progress | None = None) -> Iterator[BenchOptions]:
    """Start the server of `options.serve`, if any, yield the options that measure it, and stop it. BadInput:
    an unknown or unfit program, model or argument, or a server that is not ready in time."""
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
    model = _model(options, chosen)
    name, label = Path(model).name, Path((options.serve.split() or [""])[0]).name
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        port = listener.getsockname()[1]
    command = [program, *server_arguments(options, chosen, model, port)]
    progress = progress or Silent()
    version = version_of([program, *chosen.version]) if chosen.version else None
    served_name = model if chosen.is_served_by_path else name
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
            progress.note(f"{label} is ready after {seconds:.1f} s at {url}")
            started = {
                "preset": options.serve,
                "command": without_secrets(command),
                "version": version,
                "seconds_to_ready": seconds,
                "pid": process.pid,
            }
            is_backend_given = "backend" in options.model_fields_set
            yield options.model_copy(
                update={
                    "serve": None,
                    "serve_args": None,
                    "serve_program": None,
                    "base_url": url,
                    "backend": options.backend if is_backend_given else chosen.backend,
                    # None: the running server names it.
                    "model": None if chosen.has_no_name else served_name,
                    "tokenizer": options.tokenizer or model,
                    "max_model_len": options.max_model_len or _context(model, chosen),
                    "name": options.name or options.label or f"{label}-{name}",
                    "started_server": started,
                }
            )
        finally:
            with interrupts_held():
                stop(process)


def server_arguments(options: BenchOptions, chosen: Preset, model: str, port: int) -> list[str]:
    """A server's command line after its program; raises `BadInput` for malformed `--serve-args`."""
    arguments = chosen.arguments(model, Path(model).name, port)
    if options.loras:
        if chosen.adapters is None:
            raise BadInput(f"--lora: --serve {options.serve} takes no adapters at its start")
        arguments += chosen.adapters({name: path.resolve() for name, path in options.loras.items()})
    try:
        return [*arguments, *shlex.split(options.serve_args or "")]
    except ValueError as error:
        raise BadInput(f"--serve-args {options.serve_args!r}: {error}") from error


def _model(options: BenchOptions, chosen: Preset) -> str:
    name = options.model or DEFAULT_MODEL
    path = expanded(name)
    if path.is_file() and gguf_file_of(path) is not None:
        name = str(path.absolute())  # a link keeps its name; the server knows what it reads
    elif chosen.needs_gguf:
        raise BadInput(f"--serve {options.serve}: give a .gguf file as the model, not {name!r}")
    elif name in bundled_models() or path.exists():
        name = str(resolve_model(name).resolve())
    refuse_mock(expanded(name), "bench")
    return name


def _context(model: str, chosen: Preset) -> int | None:
    """The context length by the model's config, for a server whose model list lacks it."""
    config = Path(model) / "config.json"
    if not chosen.is_served_by_path or not config.is_file():
        return None
    length = read_json(config).get("max_position_embeddings")
    return length if isinstance(length, int) else None


def version_of(command: list[str]) -> str | None:
    """The last line with a digit of a program's version output; None if there is none."""
    try:
        how: dict[str, Any] = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
        done = subprocess.run(command, timeout=VERSION_SECONDS, **how)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = [line.strip() for line in (done.stderr + "\n" + done.stdout).splitlines()]
    versions = [line for line in lines if any(letter.isdigit() for letter in line)]
    return versions[-1][:200] if versions and done.returncode == 0 else None


def _wait_until_ready(
    process: subprocess.Popen[bytes], url: str, options: BenchOptions, log: IO[bytes]
) -> None:
    deadline, problem = time.perf_counter() + options.serve_timeout, None
    while not is_ready(url):
        if (code := process.poll()) is not None:
            problem = f"the server ended with code {code} before it was ready"
        elif time.perf_counter() > deadline:
            problem = f"not ready after {options.serve_timeout:g} s (--serve-timeout)"
        if problem is not None:
            raise BadInput(f"--serve {options.serve}: {problem}; {last_words(log)}")
        time.sleep(POLL_SECONDS)


def is_ready(url: str) -> bool:
    try:
        JsonClient({}, timeout=ANSWER_SECONDS).read(url + READY_PATH)
    except RequestFailed:
        return False
    return True


def last_words(log: IO[bytes]) -> str:
    size = os.fstat(log.fileno()).st_size
    data = os.pread(log.fileno(), 8192, max(0, size - 8192))
    lines = [line.strip() for line in data.decode("utf-8", "replace").splitlines()]
    last = [line for line in lines if line][-LOG_LINES:]
    return f"end of its log: {' | '.join(last)}" if last else "its log is empty"


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
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, sent)

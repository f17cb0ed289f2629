"""Server presets: command line and request format of llmopt, vLLM, SGLang, TensorRT-LLM, llama.cpp and
transformers."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...engine.deploy.engine_commands import SGLANG, TRTLLM, ServerCommand
from ...quant.base.atomic_io import expanded
from ...quant.base.errors import BadInput

HOST = "127.0.0.1"
MODEL, NAME, PORT = "{model}", "{name}", "{port}"


Arguments = Callable[[str, str, int], list[str]]
"""Takes a model, its served name and a port, and returns command-line arguments."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A server that a benchmark can start.

    Attributes:
        program: the executable, looked up beside this Python or on the PATH; None is this Python.
        arguments: (model, served name, port) to the command-line arguments.
        version: the arguments that print the version.
        install: how to install it.
        backend: the request format (`client.address.BACKENDS`).
        is_served_by_path: requests name the model by its path; the served name cannot be chosen.
        needs_gguf: it only loads GGUF files.
        has_no_name: the name of its model is only known from the running server.
        adapters: {name: folder} of LoRA adapters to command-line arguments; None: it loads none at its start.
    """

    program: str | None
    arguments: Arguments
    version: tuple[str, ...]
    install: str
    backend: str = "openai"
    is_served_by_path: bool = False
    needs_gguf: bool = False
    has_no_name: bool = False
    adapters: Callable[[Mapping[str, Path]], list[str]] | None = None

    def find(self, name: str, given: Path | None) -> str:
        """The program's path.

        Raises:
            BadInput: it is not installed.
        """
        if given is not None:
            if path := shutil.which(str(expanded(given))):
                return path
            raise BadInput(f"--serve-program {given} is no program that can be run")
        if self.program is None:
            return sys.executable
        beside = str(Path(sys.executable).parent)
        if path := shutil.which(self.program, path=beside) or shutil.which(self.program):
            return path
        raise BadInput(
            f"--serve {name}: there is no program {self.program!r} here: {self.install}, or name it with "
            "--serve-program"
        )


def _of_engine(engine: ServerCommand) -> Arguments:
    """The arguments of an engine that `serve-local --engine` knows too."""

    def arguments(model: str, name: str, port: int) -> list[str]:
        asked = {"host": HOST, "port": port}
        if "served_model_name" in engine.table:
            asked["served_model_name"] = name
        return engine.command(model, asked)[1:]

    return arguments


def _filling(*words: str) -> Arguments:
    """Words in which {model}, {name}, {host} and {port} are filled in."""

    def arguments(model: str, name: str, port: int) -> list[str]:
        values = {MODEL: model, NAME: name, "{host}": HOST, PORT: str(port)}
        # Not str.format: braces may also be JSON.
        return [_filled(word, values) for word in words]

    return arguments


def _filled(word: str, values: Mapping[str, str]) -> str:
    for placeholder, value in values.items():
        word = word.replace(placeholder, value)
    return word


def _named(folders: Mapping[str, Path]) -> list[str]:
    return [f"{name}={folder}" for name, folder in folders.items()]


WHERE = ("--host", "{host}", "--port", PORT)
SERVED = (MODEL, "--served-model-name", NAME)
PRESETS = {
    "vllm": Preset(
        "vllm",
        _filling("serve", *SERVED, *WHERE),
        ("--version",),
        "pip install vllm",
        adapters=lambda folders: ["--enable-lora", "--lora-modules", *_named(folders)],
    ),
    "sglang": Preset(
        SGLANG.program,
        _of_engine(SGLANG),
        ("version",),
        SGLANG.install,
        # Its batches have a slot for requests without an adapter too.
        adapters=lambda folders: (
            ["--max-loras-per-batch", str(len(folders) + 1), "--lora-paths", *_named(folders)]
        ),
    ),
    # It names its model by the folder, whatever the requests say.
    "trtllm": Preset(TRTLLM.program, _of_engine(TRTLLM), (), TRTLLM.install, has_no_name=True),
    "llama.cpp": Preset(
        "llama-server",
        _filling("--model", MODEL, "--alias", NAME, *WHERE),
        ("--version",),
        "install llama.cpp (github.com/ggml-org/llama.cpp)",
        needs_gguf=True,
    ),
    "transformers": Preset(
        "transformers",
        _filling("serve", MODEL, *WHERE),
        ("version",),
        "pip install 'transformers[serving]'",
        backend="transformers",
        is_served_by_path=True,
    ),
    "llmopt": Preset(
        None,
        _filling("-m", "llmopt.cli.main", "serve-local", *SERVED, *WHERE),
        ("-c", "from importlib.metadata import version; print(version('llmopt'))"),
        "it is part of llmopt",
        adapters=lambda folders: [word for each in _named(folders) for word in ("--lora", each)],
    ),
}


def preset(name: str) -> Preset:
    """The preset of that name, or one for a whole command line.

    Raises:
        BadInput: there is none.
    """
    if name in PRESETS:
        return PRESETS[name]
    if PORT in name:
        return _of_command(name)
    raise BadInput(
        f"--serve {name!r}: it is none of {', '.join(PRESETS)}, and no command line with {PORT} in it"
    )


def _of_command(line: str) -> Preset:
    """A server's whole command line, in which {model}, {name}, {host} and {port} are filled in."""
    try:
        program, *words = shlex.split(line)
    except ValueError as error:
        raise BadInput(f"--serve {line!r}: {error}") from error
    return Preset(
        program,
        _filling(*words),
        (),
        "give the program's path",
        is_served_by_path=NAME not in line and MODEL in line,
        has_no_name=NAME not in line,
    )

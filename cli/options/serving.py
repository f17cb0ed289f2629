"""`llmopt serve-local`: engine, address, served names and chat template."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer


@dataclass(frozen=True, slots=True)
class HandoverOptions:
    """Options for serving with another engine than llmopt's."""

    PANEL: ClassVar = "Another engine"

    engine: Annotated[
        str,
        typer.Option(
            help="llmopt, or vllm, sglang or trtllm: exec that server with these options."
        ),
    ] = "llmopt"
    pipeline_parallel_size: Annotated[
        int, typer.Option(help="Other engines: pipeline-parallel size.")
    ] = 1
    ray: Annotated[bool, typer.Option("--ray", help="vllm: distribute over a Ray cluster.")] = False
    print_command: Annotated[
        bool, typer.Option("--print-command", help="Other engines: print the command and exit.")
    ] = False


@dataclass(frozen=True, slots=True)
class ServedModelOptions:
    """The served name, chat template and parsers."""

    served_model_name: Annotated[
        str | None, typer.Option(help="Served model name. Default: the model's.")
    ] = None
    chat_template: Annotated[
        str | None,
        typer.Option(help="File with a Jinja chat template. Default: the model's."),
    ] = None
    tool_call_parser: Annotated[
        str | None,
        typer.Option(
            help="Tool-call parser, such as hermes, qwen3_coder or openai. Default: detected from the chat "
            "template."
        ),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        typer.Option(
            help="Reasoning parser: think, mistral or seed_oss. Default: detected from the chat template."
        ),
    ] = None
    pooling_type: Annotated[
        str | None,
        typer.Option(
            help="Pooling of embeddings: last, mean, cls or max. Default: the checkpoint's, if it has one."
        ),
    ] = None

    def for_app(self) -> dict[str, str | None]:
        """Keyword arguments for `create_app`.

        Raises:
            BadInput: no such parser, or a template file that cannot be read.
        """
        from ...engine.base.sampling_params import PoolingParams
        from ...engine.server.parsing.formats import reasoning_format, tool_format

        if self.tool_call_parser is not None:
            tool_format(self.tool_call_parser)
        if self.reasoning_parser is not None:
            reasoning_format(self.reasoning_parser)
        if self.pooling_type is not None:
            PoolingParams(self.pooling_type.lower())
        return {
            "chat_template": self.template(),
            "tool_call_parser": self.tool_call_parser,
            "reasoning_parser": self.reasoning_parser,
            "pooling_type": self.pooling_type,
        }

    def template(self) -> str | None:
        """The chat template from --chat-template.

        Raises:
            BadInput: its file cannot be read.
        """
        from ...quant.base.errors import BadInput

        if self.chat_template is None:
            return None
        try:
            return Path(self.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = (isinstance(error, OSError) and error.strerror) or "it is not UTF-8 text"
            raise BadInput(f"--chat-template {self.chat_template}: {reason}") from error

    def served_name(self, model: str) -> str:
        """The served name of `model`, a folder, a GGUF file or a name."""
        from ...quant.models import short_name

        path = Path(model).expanduser()
        return self.served_model_name or (short_name(path) if path.exists() else model)


@dataclass(frozen=True, slots=True)
class ServingOptions(ServedModelOptions):
    """Of a server: its address too."""

    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")
    ] = 8000
    as_json: Annotated[
        bool,
        typer.Option("--json", help="When ready, print url, model and pid as one JSON line."),
    ] = False

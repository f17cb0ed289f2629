"""Options of a served model, of its server's address, and of serving it with another engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ....quant.base.option import option


@dataclass(frozen=True, slots=True)
class HandoverOptions:
    """Options for serving with another engine than llmopt's."""

    PANEL: ClassVar = "Another engine"

    engine: str = option(
        "llmopt",
        "llmopt, or vllm, sglang or trtllm: exec that server with these options.",
        common=True,
    )
    pipeline_parallel_size: int = option(1, "Other engines: pipeline-parallel size.")
    ray: bool = option(False, "vllm: distribute over a Ray cluster.", flag="--ray")
    print_command: bool = option(
        False, "Other engines: print the command and exit.", flag="--print-command"
    )


@dataclass(frozen=True, slots=True)
class ServedModelOptions:
    """The served name, chat template and parsers."""

    served_model_name: str | None = option(
        None, "Served model name. Default: the model's.", common=True
    )
    chat_template: str | None = option(
        None, "File with a Jinja chat template. Default: the model's."
    )
    tool_call_parser: str | None = option(
        None,
        "Tool-call parser, such as hermes, qwen3_coder or openai. Default: detected from the chat "
        "template.",
        common=True,
    )
    reasoning_parser: str | None = option(
        None,
        "Reasoning parser: think, mistral or seed_oss. Default: detected from the chat template.",
    )
    pooling_type: str | None = option(
        None,
        "Pooling of embeddings: last, mean, cls or max. Default: the checkpoint's, if it has one.",
    )

    def served_name(self, model: str) -> str:
        """The served name of `model`, a folder, a GGUF file or a name."""
        from ....quant.models import short_name

        path = Path(model).expanduser()
        return self.served_model_name or (short_name(path) if path.exists() else model)


@dataclass(frozen=True, slots=True)
class ServingOptions(ServedModelOptions):
    """Options of a served model, and the address of its server."""

    host: str = option("127.0.0.1", "Address to listen on.", common=True)
    port: int = option(8000, "Port to listen on; 0 picks a free one.", span=(0, 65535), common=True)
    as_json: bool = option(
        False,
        "When ready, print url, model and pid as one JSON line.",
        flag="--json",
        common=True,
    )

"""The servers that `serve-local --engine`, `deploy --engine` and `bench --serve` know beside llmopt's own."""

from __future__ import annotations

from ...quant.base.errors import BadInput
from .sglang_command import SGLANG
from .translation import ServerCommand
from .trtllm_command import TRTLLM
from .vllm_command import VLLM

ENGINES = {engine.name: engine for engine in (VLLM, SGLANG, TRTLLM)}


def server_command(name: str) -> ServerCommand:
    """The server of that name.

    Raises:
        BadInput: there is none.
    """
    if name not in ENGINES:
        raise BadInput(f"--engine {name}: choose llmopt, {', '.join(ENGINES)}")
    return ENGINES[name]

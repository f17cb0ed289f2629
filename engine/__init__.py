"""The inference engine: scheduler (no torch), step plan, execution; API server and capacity planner.

`LLM` and its params are the public Python API. They load on first use, so that importing the planner does
not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..quant.base import processor  # before torch is loaded  # noqa: F401

if TYPE_CHECKING:
    from .base.sampling_params import SamplingParams
    from .llm import LLM, BeamSearchParams

__all__ = ["LLM", "BeamSearchParams", "SamplingParams"]

_HOME = {
    "LLM": ".llm",
    "BeamSearchParams": ".llm",
    "SamplingParams": ".base.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name], __package__), name)

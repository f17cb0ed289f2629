"""The inference engine: scheduler (no torch), step plan, execution; API server and capacity planner.

`LLM` and its params are the public Python API. They load on first use, so that importing the planner does
not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base import processor  # before torch is loaded  # noqa: F401
from ..base.exports import exporter

if TYPE_CHECKING:
    from .base.sampling_params import SamplingParams
    from .core.llm import LLM

__all__ = ["LLM", "SamplingParams"]

__getattr__ = exporter(
    __name__,
    {
        "LLM": ".core.llm",
        "SamplingParams": ".base.sampling_params",
    },
)

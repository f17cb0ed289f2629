"""Quantize, verify, serve and benchmark language models. The names that people import are in the folders:

    from llmopt.engine import LLM, SamplingParams
    from llmopt.quant import QuantizeRequest, quantize
    from llmopt.bench import BenchOptions, run_bench
    from llmopt.planner import PlanRequest, plan

Each loads what it needs at its first use.
"""

from __future__ import annotations

import os

if os.environ.get("LLMOPT_CPU"):  # the libraries read their variables when torch is first used
    from llmopt.base import processor as processor

__version__: str
__all__ = ["__version__"]


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from llmopt.base.version import VERSION

    return VERSION

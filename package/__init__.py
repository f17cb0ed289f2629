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
    from llmopt.quant.base import processor as processor

__version__ = "0.1.0"
"""Also in `pyproject.toml`. A constant: a checkout on the path has no metadata of an installed package."""

__all__ = ["__version__"]

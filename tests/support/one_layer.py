"""A worker that quantizes the first of many layers, and says how much memory it took beside the plan.

    torchrun --nproc-per-node 2 tests/support/one_layer.py MODEL OUTPUT [--method smoothquant ...]

The checkpoint may be one of `hollow_models`: nothing is read or written for the other layers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

from llmopt.quant.base import workers
from llmopt.quant.base.device import PeakMemory
from llmopt.quant.pipeline import pipeline, prepare
from llmopt.quant.pipeline import preflight as planning
from llmopt.quant.plan.journal import Journal
from llmopt.quant.plan.request import QuantizeRequest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("output", type=Path)
    parser.add_argument("--method", default="gptq")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--num-samples", type=int, default=32)
    parser.add_argument("--held-out", type=int, default=4)
    asked = vars(parser.parse_args())
    _watch()
    model, output = asked.pop("model"), asked.pop("output")
    request = QuantizeRequest.of(model, output, format="compressed-tensors", seq_len=512, **asked)
    pipeline.quantize(request)


def _watch() -> None:
    """Have the pipeline tell its memory behind the first layer, and end there."""
    seen: dict[str, Any] = {}
    plan = pipeline.preflight

    class Watched(PeakMemory):
        def __init__(self) -> None:
            super().__init__()
            seen["memory"] = self

    def planned(*arguments: Any) -> Any:
        seen["planned"] = plan(*arguments)
        return seen["planned"]

    def stop(self: Journal, index: int) -> None:
        workers.meet()
        facts = {"rank": workers.rank(), "used": seen["memory"].bytes}
        facts |= {"planned": seen["planned"].memory.bytes} if "planned" in seen else {}
        print(json.dumps(facts), flush=True)
        workers.meet()
        os._exit(0)

    pipeline.PeakMemory, pipeline.preflight = Watched, planned
    Journal.forget_hidden = stop
    # Of holes there is nothing to hash, no space for what they would become, and a layer's time is not asked.
    prepare._source_hashes = lambda checkpoint: {}
    pipeline._check_space = lambda session, journal: None
    planning.TIMED_FROM = math.inf


main()

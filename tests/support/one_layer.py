"""A worker that quantizes the first of many layers, and says how much memory it took beside the plan.

torchrun --nproc-per-node 2 one_layer.py MODEL OUTPUT
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from llmopt.quant.base import workers
from llmopt.quant.base.device import PeakMemory
from llmopt.quant.pipeline import pipeline
from llmopt.quant.plan.journal import Journal
from llmopt.quant.plan.request import QuantizeRequest


def main() -> None:
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
    words = {"method": "gptq", "format": "compressed-tensors", "bits": 4, "group_size": 64}
    size = {"num_samples": 32, "seq_len": 512, "held_out": 4}
    pipeline.quantize(QuantizeRequest.of(sys.argv[1], Path(sys.argv[2]), **words, **size))


main()

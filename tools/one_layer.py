"""A worker of `llmopt quantize` that ends behind the first layer, and says how much memory it took.

    torchrun --nproc-per-node 2 tools/one_layer.py MODEL --method gptq --output OUT ...

The checkpoint may be one of `hollow_models`: nothing is read or written for the other layers.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from llmopt.cli.main import main
from llmopt.quant.base import workers
from llmopt.quant.base.device import PeakMemory
from llmopt.quant.pipeline import estimate, pipeline, prepare
from llmopt.quant.plan.journal import Journal


def watch() -> None:
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
        facts = {"rank": workers.rank(), "used": seen["memory"].bytes}
        facts |= {"planned": seen["planned"].memory.bytes} if "planned" in seen else {}
        # torchrun's workers are unbuffered and share a pipe: `print` would write the line's end apart.
        sys.stdout.write(json.dumps(facts) + "\n")
        sys.stdout.flush()
        workers.meet()
        os._exit(0)

    pipeline.PeakMemory, pipeline.preflight = Watched, planned
    Journal.forget_hidden = stop
    # Holes have nothing to hash, and no space is needed for what they would become.
    prepare.weight_digests = lambda checkpoint: {}
    pipeline._check_space = lambda session, journal, expected: None
    estimate._distinct_layers = lambda plan: [0]  # the plan is that of the layer which is run


if __name__ == "__main__":
    watch()
    main()

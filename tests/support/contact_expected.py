"""Times that `llmopt contact` expects of a GPU, without one: `python -m tests.support.contact_expected h100`.

A Markdown table of the planner's times, and of the most that each may be, for the cases of the models' stages.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from llmopt.bench.contact.models import FULL, KV_BYTES, MODELS, config_of, planned_seconds
from llmopt.engine.planner.catalog import find_model
from llmopt.engine.planner.devices import find_device
from llmopt.engine.planner.memory import Deployment
from llmopt.engine.planner.plan_request import named_recipe

STAGES = (
    (MODELS[0], None, "bf16"),
    (MODELS[0], None, "int4"),
    (MODELS[0], None, "fp8"),
    ("qwen3-30b-a3b", FULL.layers, "bf16"),
    ("qwen3.5-27b", FULL.layers, "bf16"),
)


def main(gpu: str) -> None:
    device = find_device(gpu)
    (_, few), (many, long) = FULL.decode
    heads = f"decode, 1 × {few} | decode, batch {many} | prefill, {FULL.prefill}"
    print(f"| {device.name}, ms | weights | {heads} |\n|---|---|---:|---:|---:|")
    for name, layers, weights in STAGES:
        with TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(config_of(name, FULL, layers)))
            planned = find_model(folder)
        is_plain = weights == "bf16"
        recipe = planned.as_stored() if is_plain else named_recipe(weights, planned.shape)
        deployment = Deployment(planned.shape, recipe, KV_BYTES, 16)
        context = long if layers is None else few
        cases = (("decode", 1, few), ("decode", many, context), ("prefill", 1, FULL.prefill))
        times = [planned_seconds(deployment, device, name, *case) for case in cases]
        cells = " | ".join(f"{1e3 * time:.2f}, at most {1e3 * most:.2f}" for time, most in times)
        depth = "" if layers is None else f", {layers} layers"
        print(f"| {name}{depth} | {weights} | {cells} |")


if __name__ == "__main__":
    main(*sys.argv[1:])

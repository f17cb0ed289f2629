"""Rows of the field: `deployments.csv`, measurements of public sources, one row per metric.

Metrics of one load are one row here. These are not fitted:

* the TTFT under Poisson arrivals, and loads whose lengths the source does not state;
* the TTFT of requests that all come at once, and the mean of each one's TPOT;
* pipelines.

Under a rate the clients in flight follow from the measured times (Little's law). `llama-bench` times prompts
and answers apart: its answers follow a prompt that is in the cache.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import median

from llmopt.base.errors import BadInput
from llmopt.engine.planner.catalog import PlannedModel, find_model
from llmopt.engine.planner.devices import find_device
from llmopt.engine.planner.expected import CHUNK_TOKENS
from llmopt.engine.planner.plan_request import named_recipe
from llmopt.engine.planner.step_model import Parallelism
from llmopt.engine.planner.weights import WeightRecipe, recipe_for

from .rows import Row

ENGINES = {"vllm": "vllm", "sglang": "sglang", "tensorrt-llm": "trtllm", "llama.cpp": "llama.cpp"}
_SAME = ("gpu", "n_gpus", "engine", "model", "weights_dtype", "input_len", "output_len")
_LOAD = "concurrency_or_batch"
_FORMATS = (
    (r"bf16|fp16|f16", "bf16"),
    (r"fp8", "fp8"),
    (r"int8", "int8"),
    (r"nvfp4|fp4$", "nvfp4"),
    (r"int4|awq|W4A16", "int4"),
    (r"(Q\d\w+)", None),
)
_ENDING = re.compile(r"^meta-(?=llama)|-(instruct|fp8|awq|2507|0528|v0\.1|coder)(?=-|$)")
_GPU = re.compile(
    r"NVIDIA |GeForce |Tesla | Generation| HBM3| Server.*|(?<!A100) \d+GB.*| ?\(.*\)|-PCIE.*| GB10"
)
_SIZE = re.compile(r"(?:-|--)(tp|dp|ep)(?:[-_]size)?[ =](\d+)|--(data)-parallel-size[ =](\d+)")


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians of one load's metrics: times in seconds, output tokens per second of all GPUs; NaN: none."""

    ttft: float = nan
    tpot: float = nan
    throughput: float = nan


def read_field(path: Path) -> tuple[list[Row], int]:
    """The rows that the planner has a model and a GPU for, and how many loads it has not."""
    loads: dict[tuple[str, ...], list[dict[str, str]]] = defaultdict(list)
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            loads[tuple(row[name] for name in (*_SAME, _LOAD, "notes"))].append(row)
    found = list(map(_row, loads.values()))
    return [row for row in found if row is not None], found.count(None)


def _row(lines: Sequence[Mapping[str, str]]) -> Row | None:
    first = lines[0]
    name, _, rest = first["engine"].lower().partition(" ")
    lengths = [first[f"{side}_len"] for side in ("input", "output")]
    engine, load = ENGINES.get(name), first[_LOAD]
    is_told = all(length.isdigit() for length in lengths)
    if engine is None or not is_told or re.search(r"PP\d|Offline|Server", first["notes"] + load):
        return None
    prompt, output = map(int, lengths)
    try:
        model = find_model(_ENDING.sub("", first["model"].rsplit("/", 1)[-1].lower()))
        device = find_device(_GPU.sub("", first["gpu"].replace("-SXM4-", " ")).strip())
        recipe = _recipe(first["weights_dtype"], model)
    except BadInput:
        return None
    measured, gpus = _measured(lines, load, prompt), int(first["n_gpus"])
    clients = _clients(load, measured, output) or _queued(first["notes"], prompt, output)
    if device.bandwidth is None or not clients or measured == Measured():
        return None
    version = re.match(r"[\d.]+\w*", rest)
    return Row(
        model=model.name,
        device=device,
        engine=engine,
        version=version[0] if version else "",
        weights=recipe.name,
        prompt=max(1, prompt),
        output=max(1, output),
        concurrency=clients,
        parallel=_parallel(first["notes"], gpus),
        ttft_seconds=measured.ttft,
        tpot_seconds=measured.tpot,
        throughput=measured.throughput,
        cached=prompt - 1 if engine == "llama.cpp" and output > 1 and prompt > 1 else 0,
        drafts=0,
        wait_steps=0,
        chunk_tokens=CHUNK_TOKENS,
        fitted=True,
        group=f"{device.name}|{model.name}",
        count=len(lines),
        names={**first, "id": "|".join(first[key] for key in (*_SAME, _LOAD))},
        planned=model,
        recipe=recipe,
    )


def _measured(lines: Sequence[Mapping[str, str]], load: str, prompt: int) -> Measured:
    values: dict[str, list[float]] = defaultdict(list)
    for line in lines:
        value, metric = float(line["value"]), line["metric"]
        if metric.startswith(("tpot", "itl")) and "at once" not in load:
            values["tpot"].append(value / 1e3)
        elif metric.startswith("ttft") and not re.search(r"at once|Poisson", load):
            values["ttft"].append(value / 1e3)
        elif metric.startswith("output_throughput"):
            scale = int(line["n_gpus"]) if metric.endswith("per_gpu") else 1
            values["throughput"].append(scale * value)
        elif metric == "decode_throughput":
            values["tpot"].append(float(load) / value)
        elif metric == "prefill_throughput" and load == "1":
            values["ttft"].append(prompt / value)
    return Measured(**{name: median(found) or nan for name, found in values.items()})


def _clients(load: str, measured: Measured, output: int) -> int:
    if rate := re.match(r"([\d.]+) req/s", load):
        seconds = measured.tpot * output
        return max(1, round(float(rate[1]) * seconds)) if seconds == seconds else 0
    count = re.match(r"\d+", load)
    return int(count[0]) if count else 0


def _queued(notes: str, prompt: int, output: int) -> int:
    """Requests that TensorRT-LLM's table queues at once, by the lengths."""
    if not notes.startswith(("TP", "DEP")):
        return 0
    return 3000 if prompt <= 1024 >= output else 1500 if max(prompt, output) <= 8192 else 1000


def _parallel(notes: str, gpus: int) -> Parallelism:
    if groups := re.match(r"DEP(\d+)", notes):
        return Parallelism(1, ep=int(groups[1]), attention_dp=int(groups[1]))
    sizes = {m[1] or m[3]: int(m[2] or m[4]) for m in _SIZE.finditer(notes)}
    ranks = sizes.get("dp", 1) if "--enable-dp-attention" in notes else 1
    ep = gpus if "enable-expert-parallel" in notes else sizes.get("ep", 1)
    with suppress(BadInput):
        return Parallelism(max(1, gpus // ranks), ep=ep, attention_dp=ranks)
    return Parallelism(gpus)


def _recipe(dtype: str, model: PlannedModel) -> WeightRecipe:
    if model.name.startswith("gpt-oss"):
        return model.as_stored()
    for pattern, name in _FORMATS:
        if match := re.match(pattern, dtype):
            if name is None:
                return named_recipe(match[1], model.shape)
            return recipe_for(name, model.shape)
    raise BadInput(f"{dtype}: no such weights")

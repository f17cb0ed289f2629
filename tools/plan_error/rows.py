"""Measured deployments: rows of `silicon_sample.csv`, one per configuration, and the split into halves.

Rows of one configuration count once, by their medians: those equal in all columns but id, source and the two
measurements, and those that differ in the name of the model (DeepSeek-R1 and V3 are one shape) or in sizes
that mean the same. Rows whose tensor- or data-parallel size is the square of the expert-parallel one, with
the width of the experts split as often, are those of the plain size multiplied by it. Sizes past eight, which
no tensor parallelism of these models has, are ranks of attention data parallelism, and so is a size that
multiplies the batch into the client's concurrency, and the factor by which the experts have more ranks than
the attention. No deployment has more sequences than the client sends. `scripts.py` has what no column states.
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import nan
from pathlib import Path
from statistics import median

from llmopt.engine.planner.catalog import PlannedModel, find_model
from llmopt.engine.planner.devices import Device, find_device
from llmopt.engine.planner.error_bands import batch_regime
from llmopt.engine.planner.step_model import Parallelism
from llmopt.engine.planner.weights import WeightRecipe, recipe_for

from .scripts import chunk_tokens, draft_tokens, is_known, wait_steps

MOST_TP = 8
PACKAGED = "systems/silicon_sample.csv"
MEASURED_COLUMNS = ("id", "silicon_data_source", "silicon_ttft_ms", "silicon_tpot_ms")
_FORMATS = {"nvfp4": "nvfp4", "fp8": "fp8", "fp8_block": "fp8-block", "": "bf16"}
_ENDINGS = ("-fp8", "-nvfp4", "-instruct")


@dataclass(frozen=True, slots=True)
class Row:
    """One measured configuration. `fitted` says which half it is in, `cached` counts the prompt tokens that
    are not computed, `drafts` the draft tokens of a decode step, `wait_steps` the steps that a setting of the
    server lets a prompt wait, `chunk_tokens` the prompt tokens that a step holds, `count` the rows that its
    medians are of; `names` are the file's own columns. A time or a throughput that was not measured is
    NaN."""

    model: str
    device: Device
    engine: str
    version: str
    weights: str
    prompt: int
    output: int
    concurrency: int
    parallel: Parallelism
    ttft_seconds: float
    tpot_seconds: float
    throughput: float
    cached: int
    drafts: int
    wait_steps: int
    chunk_tokens: int
    fitted: bool
    group: str
    count: int
    names: Mapping[str, str]
    planned: PlannedModel
    recipe: WeightRecipe

    @property
    def conditions(self) -> tuple[object, ...]:
        """Model, hardware, engine and load: equal for the rows of one configuration in one half."""
        kind = self.model, self.device.name, self.engine, self.version, self.recipe.name
        load = self.prompt, self.output, self.concurrency, self.drafts, self.wait_steps
        return *kind, *load, self.parallel, self.fitted

    @property
    def regime(self) -> str:
        """The batch regime."""
        return batch_regime(self.concurrency)


def packaged_csv() -> Path:
    """The file in the installed package `aiconfigurator-core`.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    from importlib.util import find_spec

    spec = find_spec("aiconfigurator_core")
    for folder in (spec and spec.submodule_search_locations) or ():
        if (path := Path(folder) / PACKAGED).is_file():
            return path
    raise FileNotFoundError("install aiconfigurator-core, or give --data silicon_sample.csv")


def read_rows(path: Path) -> list[Row]:
    """The aggregated configurations of the file, in its order."""
    with path.open(encoding="utf-8", newline="") as file:
        raw = [row for row in csv.DictReader(file) if row["mode"] == "agg" and is_known(row)]
    same: dict[tuple[str, ...], list[dict[str, str]]] = defaultdict(list)
    for row in raw:
        same[tuple(value for key, value in row.items() if key not in MEASURED_COLUMNS)].append(row)
    alike: dict[tuple[object, ...], list[dict[str, str]]] = defaultdict(list)
    for group in same.values():
        alike[_configuration(group).conditions] += group
    return [_configuration(group) for group in alike.values()]


def _configuration(rows: list[dict[str, str]]) -> Row:
    first = rows[0]
    group = split_group(first)
    batch = round(float(first["batch_size"])) * max(1, _whole(first["attention_dp_size"]))
    parallel = parallelism(first)
    client = re.search(r"silicon_concurrency=(\d+)", first["silicon_data_source"])
    unstated = parallel.attention_dp == 1 < parallel.tp and not first["attention_dp_size"]
    if client and unstated and int(client[1]) == batch * parallel.tp:
        batch, parallel = int(client[1]), replace(parallel, tp=1, attention_dp=parallel.tp)
    elif client:
        batch = min(batch, int(client[1]))
    planned, recipe, device = described(first)
    drafts = draft_tokens(rows, parallel)
    return Row(
        model=planned.name,
        device=device,
        engine=first["backend"],
        version=first["backend_version"],
        weights=first["moe_quant_mode"] or first["gemm_quant_mode"],
        prompt=int(float(first["isl"])),
        output=int(float(first["osl"])),
        concurrency=batch,
        parallel=parallel,
        ttft_seconds=median(float(row["silicon_ttft_ms"]) for row in rows) / 1e3 or nan,
        tpot_seconds=median(float(row["silicon_tpot_ms"]) for row in rows) / 1e3,
        throughput=nan,
        cached=0,
        drafts=drafts,
        wait_steps=wait_steps(first, parallel, batch, drafts),
        chunk_tokens=chunk_tokens(first, parallel, batch, drafts),
        fitted=hashlib.sha256(group.encode()).hexdigest()[0] < "8",
        group=group,
        count=len(rows),
        names=first,
        planned=planned,
        recipe=recipe,
    )


def split_group(row: Mapping[str, str]) -> str:
    """The key by which the two halves are split: no load curve lies in both."""
    family = row["model_path"].rsplit("/", 1)[-1].split("-")[0].lower()
    sizes = (row[f"{name}_size"] for name in ("tp", "moe_ep", "attention_dp"))
    return "|".join((family, row["system"], *(str(_whole(size)) for size in sizes)))


def parallelism(row: Mapping[str, str]) -> Parallelism:
    """Ranks of a row, with the sizes that were multiplied by the expert-parallel size divided again."""
    tp, dp = _whole(row["tp_size"]), max(1, _whole(row["attention_dp_size"]))
    ep, width = max(1, _whole(row["moe_ep_size"])), max(1, _whole(row["moe_tp_size"]))
    if ep > 1 and tp * dp == ep * ep and width in (1, ep):
        tp, dp = (ep, 1) if dp == 1 else (1, ep)
    elif tp == dp and tp > 1 and ep == tp * dp:
        tp, dp, ep = 1, dp, dp
    elif tp > MOST_TP:
        tp, dp, ep = 1, tp, tp
    elif (width * ep) % (tp * dp) == 0 and width * ep > tp * dp:
        dp = width * ep // tp
    return Parallelism(tp, 1, ep if (tp * dp) % ep == 0 else 1, dp)


def described(row: Mapping[str, str]) -> tuple[PlannedModel, WeightRecipe, Device]:
    """Model, weight format and GPU of a row of the file."""
    name = _table_name(row["model_path"])
    weights = row["moe_quant_mode"] or row["gemm_quant_mode"]
    return _model(name), _recipe(name, weights), find_device(row["system"].removesuffix("_sxm"))


def _whole(text: str) -> int:
    return int(float(text)) if text else 1


def _table_name(path: str) -> str:
    name = path.rsplit("/", 1)[-1].lower()
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    name = name.removesuffix("-instruct")
    return find_model(name).name


@cache
def _model(name: str) -> PlannedModel:
    return find_model(name)


@cache
def _recipe(name: str, weights: str) -> WeightRecipe:
    model = _model(name)
    if weights == "int4_wo" or name.startswith("gpt-oss"):
        return model.as_stored()
    return recipe_for(_FORMATS[weights], model.shape)

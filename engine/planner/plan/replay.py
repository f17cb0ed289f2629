"""Re-evaluation of a saved plan for the actual load of a benchmark run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....quant.base.errors import BadInput
from ....quant.model.checkpoint import read_json
from ..device.devices import Device
from ..device.speed import Efficiency, decode_time, prefill_time
from ..memory.memory import Deployment, Reserve
from ..model.catalog import PlannedModel

_REQUIRED_KEYS = (
    "param_count",
    "weight_bytes",
    "kv_dtype",
    "kv_bytes_per_element",
    "context",
    "block_size",
    "engine_cache",
    "reserve",
    "efficiency",
    "gpu",
    "gpu_memory_bytes",
    "gpu_bandwidth",
    "gpu_peaks",
    "gpu_link_bytes_per_second",
    "tp",
    "pp",
)


@dataclass(frozen=True, slots=True)
class WrittenPlan:
    """A plan file written by `llmopt kv-plan --output`, and its model."""

    path: Path
    values: Mapping[str, Any]
    model: PlannedModel

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.values["weight_bytes"]

    @property
    def kv_tokens(self) -> int | None:
        """Planned KV-cache capacity of llmopt's engine in tokens; None for a plan of another engine."""
        cache = self.values["engine_cache"]
        return cache and cache["kv_tokens"]

    def times(self, prompt_tokens: int, context: int, batch: int) -> tuple[float, float] | None:
        """TTFT of a prompt and TPOT of `batch` sequences of `context` tokens, in seconds; None if the plan
        has no device speed."""
        values = self.values
        if not values["gpu_bandwidth"] or not values["gpu_peaks"]:
            return None
        device = Device(
            values["gpu"],
            values["gpu_memory_bytes"],
            bandwidth=values["gpu_bandwidth"],
            peaks=values["gpu_peaks"],
            link_bytes_per_second=values["gpu_link_bytes_per_second"],
        )
        deployment = Deployment(
            self.model.shape,
            self.model.as_stored(),
            values["kv_bytes_per_element"],
            values["block_size"],
            values["tp"],
            values["pp"],
        )
        efficiency, reserve = Efficiency(**values["efficiency"]), Reserve(**values["reserve"])
        prefill = prefill_time(deployment, device, prompt_tokens, reserve, efficiency)
        decode = decode_time(deployment, device, batch, context, efficiency)
        return prefill.seconds, decode.seconds


def read_plan(path: Path, model: PlannedModel) -> WrittenPlan:
    """Read a plan file for this model.

    Raises:
        BadInput: not a plan file, or a plan for another model.
    """
    values = read_json(path)
    if missing := [key for key in _REQUIRED_KEYS if key not in values]:
        raise BadInput(
            f"{path} is no plan ({missing[0]} is missing): write one with kv-plan --output"
        )
    if values["param_count"] != model.shape.num_parameters:
        raise BadInput(
            f"{path} is a plan for {values.get('model')} with {values['param_count']:,} parameters, but "
            f"{model.name} has {model.shape.num_parameters:,}: plan for this model"
        )
    return WrittenPlan(path, values, model)

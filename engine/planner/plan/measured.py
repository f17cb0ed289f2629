"""Measured roofline ceilings and efficiencies (MBU, MFU) of a benchmark run, instead of a data sheet's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ....quant.base.errors import BadInput
from ....quant.model.checkpoint import read_json
from ..device.devices import Device
from ..device.speed import Efficiency


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run's measured roofline ceilings (bandwidth, FLOP/s), and the MBU and MFU that it reached."""

    machine: str
    bandwidth: float
    flops: float
    efficiency: Efficiency
    is_cpu: bool

    def device(self, host: Device) -> Device:
        """`host` with the measured ceilings; one peak is used for every dtype."""
        peaks = {"bf16": self.flops, "float32": self.flops}
        return Device(
            name=host.name,
            memory_bytes=host.memory_bytes,
            memory_is_estimated=host.memory_is_estimated,
            bandwidth=self.bandwidth,
            peaks=peaks,
            link_bytes_per_second=host.link_bytes_per_second,
            kind=host.kind,
            source=f"measured on {self.machine}",
        )


def read_run(path: Path) -> MeasuredRun:
    """Read a run folder or its `result.json`.

    Raises:
        BadInput: there is no such result, or it has no roofline points for both phases.
    """
    file = path / "result.json" if path.is_dir() else path
    result = read_json(file).get("llmopt") or {}
    try:
        roofline = result["roofline"]
        ceilings = roofline["ceilings"]
        points = {point["phase"]: point for point in roofline["points"]}
        efficiency = Efficiency(
            bandwidth=points["decode"]["mbu"],
            compute=points["prefill"]["mfu"],
            seconds_per_layer=0.0,
            source=f"measured in {file}",
        )
        return MeasuredRun(
            machine=result["environment"]["machine"],
            bandwidth=ceilings["bandwidth"],
            flops=ceilings["flops"],
            efficiency=efficiency,
            is_cpu=str(result["identity"]["device"]).startswith("cpu"),
        )
    except (KeyError, TypeError) as error:
        raise BadInput(
            f"{file} holds no roofline with both phases ({error}): give the result of a llmopt bench run"
        ) from error

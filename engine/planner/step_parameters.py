"""Parameters of the step model, as fitted to measured deployments (`step_parameters.json`).

A parameter is a value times the factor of each tag of a deployment: its engine, GPU generation, weight dtype,
attention. An unmeasured tag has no factor. A correction is the rest of an engine's version, or of a kind of
model in a weight format on a GPU generation, shrunk by how few rows it rests on.

Rows of the planned machine move the level, shrunk by one row of no error, and narrow the band. Half of its
variance counts for the deployment, which all its loads share, half for the load, until rows tell.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from math import exp, log, sqrt
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

FITTED = "step_parameters.json"
Table = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class StepParameters:
    """Parameters of one deployment by name, the logarithms of its corrections, and their source."""

    values: Mapping[str, float]
    tpot_log: float = 0.0
    ttft_log: float = 0.0
    source: str = "fit"

    @property
    def tpot_factor(self) -> float:
        return exp(self.tpot_log)

    @property
    def ttft_factor(self) -> float:
        return exp(self.ttft_log)


@cache
def parameter_file() -> Mapping[str, Any]:
    """The file: `parameters` with units and standard errors, `corrections`, and what they were fitted to."""
    return json.loads(Path(__file__).with_name(FITTED).read_text(encoding="utf-8"))


def shared_value(name: str) -> float:
    return parameter_file()["parameters"][name]["value"]


def resolve(table: Table, tags: Iterable[str]) -> dict[str, float]:
    """Each parameter's value times the factors of the tags."""
    chosen = tuple(tags)
    resolved = {}
    for name, entry in table.items():
        value, factors = entry["value"], entry.get("factors", {})
        for tag in chosen:
            if tag in factors:
                value *= factors[tag]["value"]
        resolved[name] = value
    return resolved


@dataclass(frozen=True, slots=True)
class Deployed:
    """A deployment as the parameters see it: its engine, whose `version` is empty if it is not known, GPU
    generation, weight dtype, attention, and `kind`, dense or what mixture. `is_widened` is True if the GPU
    multiplies such weights in 16 bits only."""

    engine: str
    generation: str
    weights: str
    attention: str
    kind: str
    version: str = ""
    is_widened: bool = False

    @property
    def tags(self) -> tuple[str, ...]:
        tags = [self.engine, self.generation, self.weights, self.attention]
        if (era := _ERAS.get(self.engine)) and era[1].match(self.version):
            tags.append(era[0])
        if self.is_widened:
            tags.append("widened")
        return tuple(tags)

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of its corrections; no key of a version that is not known."""
        keys = (
            f"{self.engine}|{self.generation}|{self.weights}|{self.kind}|{self.attention}",
            f"{self.engine} {self.version}|{self.weights}|{self.kind}",
        )
        return keys if self.version else keys[:1]


_ERAS = {
    "vllm": ("vllm v0", re.compile(r"0\.[1-8]\.")),
    "trtllm": ("trtllm 1.0", re.compile(r"0\.|1\.0(\D|$)")),
}
"""Old engines with factors of their own: vLLM's first, whose host works between steps (0.9 to 0.11 removed
it), and TensorRT-LLM up to 1.0, where prompts wait longer."""


def fitted_parameters(deployed: Deployed) -> StepParameters:
    """The fitted parameters of a deployment, with its corrections."""
    file = parameter_file()
    tpot, ttft = (
        sum(file["corrections"][measure][key]["value"] for key in deployed.keys if key in known)
        for measure, known in file["corrections"].items()
    )
    return StepParameters(resolve(file["parameters"], deployed.tags), tpot, ttft)


def measured_parameters(
    bandwidth: float, compute: float, layer_seconds: float, source: str
) -> StepParameters:
    """Parameters of shares of the roofs that one machine reached, with the shared load parameters."""
    shares = {"bandwidth": bandwidth, "compute": compute}
    values = {}
    for name, entry in parameter_file()["parameters"].items():
        operator, quantity = name.split(".")
        shared = operator in ("load", "all_reduce", "all_to_all")
        values[name] = entry["value"] if shared else shares.get(quantity, 0.0)
    values |= {"layer.seconds": layer_seconds, "load.fixed": 0.0}
    return StepParameters(values, source=source)


PRIOR_ROWS = 1
"""Rows of no error that a level is shrunk by: the deployment and the load have equal variance."""
_QUANTILE = NormalDist().inv_cdf(0.95)

Factors = tuple[float, float]
"""Lowest and highest factor on a prediction that held 90 % of the measurements."""


def level(logs: tuple[float, ...]) -> float:
    """Logarithm of the correction by logarithms of measured / predicted."""
    return sum(logs) / (PRIOR_ROWS + len(logs))


def narrowed(prior: Factors, logs: tuple[float, ...], applied: float) -> Factors:
    """Factors on a prediction that was corrected by `applied`. `logs` are logarithms of measured / predicted
    before that; without any the factors are the prior's."""
    low, high = map(log, prior)
    variance = ((high - low) / (2 * _QUANTILE)) ** 2
    centre = ((low + high) / 2 + sum(logs)) / (PRIOR_ROWS + len(logs)) - applied
    mean = fmean(logs) if logs else 0.0
    spread = sum((value - mean) ** 2 for value in logs)
    own = (variance / 2 + spread) / max(1, len(logs))
    half = _QUANTILE * sqrt(own * (1 + 1 / (PRIOR_ROWS + len(logs))))
    return exp(centre - half), exp(centre + half)


@dataclass(frozen=True, slots=True)
class OwnRows:
    """Rows of one machine in logarithms of measured / predicted; throughput is predicted by the corrected
    TTFT and TPOT. They count for plans of that GPU and engine. `of_model` is True if they are rows of the
    planned model; else each row is another model."""

    gpu: str
    engine: str
    tpot: tuple[float, ...]
    ttft: tuple[float, ...]
    throughput: tuple[float, ...]
    of_model: bool

    @property
    def text(self) -> str:
        count = len(self.tpot)
        rows = "1 row" if count == 1 else f"{count} rows"
        return f"{rows} of this machine{'' if self.of_model else ', of other models'}"

    def band(self, measure: str, prior: Factors) -> Factors:
        logs = getattr(self, measure)
        return narrowed(prior, logs, 0.0 if measure == "throughput" else level(logs))

"""A session: a prepared request with plan, calibration data and signature."""

from __future__ import annotations

from dataclasses import dataclass

from ..calibration.calibration import Calibration
from ..layers.cached_calibration import StatisticsFolder
from ..plan.plan import QuantizePlan
from ..request.request import QuantizeRequest
from ..stream.layer_stream import LayerStream


@dataclass(frozen=True, slots=True)
class Session:
    """A prepared quantization request.

    Attributes:
        signature: digest of everything that the result's bytes depend on.
        statistics: folder of cached statistics of the float model; None: online calibration.
        vision: the layers of the vision tower and projector, where they are quantized too.
        notes: choices made for the user, one line each.
    """

    request: QuantizeRequest
    plan: QuantizePlan
    calibration: Calibration
    stream: LayerStream
    source_hashes: dict[str, str]
    signature: str
    statistics: StatisticsFolder | None
    notes: tuple[str, ...]
    vision: LayerStream | None = None

"""A request with everything read that its work needs: the plan, the calibration data, the signature."""

from __future__ import annotations

from dataclasses import dataclass

from ..calibration.calibration import Calibration
from ..layers.cached_calibration import StatisticsFolder
from ..plan.plan import Plan, QuantizeRequest
from ..stream.layer_stream import LayerStream


@dataclass(frozen=True, slots=True)
class Session:
    """A request that is ready to be carried out.

    Attributes:
        signature: digest of all that the bytes of the result depend on.
        statistics: where the statistics of the float model lie or will lie; None: measured on the way.
        notes: choices made for the user, one line each.
    """

    request: QuantizeRequest
    plan: Plan
    calibration: Calibration
    stream: LayerStream
    source_hashes: dict[str, str]
    signature: str
    statistics: StatisticsFolder | None
    notes: tuple[str, ...]

"""Weight quantization: schemes, methods, on-disk formats, and the layer-by-layer pipeline.

`quantize` and its request are the public Python API. They load on first use, so that packages above that
need no torch (the planner, `--help`) do not load it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.exports import exporter

if TYPE_CHECKING:
    from .convert.verify import verify
    from .methods.options import MethodOptions
    from .pipeline.pipeline import QuantizeResult, quantize
    from .plan.request import QuantizeRequest

__all__ = ["MethodOptions", "QuantizeRequest", "QuantizeResult", "quantize", "verify"]

__getattr__ = exporter(
    __name__,
    {
        "MethodOptions": ".methods.options",
        "QuantizeRequest": ".plan.request",
        "QuantizeResult": ".pipeline.pipeline",
        "quantize": ".pipeline.pipeline",
        "verify": ".convert.verify",
    },
)

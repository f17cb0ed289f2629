"""Column `rtn`: round-to-nearest without calibration as compressed-tensors, loaded by transformers."""

from __future__ import annotations

from .case import Case, Verdict
from .quantized import written_and_loaded


class RtnColumn:
    """Exact: unquantized tensors are the source's, and transformers loads each parameter as ours."""

    name = "rtn"

    def verdict(self, case: Case) -> Verdict:
        """Quantize to 4 bits in groups, or to 8 bits per channel, and load the result."""
        return written_and_loaded(case, "rtn")

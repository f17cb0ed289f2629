"""Column `gptq`: GPTQ on a few tokens, written as compressed-tensors and loaded by transformers."""

from __future__ import annotations

from .case import Case, Verdict
from .quantized import written_and_loaded


class GptqColumn:
    """Exact: as in column `rtn`, and every layer was run for its calibration."""

    name = "gptq"

    def verdict(self, case: Case) -> Verdict:
        """Quantize to 4 bits in groups, or to 8 bits per channel, and load the result."""
        return written_and_loaded(case, "gptq")

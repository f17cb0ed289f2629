"""Columns `rtn`, `gptq` and `verify`: compressed-tensors checkpoints, loaded by transformers and proven."""

from __future__ import annotations

from dataclasses import dataclass

from llmopt.quant.convert.verify import PROVEN, verify

from tests.support.survey.case import Case, Verdict
from tests.support.survey.quantized import quantized, written_and_loaded


@dataclass(frozen=True, slots=True)
class QuantizedColumn:
    """Exact: unquantized tensors are the source's, and transformers loads each parameter as ours.

    With `gptq` every layer was run for its calibration.
    """

    name: str

    def verdict(self, case: Case) -> Verdict:
        """Quantize to 4 bits in groups, or to 8 bits per channel, and load the result."""
        return written_and_loaded(case, self.name)


class VerifyColumn:
    """Exact: proven, with every parameter of the model in the files or declared."""

    name = "verify"

    def verdict(self, case: Case) -> Verdict:
        """Verify what was written; refused where nothing was."""
        made = {method: quantized(case, method) for method in ("rtn", "gptq")}
        written = {method: one for method, one in made.items() if one.folder.is_dir()}
        if not written:
            return Verdict("refused", made["rtn"].refused)
        for method, one in written.items():
            report = verify(one.folder)
            if report.status != PROVEN or report.unchecked:
                return Verdict("wrong", f"{method}: {[*report.failures, *report.unchecked][0]}")
        return Verdict("exact", " and ".join(written))

"""Column `verify`: `llmopt verify` of the checkpoints of the columns rtn and gptq."""

from __future__ import annotations

from llmopt.quant.convert.verify import PROVEN, verify

from .case import Case, Verdict
from .quantized import quantized


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

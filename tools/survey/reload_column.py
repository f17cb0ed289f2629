"""Column `reload`: logits of the rtn checkpoint in transformers, against those of our dequantized weights."""

from __future__ import annotations

from typing import Any

import torch
from llmopt.quant.base.errors import first_line

from tests.support.survey.case import Case, Verdict
from tests.support.survey.quantized import dequantized, loaded, quantized

TOKENS = (1, 3, 4, 5, 6, 7, 8, 9)
TOLERANCE = 1e-5  # of the largest logit: sums of merged experts may be made in another order


class ReloadColumn:
    """Exact: the same logits in float32."""

    name = "reload"

    def verdict(self, case: Case) -> Verdict:
        """Run both models on the same tokens."""
        made = quantized(case, "rtn")
        if made.refused:
            return Verdict("refused", made.refused)
        plain = loaded(case, dequantized(case, made.folder))
        try:
            ours = _logits(plain)
        except Exception as error:  # such as for a missing picture
            return Verdict("missed", f"the plain model does not run on text: {first_line(error)}")
        theirs = _logits(loaded(case, made.folder, made.needs or ""))
        distance = float((theirs - ours).abs().max() / ours.abs().max())
        if not distance <= TOLERANCE:
            return Verdict("wrong", f"logits differ by {distance:.1e} of the largest")
        return Verdict("exact", made.needs or "")


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    return model(input_ids=torch.tensor([TOKENS])).logits

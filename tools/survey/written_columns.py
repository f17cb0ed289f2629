"""Columns `rtn`, `gptq`, `verify`, `reload`, `awq`: what is written is proven and loaded by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from llmopt.base.errors import BadInput, first_line
from llmopt.quant.convert.verify import PROVEN, verify
from llmopt.quant.model.architecture import Architecture, architecture_of
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.model.experts import with_experts_apart
from llmopt.quant.smoothing.discover import fold_layer
from llmopt.quant.smoothing.smoothing_map import with_smoothing

from tests.support.survey.case import Case, Verdict
from tests.support.survey.quantized import (
    LENGTH,
    WORDS,
    Quantized,
    dequantized,
    fused_again,
    loaded,
    quantized,
    source,
    write_plain,
    written_and_loaded,
)

TOKENS = (1, 3, 4, 5, 6, 7, 8, 9)
SAME = 1e-5  # of the largest logit: sums of merged experts may be made in another order


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


class ReloadColumn:
    """Exact: the rtn checkpoint has the logits of our dequantized weights in transformers, in float32."""

    name = "reload"

    def verdict(self, case: Case) -> Verdict:
        """Run both models on the same tokens."""
        made = quantized(case, "rtn")
        if made.refused:
            return Verdict("refused", made.refused)
        ids = torch.tensor([TOKENS])
        try:
            ours = logits(loaded(case, dequantized(made.folder)), ids)
        except Exception as error:  # such as for a missing picture
            return Verdict("missed", f"the plain model does not run on text: {first_line(error)}")
        change = distance(ours, logits(loaded(case, made.folder, made.needs or ""), ids))
        if not change <= SAME:
            return Verdict("wrong", f"logits differ by {change:.1e} of the largest")
        return Verdict("exact", made.needs or "")


class AwqColumn:
    """Exact: discovered folds leave the logits, and the checkpoint has those of our reader's weights.

    Where transformers cannot load it, `verify` must prove it.
    """

    name = "awq"

    def verdict(self, case: Case) -> Verdict:
        """Discover, fold, quantize, and load with transformers."""
        checkpoint = with_experts_apart(Checkpoint(source(case)))
        try:
            architecture = with_smoothing(checkpoint, architecture_of(checkpoint))
            folds, state = folded(checkpoint, architecture)
        except BadInput as error:
            return Verdict("refused", str(error).replace(str(case.folder), "")[:160])
        output = write_plain(case.folder / "awq-folded", state, checkpoint.config)
        plain = [loaded(case, folder) for folder in (checkpoint.folder, output)] if folds else []
        change = distance(*both_logits(plain)) if folds else 0.0
        if not change < SAME:
            return Verdict("wrong", f"{folds} folds change the logits by {change:.1e}")
        made = quantized(case, "awq")
        if not made.folder.exists():
            return Verdict("refused", made.refused.replace(str(case.folder), "")[:160])
        return read_back(case, made, folds)


def read_back(case: Case, made: Quantized, folds: int) -> Verdict:
    """Read the written checkpoint by transformers; where it cannot, by our second reader."""
    if made.needs is None:
        return proven(made, f"{folds} folds; transformers does not load it")
    plain = loaded(case, dequantized(made.folder))
    try:
        change = distance(*both_logits([plain, loaded(case, made.folder, made.needs)]))
    except Exception as error:  # transformers fails on packed weights in many ways
        return proven(made, f"{folds} folds; not loaded: {first_line(error)}"[:140])
    if not change < SAME:
        return Verdict("wrong", f"transformers loads logits that differ by {change:.1e}")
    return Verdict("exact", f"{folds} folds")


def proven(made: Quantized, detail: str) -> Verdict:
    report = verify(made.folder)
    if report.failures:
        return Verdict("wrong", report.failures[0])
    return Verdict("exact", f"{detail}, verify proves it")


def folded(
    checkpoint: Checkpoint, architecture: Architecture
) -> tuple[int, dict[str, torch.Tensor]]:
    """How many folds there are, and the tensors with random scales in every one."""
    state = {name: checkpoint.tensor(name) for name in checkpoint.names}
    folds = 0
    for index, family in enumerate(architecture.layers):
        start = architecture.layer_prefix(index) + "."
        tensors = {n.removeprefix(start): t for n, t in state.items() if n.startswith(start)}
        folds += fold_layer(family, tensors, index)
        state |= {start + name: tensor for name, tensor in tensors.items()}
    return folds, fused_again(checkpoint, state)


def both_logits(both: Sequence[Any]) -> list[torch.Tensor]:
    """Logits of two models on the same random tokens."""
    ids = torch.randint(3, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    return [logits(model, ids, use_cache=False) for model in both]


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    return model(input_ids=ids, **options).logits


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference of logits, relative to the largest logit of the first."""
    return float((one - other).abs().max() / one.abs().max())
